"""A report as a picture: a histogram in the terminal, and an SVG file with nothing but shapes and text."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.sim.capacity import Report, StageLoad, Target

BAR = 40
"""Characters of the longest bar in a terminal."""

_WIDTH, _MARGIN, _LABEL = 760, 24, 150
_PANEL, _ROW = 220, 34
_TEXT, _QUIET, _BAR, _MARK, _WARN = "#222222", "#777777", "#4477aa", "#cc6677", "#ee8866"
_CROWDED = 0.9


class Bin(NamedTuple):
    """How many values lie between two numbers; the last bin takes what is larger, too."""

    low: float
    high: float
    number: int


def bins(ordered: Sequence[float], number: int) -> list[Bin]:
    """Return a histogram of ascending values from 0 to their 99th percentile.

    What is beyond is in the last bin.
    """
    if not ordered:
        return []
    most = ordered[int(0.99 * (len(ordered) - 1))]
    width = most / number if most > 0.0 else 1.0 / number
    counts = [0] * number
    for value in ordered:
        counts[min(int(value / width), number - 1)] += 1
    return [Bin(place * width, (place + 1) * width, each) for place, each in enumerate(counts)]


def histogram(ordered: Sequence[float], number: int = 12) -> list[str]:
    """Return a histogram of ascending seconds as lines of text."""
    found = bins(ordered, number)
    highest = max((each.number for each in found), default=0)
    lines: list[str] = []
    for place, each in enumerate(found, start=1):
        edge = f"< {each.high:7.3f} s" if place < len(found) else f">={each.low:8.3f} s"
        bar = "█" * round(BAR * each.number / highest)
        lines.append(f"{edge} {bar} {each.number}")
    return lines


def svg(report: Report, target: Target | None = None) -> str:
    """Return a picture of the times to first audio, and of what each stage had to do."""
    height = 2 * _MARGIN + 60 + _PANEL + 60 + _ROW * len(report.stages)
    asked = report.workload
    title = (
        f"{asked.pipeline}: {asked.rate:g} requests/s for {asked.duration_s:g} s, seed {asked.seed}"
    )
    ends = f"{report.requests} requests, {report.finished} finished, {report.interrupted} with underruns"
    size = f'viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        _text(_MARGIN, _MARGIN + 6, title, size=16),
        _text(_MARGIN, _MARGIN + 28, f"{ends}. Time to first audio:", color=_QUIET),
        *_times(report, target, top=_MARGIN + 60),
        *_loads(report.stages, top=_MARGIN + 60 + _PANEL + 50),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _times(report: Report, target: Target | None, top: float) -> list[str]:
    """Draw the histogram with its percentiles, and the target."""
    found = bins(report.ttfas_s, 38)
    if not found:
        return [_text(_MARGIN, top + 20, "no request finished", color=_QUIET)]
    inner = _WIDTH - 2 * _MARGIN
    longest = max(found[-1].high, 0.0 if target is None else target.ttfa_p95_s * 1.05)
    highest = max(each.number for each in found)
    scale, bottom = inner / longest, top + _PANEL
    parts = [
        _rect(
            _MARGIN + each.low * scale,
            bottom - each.number / highest * (_PANEL - 40),
            max((each.high - each.low) * scale - 1, 0.5),
            each.number / highest * (_PANEL - 40),
            _BAR,
        )
        for each in found
    ]
    marks = [("p50", report.ttfa_s.p50), ("p95", report.ttfa_s.p95)]
    for row, (name, at_s) in enumerate(marks):
        parts += _mark(
            _MARGIN + at_s * scale, top + 14 * row, bottom, f"{name} {at_s:.3f} s", _TEXT
        )
    if target is not None:
        name = f"target {target.ttfa_p95_s:g} s"
        parts += _mark(_MARGIN + target.ttfa_p95_s * scale, top + 28, bottom, name, _MARK)
    ends = ((0.0, "start"), (longest, "end"))
    return parts + [
        _text(_MARGIN + at_s * scale, bottom + 16, f"{at_s:.2f} s", color=_QUIET, anchor=anchor)
        for at_s, anchor in ends
    ]


def _loads(stages: Sequence[StageLoad], top: float) -> list[str]:
    """Draw each stage's utilisation as a share of a full bar."""
    inner = _WIDTH - 2 * _MARGIN - _LABEL - 230
    parts: list[str] = []
    for number, each in enumerate(stages):
        y = top + _ROW * number
        share = min(each.utilisation, 1.0)
        color = _BAR if share < _CROWDED else _WARN
        waits = f"{each.utilisation:.0%} busy, first wait p95 {each.first_wait_s.p95:.3f} s"
        x = _MARGIN + _LABEL
        parts += [
            _text(_MARGIN, y + 15, f"{each.stage} × {each.replicas}"),
            _rect(x, y, inner, 20, "#eeeeee"),
            _rect(x, y, inner * share, 20, color),
            _text(x + inner + 10, y + 15, waits, color=_QUIET),
        ]
    return parts


def _mark(x: float, top: float, bottom: float, name: str, color: str) -> list[str]:
    is_right = x > _WIDTH * 0.8
    line = f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top:.1f}" y2="{bottom:.1f}" stroke="{color}"/>'
    anchor = "end" if is_right else "start"
    return [line, _text(x - 4 if is_right else x + 4, top + 10, name, color=color, anchor=anchor)]


def _rect(x: float, y: float, width: float, height: float, color: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{color}"/>'
    )


def _text(
    x: float, y: float, text: str, *, color: str = _TEXT, size: int = 13, anchor: str = "start"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}" font-size="{size}" text-anchor="{anchor}">'
        f"{escape(text)}</text>"
    )
