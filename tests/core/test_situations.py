"""Situations from the field, at the level of the router alone."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import pytest

from stretto.core import commands as do
from stretto.core import events as on
from stretto.core.graph import EdgeMode, Limits, StageSpec
from stretto.core.requests import RequestState
from stretto.errors import FailureKind
from stretto.sim.world import Habits, World
from stretto.types import PipelineName, RequestId
from tests.core.builders import (
    API,
    AUDIO,
    FULL,
    R1,
    STREAM,
    TEXT,
    A,
    B,
    C,
    Checked,
    aborted,
    cancelled,
    consumed,
    deployment,
    died,
    drained,
    edge,
    finished,
    inline,
    is_empty,
    line_of_2,
    line_of_3,
    of,
    passed,
    pipeline,
    produced,
    ready,
    replica,
    started,
    submitted,
    task,
    terminals,
)

if TYPE_CHECKING:
    from stretto.types import Recovery

P = PipelineName("p")


def test_situation_A1_an_upstream_chunk_never_arrives() -> None:
    """One request's source goes silent: it alone fails, in time, and its slots serve the next."""
    quiet = StageSpec(id=A, slots=9, chunk_timeout_s=1.0)
    router = started(
        line_of_2(
            stages=(
                quiet,
                StageSpec(id=B, slots=9),
            )
        )
    )
    good = [RequestId(f"1.1-{number}") for number in range(2, 10)]
    router.feed(submitted(R1), produced(A), consumed(1, now=0.1))
    for request in good:
        router.feed(submitted(request, now=0.1), produced(A, request=request, now=0.2))
    for request in good:
        router.handle(finished(A, request=request, now=0.9))
    failures: list[tuple[float, do.Fail]] = []
    while (when := router.next_deadline()) is not None and when <= 1.5:
        failures += [(when, c) for c in router.handle(passed(when)) if isinstance(c, do.Fail)]
    ((at, fail),) = failures
    assert at == 1.0
    assert fail.request == R1
    assert fail.failure.kind is FailureKind.DEADLINE_EXCEEDED
    assert "stage a made no progress" in fail.failure.detail
    for request in good:
        router.feed(produced(B, request=request, now=1.6))
        end = router.handle(finished(B, request=request, now=1.7))
        assert [type(c) for c in terminals(end)] == [do.Finish]
    router.feed(cancelled(A, now=1.8), cancelled(B, now=1.8))
    assert is_empty(router)


@pytest.mark.parametrize("chunks", [0, 1, 5])
def test_situation_A4_the_last_stage_ends_without_payload(chunks: int) -> None:
    """One empty terminal after the data, once, also when there was no data."""
    router = started(line_of_2())
    router.feed(submitted(), produced(A), finished(A))
    emits = [
        c for n in range(chunks) for c in router.handle(produced(B, n)) if isinstance(c, do.Emit)
    ]
    emits += [c for c in router.handle(finished(B)) if isinstance(c, do.Emit)]
    assert [(emit.seq, emit.final, emit.payload is None) for emit in emits] == [
        *[(seq, False, False) for seq in range(chunks)],
        (chunks, True, True),
    ]


@pytest.mark.slow
def test_situation_C1_the_death_of_each_replica_in_turn_leaves_the_engine_up() -> None:
    """Service goes on 1:2:2; later requests succeed, and those that failed name the stage."""
    pools = (
        StageSpec(id=B, replicas=2),
        StageSpec(id=C, replicas=2),
    )
    for stage in (A, B, C):
        world = World(line_of_3(stages=pools), seed=3, habits=Habits())
        world.open_channel(API)
        before = [world.submit(API, P, (TEXT,)) for _ in range(6)]
        world.run(until=0.6)
        victim = next(r for r in world.replicas if r.stage == stage)
        world.kill(victim)
        world.run(until=10.0)
        after = [world.submit(API, P, (TEXT,)) for _ in range(6)]
        world.run()
        assert {world.terminals[request] for request in after} == {"Finish"}
        assert {world.terminals[request] for request in before} <= {"Finish", "Fail"}
        for request in before:
            if world.terminals[request] == "Fail":
                assert f"{victim} died" in str(world.router.story(request))
        world.finish()


