"""Seeded storms: whatever goes wrong, each request ends once and nothing is left."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from stretto.errors import InvalidTransition
from stretto.sim.storm import shapes, storm, storms

if TYPE_CHECKING:
    from stretto.core.graph import Deployment
    from stretto.sim.world import World

# `STORM_SEEDS=5000 scripts/test tests/simulation` searches further.
SEEDS = int(os.environ.get("STORM_SEEDS", "200"))


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.slow
def test_row_F6_whatever_happens_each_request_ends_once_and_nothing_is_left(seed: int) -> None:
    """Each world ends clean; the seed of a failure is the parameter in its name."""
    world = storm(seed)
    assert set(world.terminals) == set(world.clients)


@pytest.mark.slow
def test_storms_are_storms() -> None:
    """Together they bring every end of a request, deaths, repeated tasks and a queue that is full."""
    seen, broken = storms(range(20))
    assert broken is None
    assert seen.worlds == 20
    assert set(seen.terminals) == {"Cancelled", "Fail", "Finish", "Reject"}
    assert seen.requests == sum(seen.terminals.values())
    assert min(seen.deaths, seen.repeated, seen.events) > 10


def test_a_storm_that_breaks_its_world_is_named_by_its_seed() -> None:
    """The storms before it count, those behind it are not run."""
    run: list[int] = []

    def breaking(seed: int, deployed: Deployment | None) -> World:
        run.append(seed)
        if seed == 2:
            raise InvalidTransition("two at once")
        return storm(seed, deployed)

    seen, broken = storms(range(1, 9), shapes()["line of 2"], run=breaking)
    assert seen.worlds == 1
    assert broken is not None
    assert (broken.seed, broken.error) == (2, "InvalidTransition: two at once")
    assert "breaking" in broken.trace
    assert run == [1, 2]
