"""Pictures of a report are drawn from its numbers alone."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING

import pytest

from stretto.sim.capacity import Target, measure
from stretto.sim.picture import bins, histogram, svg
from tests.core.builders import A, B
from tests.simulation.test_capacity import line, workload

if TYPE_CHECKING:
    from stretto.sim.workload import Workload


def asked(rate: float = 2.0) -> Workload:
    """Return a small load."""
    return workload({A: "exponential:0.02", B: "rtf:0.05"}, rate=rate, duration_s=10.0)


def test_every_value_is_in_one_bin() -> None:
    """The last one takes what is far out."""
    values = [0.0, *(n / 100 for n in range(100)), 50.0]
    found = bins(values, 10)
    assert sum(each.number for each in found) == len(values)
    assert found[0].low == 0.0
    assert found[-1].high < 1.0
    assert bins([], 10) == []
    assert [each.number for each in bins([0.0, 0.0], 4)] == [2, 0, 0, 0]


def test_the_histogram_has_a_line_per_bin() -> None:
    """The longest bar is full; numbers stand beside bars."""
    lines = histogram([0.1, 0.1, 0.1, 0.2, 0.3, 9.0], 3)
    assert [line.split()[-1] for line in lines] == ["0", "3", "3"]
    assert "█" * 40 in lines[1]
    assert histogram([]) == []


@pytest.mark.parametrize("target", [None, Target(ttfa_p95_s=2.0)])
def test_the_picture_is_xml_with_the_numbers_in_it(target: Target | None) -> None:
    """Percentiles, every stage, and the target if there is one."""
    report = measure(line(1, 2), asked())
    root = ET.fromstring(svg(report, target))  # noqa: S314 - it is our own
    text = " ".join(root.itertext())
    for word in (f"p95 {report.ttfa_s.p95:.3f} s", "a × 1", "b × 2"):
        assert word in text
    assert ("target 2 s" in text) is (target is not None)


def test_a_picture_of_nothing_says_so() -> None:
    """No request came."""
    report = measure(line(1, 1), asked(rate=1e-9))
    assert report.requests == 0
    assert "no request finished" in svg(report)
