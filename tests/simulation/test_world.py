"""What a simulated world does when little goes wrong, and how it is driven."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

import msgspec
import pytest

from stretto.core import commands as do
from stretto.core.graph import Limits, StageSpec
from stretto.sim.storm import shapes, storm
from stretto.sim.world import Habits, World
from stretto.types import ChannelId, PipelineName
from tests.core.builders import TEXT, A, B, C, D, line_of_2, line_of_3

if TYPE_CHECKING:
    from stretto.core.commands import ReplicaState
    from stretto.core.graph import Deployment
    from stretto.types import Recovery, RequestId, StageId

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


Notices: TypeAlias = "defaultdict[tuple[StageId, int], list[ReplicaState]]"
"""What was announced about each place, in order."""

SHAKY = Habits(
    chunk_bytes=800, death=0.01, freeze=0.003, loss=0.5, delay=0.02, delay_s=10.0, repetition=0.3
)
"""Links are late, break, and say things twice; some are late for so long that it looks like a death."""

PATIENT = tuple(
    StageSpec(id=stage, slots=2, replicas=2, progress_timeout_s=6.0) for stage in (A, B, C)
)


@pytest.mark.slow
def test_situation_N3_membership_settles_on_the_truth() -> None:
    """Whatever links lost, held up or repeated: in the end those that live are ready, and announced so."""
    seen: Counter[str] = Counter()
    for seed in range(12):
        notices: Notices = defaultdict(list)

        def note(
            _: object, commands: tuple[do.AnyCommand, ...], notices: Notices = notices
        ) -> None:
            for command in commands:
                if isinstance(command, do.Announce):
                    notices[command.state.replica[:2]].append(command.state)

        world = World(line_of_3(stages=PATIENT), seed=seed, habits=SHAKY, observe=note)
        world.open_channel(CHANNELS[0])
        for number in range(12):
            world.run(until=number * 0.3)
            world.submit(CHANNELS[0], PipelineName("p"), (TEXT,))
        world.run(until=400.0)
        assert set(world.terminals) == set(world.clients)
        living = {each.id for each in world.replicas.values() if each.is_alive}
        assert {s.replica for s in world.router.replica_states() if s.state == "ready"} == living
        assert {states[-1].replica for states in notices.values()} == living
        assert len(living) == 6
        for states in notices.values():
            assert states[-1].state == "ready"
            numbers = [state.replica.incarnation for state in states]
            assert numbers == sorted(numbers)
            for before, after in pairwise(states):
                assert before.state != "dead" or after.replica != before.replica
                seen[f"{before.state}, {after.state}"] += 1
        world.finish()
    for change in ("ready, suspect", "suspect, ready", "suspect, dead", "ready, dead"):
        assert seen[change], f"the world is not what this test is about: {seen}"


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
@pytest.mark.parametrize("recovery", ["retry", "replay"])
def test_row_M8_and_row_M7_every_piece_is_heard_once_although_replicas_die(
    recovery: Recovery,
) -> None:
    """Pieces and companions come at random moments; who finishes has all of them, and nothing twice."""
    stages = tuple(msgspec.structs.replace(stage, recovery=recovery) for stage in TWO_OF)
    finished = retried = 0
    for seed in range(12):
        world = World(line_of_3(stages=stages), seed=seed, habits=MILD)
        world.open_channel(CHANNELS[0])
        sent: Counter[RequestId] = Counter()
        for _ in range(4):
            leader = dictated(world, sent, companions=1)
            dictated(world, sent, companion_of=leader)
        world.run(until=60.0)
        world.finish()
        for request, terminal in world.terminals.items():
            if terminal == "Finish":
                finished += 1
                expected = sent[request] * 3**3 * world.habits.units_per_chunk
                assert sum(world.clients[request].units.values()) == expected
        retried += world.router.statistics().counters.retried
    assert min(finished, retried) > 3, "the world is not what this test is about"


def dictated(
    world: World,
    sent: Counter[RequestId],
    *,
    companions: int = 0,
    companion_of: RequestId | None = None,
) -> RequestId:
    """Submit a request whose text comes in some pieces, and count them."""
    request = world.submit(
        CHANNELS[0],
        world.router.deployment.pipelines[0].name,
        (TEXT,),
        is_open=True,
        companions=companions,
        companion_of=companion_of,
    )
    sent[request] = 1 + world.random.randrange(6)
    at_s = 0.0
    for _ in range(sent[request] - 1):
        at_s += world.upto(0.4)
        world.after(at_s, lambda: world.append(request, TEXT))
    world.after(at_s + world.upto(0.4), lambda: world.close_input(request, TEXT))
    return request


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