@pytest.mark.slow
def test_situation_C2_stranded_requests_go_through_the_full_clean_up() -> None:
    """A middle replica dies with six bound requests: every table is empty, survivors are whole."""
    pools = (
        StageSpec(id=A, slots=12),
        StageSpec(id=B, replicas=2, slots=6),
        StageSpec(id=C, slots=12),
    )
    world = World(line_of_3(stages=pools), seed=11, habits=Habits(chunks_per_input=4, load_s=0.01))
    world.open_channel(API)
    requests = [world.submit(API, P, (TEXT,)) for _ in range(12)]
    victim = next(r for r in world.replicas if r.stage == B)
    bound = 0
    while bound < 6:
        world.run(until=world.now + 0.001)
        bound = sum(f"b: dispatched to {victim}" in str(world.router.story(r)) for r in requests)
    world.kill(victim)
    world.run()
    survivors = [request for request in requests if world.terminals[request] == "Finish"]
    assert len(survivors) >= 6
    whole = 4**3 * world.habits.units_per_chunk
    assert {world.clients[request].units[AUDIO] for request in survivors} == {whole}
    assert is_empty(world.router)
    world.finish()


@pytest.mark.parametrize("mode", [STREAM, FULL])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_situation_E3_output_that_ends_on_a_chunk_boundary_is_sent_once(
    size: int, mode: EdgeMode
) -> None:
    """For totals around every multiple of the chunk size, units are contiguous and the total exact."""
    spec = pipeline(edge(TEXT, A), edge(A, B, mode=mode), outputs=[(AUDIO, B)])
    for total in sorted({size * k + offset for k in range(1, 20) for offset in (-1, 0, 1)}):
        router = started(deployment(spec))
        router.feed(submitted(), produced(A), finished(A))
        emits: list[do.Emit] = []
        for seq, at in enumerate(range(0, total, size)):
            chunk = on.ChunkProduced(
                now=0.0,
                task=task(B),
                seq=seq,
                payload=inline(f"{total}.{seq}"),
                offset=at,
                length=min(size, total - at),
            )
            emits += [c for c in router.handle(chunk) if isinstance(c, do.Emit)]
            router.handle(drained(seq + 1))
        emits += [c for c in router.handle(finished(B)) if isinstance(c, do.Emit)]
        assert [emit.final for emit in emits] == [False] * (len(emits) - 1) + [True]
        ends = [emit.offset + emit.length for emit in emits]
        assert [emit.offset for emit in emits] == [0, *ends][: len(emits)]
        assert (ends[-1], emits[-1].payload) == (total, None)


@pytest.mark.slow
def test_situation_B5_two_thousand_requests_aborted_at_random_progress() -> None:
    """Abort and finish share one clean-up: every map of the router is empty afterwards."""
    chance = Random(5)  # noqa: S311 - chance that repeats
    router = started(
        line_of_2(
            stages=(
                StageSpec(id=A, slots=15),
                StageSpec(id=B, slots=12),
            )
        )
    )
    router.is_checking = False
    for batch in range(100):
        requests = [RequestId(f"1.1-{20 * batch + number}") for number in range(20)]
        for request in requests:
            router.handle(submitted(request))
        for request in chance.sample(requests, 20):
            run_for_a_while(router, request, chance)
            for command in router.handle(aborted(request)):
                if isinstance(command, do.CancelTask):
                    router.handle(on.TaskCancelled(now=0.0, task=command.task))
        router.check_invariants()
        assert is_empty(router)
    assert router.statistics().counters.cancelled == 2000
    assert router.next_deadline() is None


def run_for_a_while(router: Checked, request: RequestId, chance: Random) -> None:
    """Let a request make some progress, if it has a slot."""
    if router.state_of(request) is not RequestState.RUNNING:
        return
    steps = [
        produced(A, request=request),
        consumed(1, request=request),
        produced(B, request=request),
        finished(A, request=request),
    ]
    router.feed(*steps[: chance.randrange(len(steps) + 1)])


