"""Writes `docs/reference/router-table.md` from the router's own table; a test fails if it is stale.

.venv/bin/python -m scripts.router_table
"""

from __future__ import annotations

import inspect
from pathlib import Path

from stretto.core.requests import RequestState
from stretto.core.router import LATE, LEGAL

TARGET = Path(__file__).parents[1] / "docs/reference/router-table.md"

INTRODUCTION = """\
# The router's table

<!-- Written by `python -m scripts.router_table`; do not edit. -->

For each event about a request: what may become of the request, by the state it is in. A request that is not
known, or not any more, is `done`. A dash is impossible and raises `InvalidTransition`, with nothing changed.
*late* is counted, its payload is released, and nothing else happens; so is an event of a former attempt of a
task, in every state. A request may also change its state when a replica dies, a channel closes or a deadline
passes.
"""


def page() -> str:
    """Return the page's text."""
    parts = [INTRODUCTION, "| event | " + " | ".join(s.value for s in RequestState) + " |"]
    parts.append("| --- " * (1 + len(RequestState)) + "|")
    for event, moves in LEGAL.items():
        cells = [_cell(moves.get(state)) for state in RequestState]
        parts.append(f"| `{event.__name__}` | " + " | ".join(cells) + " |")
    parts += ["", "## What moves a request", "", "```text", *_arrows(), "```", ""]
    parts += ["## What a state means", "", "| state | the request waits |", "| --- | --- |"]
    parts += [f"| {state.value} | {_meaning(state)} |" for state in RequestState]
    return "\n".join(parts) + "\n"


def _cell(outcomes: tuple[RequestState, ...] | None) -> str:
    if outcomes is None:
        return "–"
    if outcomes == LATE:
        return "*late*"
    return " or ".join(state.value for state in outcomes)


def _arrows() -> list[str]:
    """Return one line per pair of states, with the events that lead from one to the other."""
    lines: list[str] = []
    for before in RequestState:
        for after in RequestState:
            events = [
                event.__name__
                for event, moves in LEGAL.items()
                if before is not after and after in moves.get(before, ())
            ]
            if events:
                lines.append(f"{before.value:>8} --> {after.value:<8}  {', '.join(events)}")
    return lines


def _meaning(state: RequestState) -> str:
    """Return the comment beside the member."""
    (line,) = (
        each for each in inspect.getsource(RequestState).splitlines() if f"{state.name} =" in each
    )
    return line.partition("# ")[2]


if __name__ == "__main__":
    TARGET.write_text(page())
