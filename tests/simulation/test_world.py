"""What a simulated world does when little goes wrong, and how it is driven."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from stretto.core.graph import Limits, StageSpec
from stretto.sim.storm import shapes, storm
from stretto.sim.world import Habits, World
from stretto.types import ChannelId
from tests.core.builders import TEXT, A, B, C, D, line_of_2, line_of_3

if TYPE_CHECKING:
    from stretto.core.graph import Deployment

CHANNELS = (ChannelId("1.1"), ChannelId("1.2"))
TWO_OF = tuple(
    StageSpec(id=stage, slots=2, replicas=2, chunk_timeout_s=3.0) for stage in (A, B, C, D)
)
MILD = Habits(chunk_bytes=800, death=0.02, boundary=0.3)


def served(deployed: Deployment, seed: int, habits: Habits, *, check_every: int = 1) -> World:
    """Return a world after twelve requests and some more seconds, shut down and checked."""
    world = World(deployed, seed=seed, habits=habits, check_every=check_every)
    for channel in CHANNELS:
        world.open_channel(channel)

    def arrive() -> None:
        pipeline = world.random.choice(deployed.pipelines)
        outputs = () if world.chance(0.5) else (world.random.choice(pipeline.outputs).name,)
        world.submit(world.random.choice(CHANNELS), pipeline.name, (TEXT,), outputs)

    at_s = 0.0
    for _ in range(12):
        at_s += world.upto(0.3)
        world.after(at_s, arrive)
    world.run(until=at_s + 30.0)
    world.finish()
    return world


@pytest.mark.slow
def test_all_units_of_finished_requests_arrive_although_replicas_die() -> None:
    """A finished request has every unit that an undisturbed one has, also when tasks were repeated."""
    finished = deaths = retried = 0
    for seed in range(8):
        world = served(line_of_3(stages=TWO_OF), seed, MILD)
        expected = 3**3 * world.habits.units_per_chunk
        for request, terminal in world.terminals.items():
            if terminal == "Finish":
                finished += 1
                assert sum(world.clients[request].units.values()) == expected
        counters = world.router.statistics().counters
        deaths += counters.replica_deaths
        retried += counters.retried
    assert min(finished, deaths, retried) > 0, "the world is not what this test is about"


@pytest.mark.slow
def test_an_undisturbed_world_finishes_everything() -> None:
    """Without faults every request of every shape finishes."""
    for deployed in shapes(Limits()).values():
        world = served(deployed, 1, Habits())
        assert set(world.terminals.values()) == {"Finish"}


@pytest.mark.slow
def test_the_same_seed_gives_the_same_world() -> None:
    """Two worlds of one seed see the same events and end alike."""
    one, two = (storm(5) for _ in range(2))
    assert (one.events, one.terminals, one.now) == (two.events, two.terminals, two.now)


@pytest.mark.slow
def test_how_often_it_is_checked_changes_nothing_else() -> None:
    """A world that is checked every thousand events takes the same course."""
    often, seldom = (
        served(line_of_2(stages=TWO_OF), 3, MILD, check_every=number) for number in (1, 1000)
    )
    assert (often.events, often.terminals) == (seldom.events, seldom.terminals)


@pytest.mark.slow
def test_invariants_are_checked_after_each_so_many_events() -> None:
    """And once more at the end."""
    world = served(line_of_2(stages=TWO_OF), 3, MILD, check_every=10)
    assert world.checks == world.events.total() // 10 + 1