def test_situation_A6_a_stage_that_needs_everything_is_dispatched_when_everything_is_there() -> (
    None
):
    """Behind a full edge: after the source's end, which waits for no window; then fed as it absorbs."""
    router = started(
        deployment(pipeline(edge(TEXT, A), edge(A, B, mode=FULL, chunks=4), outputs=[(AUDIO, B)]))
    )
    router.handle(submitted())
    for seq in range(9):
        assert of(do.Dispatch, router.handle(produced(A, seq))) == []
    commands = router.handle(finished(A))
    assert len(of(do.Dispatch, commands)) == 1
    fed = [len(of(do.Feed, commands))]
    while not of(do.CloseInput, commands):
        commands = router.handle(consumed(sum(fed)))
        fed.append(len(of(do.Feed, commands)))
    assert fed == [4, 4, 1]


def test_situation_C8_a_failure_without_a_name_evicts_nobody_and_a_death_evicts_once() -> None:
    """A hundred looks between a death and its report change nothing."""
    router = started(line_of_2())
    router.handle(submitted())
    for number in range(100):
        router.handle(on.PollerFailed(now=number * 0.01, stage=A, reason="broken"))
        router.handle(on.DeadlinePassed(now=number * 0.01))
    assert router.statistics().counters.replica_deaths == 0
    for _ in range(3):
        router.handle(died(replica(A), now=2.0))
    assert router.statistics().counters.replica_deaths == 1


@pytest.mark.parametrize(("recovery", "is_repeated"), [("retry", True), ("fail", False)])
def test_situation_C9_a_replica_that_dies_at_submit_time(
    recovery: Recovery,
    is_repeated: bool,  # noqa: FBT001 - a parameter of a test
) -> None:
    """What may be repeated is, once; what must not be fails once. Nothing runs twice at a time."""
    stages = (StageSpec(id=A, replicas=2, recovery=recovery), StageSpec(id=B))
    router = started(line_of_2(stages=stages))
    (first,) = [c for c in router.handle(submitted()) if isinstance(c, do.Dispatch)]
    commands = router.handle(died(first.replica))
    again = [c for c in commands if isinstance(c, do.Dispatch)]
    assert len(again) == is_repeated
    assert len(terminals(commands)) == (not is_repeated)
    assert all(c.replica != first.replica for c in again)


def test_situation_C13_restarts_are_bounded_and_the_refusal_says_when_to_come_back() -> None:
    """Deaths before any work, with growing pauses; then it is parked, tried later, and may recover."""
    limits = Limits(stage_unavailable_timeout_s=5.0, breaker_deaths=3, request_timeout_s=999.0)
    router = started(line_of_2(limits=limits))
    router.handle(submitted())
    now, starts = 0.0, list[float]()
    for incarnation in range(1, 4):
        router.handle(died(replica(A, 0, incarnation), now=now))
        when = router.next_deadline()
        assert when is not None
        starts.append(when - now)
        if incarnation < 3:
            now = when
            assert of(do.StartReplica, router.handle(passed(now)))
    assert starts[:2] == [0.1, pytest.approx(0.2)]
    (state,) = [s.state for s in router.replica_states() if s.replica.stage == A]
    assert state == "parked"
    (fail,) = terminals(router.handle(passed(now + 6.0)))
    assert isinstance(fail, do.Fail)
    assert (fail.failure.kind, fail.failure.retry_after_s) == (FailureKind.NO_REPLICA, 1.0)
    assert of(do.StartReplica, router.handle(passed(now + 61.0)))


def test_situation_N8_nobody_is_given_work_before_it_is_ready() -> None:
    """It has joined and loads: no task; what the stage is meant to have and has is told."""
    router = started(line_of_2(), loaded=False)
    router.handle(on.ReplicaJoined(now=0.0, replica=replica(A)))
    assert of(do.Dispatch, router.handle(submitted())) == []
    (stage,) = [each for each in router.statistics().stages if each.stage == A]
    assert (stage.target, stage.capacity) == (1, 0)
    ready(router, replica(B))
    assert (
        len(of(do.Dispatch, router.handle(on.ReplicaReady(now=3.0, replica=replica(A), slots=1))))
        == 1
    )
