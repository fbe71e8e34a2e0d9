"""Memory is bounded by windows, not by how long a stream is or how slowly it is read."""

from __future__ import annotations

from typing import Literal

import pytest

from scripts.measure.stopped_reader import growth
from scripts.measure.tiny_chunks import slopes

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


async def test_situation_D1_memory_does_not_grow_with_the_length_of_a_stream() -> None:
    """Less than 1 KiB per 1,000 chunks in every process; `scripts.measure.tiny_chunks` takes 500,000."""
    found, _ = await slopes(120_000)
    assert len(found) == 4
    assert {name: slope for name, slope in found.items() if slope >= 1.0} == {}


@pytest.mark.parametrize("topology", ["process", "thread"])
async def test_row_Q15_memory_is_flat_while_nobody_reads(
    topology: Literal["process", "thread"],
) -> None:
    """Nothing more comes than the window allows; `scripts.measure.stopped_reader` waits a minute."""
    found, came = await growth(2.0, topology)
    assert came == 0
    assert {name: ratio for name, ratio in found.items() if ratio > 1.05} == {}
