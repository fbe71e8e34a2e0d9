"""Seeded service in a world that misbehaves: whatever happens, each request ends once and nothing is left."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from stretto.core import events as on
from stretto.core.graph import Limits, StageSpec
from stretto.sim.replicas import METHODS
from stretto.sim.world import Habits, World
from stretto.types import ChannelId
from tests.core.builders import TEXT, A, B, C, D, diamond, line_of_2, line_of_3, shared

if TYPE_CHECKING:
    from stretto.core.graph import Deployment

CHANNELS = (ChannelId("1.1"), ChannelId("1.2"))
TWO_OF = tuple(
    StageSpec(id=stage, slots=2, replicas=2, chunk_timeout_s=3.0) for stage in (A, B, C, D)
)
TIGHT = Limits(retention_bytes=6000, cancel_timeout_s=1.0, client_window_bytes=2000)
ROUGH = Habits(
    chunk_bytes=800,
    abort=0.1,
    slow_client=0.01,
    start_failure=0.1,
    task_failure=0.01,
    death=0.02,
    freeze=0.005,
    boundary=0.3,
    repetition=0.2,
)
"""Everything that can go wrong does; with these windows both chunks and bytes bind."""

MILD = Habits(chunk_bytes=800, death=0.02, boundary=0.3)


def shapes(limits: Limits) -> dict[str, Deployment]:
    """Return each shape of pipeline, with two replicas per stage."""
    return {
        "line of 2": line_of_2(limits=limits, stages=TWO_OF),
        "line of 3": line_of_3(limits=limits, stages=TWO_OF),
        "diamond": diamond(limits=limits, stages=TWO_OF),
        "shared": shared(limits=limits, stages=TWO_OF),
    }


def served(deployed: Deployment, seed: int, habits: Habits, *, is_rough: bool = False) -> World:
    """Return a world after twelve requests and some more seconds, shut down and checked."""
    world = World(deployed, seed=seed, habits=habits)
    for channel in CHANNELS:
        world.open_channel(channel)

    def arrive() -> None:
        pipeline = world.random.choice(deployed.pipelines)
        outputs = () if world.chance(0.5) else (world.random.choice(pipeline.outputs).name,)
        world.submit(world.random.choice(CHANNELS), pipeline.name, (TEXT,), outputs)

    def operate() -> None:
        replica = world.random.choice(list(world.replicas))
        replace = world.chance(0.5)
        world.tell(on.DrainRequested(now=world.now, replica=replica, replace=replace))
        for stage in deployed.stages:
            number = world.random.randint(1, 3)
            world.tell(on.ScaleRequested(now=world.now, stage=stage.id, replicas=number))

    def call() -> None:
        stages = () if world.chance(0.5) else (world.random.choice(deployed.stages).id,)
        method = world.random.choice(METHODS)[0]
        world.call(world.random.choice(CHANNELS), method, stages, timeout_s=world.upto(5.0))

    at_s = 0.0
    for _ in range(12):
        at_s += world.upto(0.3)
        world.after(at_s, arrive)
        if is_rough and world.chance(0.5):
            world.after(at_s + world.upto(0.3), call)
    if is_rough and world.chance(0.5):
        world.after(world.upto(at_s), operate)
        world.after(at_s + 0.1, lambda: world.close_channel(CHANNELS[0]))
    world.run(until=at_s + 30.0)
    world.finish()
    return world


@pytest.mark.parametrize("seed", range(100))
@pytest.mark.slow
def test_row_F6_whatever_happens_each_request_ends_once_and_nothing_is_left(seed: int) -> None:
    """A hundred rough worlds end clean; the seed of a failure is the parameter in its name."""
    name, deployed = list(shapes(TIGHT).items())[seed % 4]
    world = served(deployed, seed, ROUGH, is_rough=True)
    assert len(world.terminals) == 12, name


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
    one, two = (served(diamond(limits=TIGHT, stages=TWO_OF), 5, ROUGH) for _ in range(2))
    assert (one.events, one.terminals, one.now) == (two.events, two.terminals, two.now)
