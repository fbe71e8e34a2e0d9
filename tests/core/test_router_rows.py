"""Rows of the contract that concern replicas, each on the bare router."""

from __future__ import annotations

import pytest

from stretto.core import commands as do
from stretto.core import events as on
from stretto.core.graph import StageSpec
from stretto.errors import InvalidTransition
from stretto.types import ReplicaId, RequestId, StageId
from tests.core.builders import (
    AUDIO,
    R1,
    R2,
    A,
    B,
    Checked,
    cancelled,
    consumed,
    died,
    failed,
    finished,
    is_empty,
    line_of_2,
    of,
    passed,
    produced,
    ready,
    replica,
    started,
    submitted,
    task,
    terminals,
)

TWO = (StageSpec(id=A, replicas=2, slots=2), StageSpec(id=B, replicas=2, slots=2))


def busy(progress_timeout_s: float = 30.0) -> Checked:
    """Return a router whose request has gone through A and works at B."""
    stages = tuple(
        StageSpec(
            id=s, replicas=2, slots=2, progress_timeout_s=progress_timeout_s, chunk_timeout_s=999
        )
        for s in (A, B)
    )
    router = started(line_of_2(stages=stages))
    router.feed(submitted(), produced(A), finished(A), consumed(1))
    return router


def where(router: Checked, stage: StageId = B, request: RequestId = R1) -> ReplicaId:
    """Return the replica that a request's task was last dispatched to."""
    lines = str(router.story(request)).splitlines()
    name = [line.rpartition(" ")[2] for line in lines if f"{stage}: dispatched to" in line][-1]
    return next(state.replica for state in router.replica_states() if str(state.replica) == name)


def states(router: Checked, stage: StageId = B) -> list[str]:
    """Return where the replicas of a stage stand."""
    return [state.state for state in router.replica_states() if state.replica.stage == stage]


def test_row_E5_a_draining_replica_is_heard_and_an_evicted_one_is_not() -> None:
    """The former's chunk goes on; the latter's is released."""
    router = busy()
    home = where(router)
    router.handle(on.DrainRequested(now=0.0, replica=home))
    assert len(of(do.Emit, router.handle(produced(B)))) == 1
    commands = router.handle(died(home))
    assert do.StopReplica(replica=home) in commands
    late = router.handle(produced(B, 1))
    assert of(do.Emit, late) == []
    assert len(of(do.Release, late)) == 1


def test_row_E11_a_failed_poller_evicts_nobody() -> None:
    """No replica is named, so none goes; the request's story tells it."""
    router = busy()
    assert router.handle(on.PollerFailed(now=1.0, stage=B, reason="no idea")) == ()
    assert states(router) == ["ready", "ready"]
    assert "b: its poller starts again: no idea" in str(router.story(R1))
    assert router.handle(on.PollerFailed(now=1.0, stage=A, reason="nobody works there")) == ()


@pytest.mark.parametrize(
    "event",
    [
        died(replica(B, 7)),
        died(replica(B, -1)),
        died(replica(StageId("nobody"))),
        on.PollerFailed(now=0.0, stage=StageId("nobody"), reason=""),
    ],
    ids=str,
)
def test_row_E11_who_never_existed_can_not_be_evicted(event: on.AnyEvent) -> None:
    """It raises, and changes nothing."""
    router = busy()
    before = router.statistics()
    with pytest.raises(InvalidTransition):
        router.handle(event)
    assert router.statistics() == before


def test_row_E12_one_death_that_three_report_is_one_eviction_and_one_outcome() -> None:
    """The others are late."""
    router = started(line_of_2(stages=TWO))
    router.feed(submitted(R1), submitted(R2))
    commands = [c for _ in range(3) for c in router.handle(died(replica(A)))]
    assert len(of(do.StopReplica, commands)) == 1
    assert len(of(do.Dispatch, commands)) + len(terminals(commands)) == 1
    assert router.statistics().counters.replica_deaths == 1
    assert router.statistics().counters.late == 2


def test_row_E14_a_successor_starts_when_the_death_was_handled_and_gets_nothing_of_it() -> None:
    """Not before, in the same place, and what the old one still says is late."""
    router = started(line_of_2())
    router.feed(submitted(), produced(A))
    assert of(do.StartReplica, router.handle(passed(5.0))) == []
    router.handle(died(replica(A), now=5.0))
    commands = router.handle(passed(6.0))
    assert of(do.StartReplica, commands) == [do.StartReplica(replica=replica(A, 0, 2))]
    ready(router, replica(A, 0, 2), now=6.0)
    late = router.handle(produced(A, 1))
    assert [type(command) for command in late] == [do.Release]
    router.handle(died(replica(A), now=7.0))
    assert states(router, A) == ["ready"]


def test_row_F5_the_work_of_a_failed_request_is_cancelled_elsewhere() -> None:
    """B fails; A is told to stop, and when it has, nothing is left."""
    router = started(line_of_2(stages=TWO))
    router.feed(submitted(), produced(A))
    commands = router.handle(failed(B))
    assert len(terminals(commands)) == 1
    assert of(do.CancelTask, commands) == [do.CancelTask(replica=where(router, A), task=task(A))]
    router.handle(cancelled(A))
    assert is_empty(router)


class TestProgress:
    """Row F9: who has work shows that it goes on."""

    def test_row_F9_a_silent_replica_is_suspect_and_then_evicted(self) -> None:
        """A third of the time: no new work. All of it: its task is dispatched elsewhere."""
        router = busy()
        home = where(router)
        commands = router.handle(passed(10.0))
        assert [c.state.state for c in commands if isinstance(c, do.Announce)] == ["suspect"]
        router.feed(submitted(R2, now=10.0), produced(A, request=R2, now=10.0))
        assert where(router, B, R2) != home
        for now in (15.0, 20.0, 25.0):
            for other in {where(router, A, R2), where(router, B, R2)}:
                router.handle(on.ReplicaAlive(now=now, replica=other))
        commands = router.handle(passed(30.0))
        assert do.StopReplica(replica=home) in commands
        assert [c.task for c in commands if isinstance(c, do.Dispatch)] == [task(B, attempt=1)]

    def test_row_F9_a_slow_one_that_goes_on_is_left_alone(self) -> None:
        """It says so again and again; a suspect that does is trusted again."""
        router = busy()
        home = where(router)
        router.handle(passed(10.0))
        assert "suspect" in states(router)
        router.handle(on.ReplicaAlive(now=12.0, replica=home, step_age_s=12.0))
        assert states(router) == ["ready", "ready"]
        for now in range(15, 300, 5):
            router.handle(on.ReplicaAlive(now=float(now), replica=home, step_age_s=5.0))
            router.handle(passed(float(now)))
        assert states(router) == ["ready", "ready"]

    def test_row_F9_chunks_are_signs_of_life_too(self) -> None:
        """Whoever reports nothing but its work is not evicted while it works."""
        router = busy()
        for now in range(5, 200, 5):
            router.handle(produced(B, now // 5 - 1, now=float(now)))
            router.handle(
                on.ConsumerDrained(now=float(now), request=R1, output=AUDIO, up_to=now // 5)
            )
            router.handle(passed(float(now)))
        assert states(router) == ["ready", "ready"]

    def test_row_F9_an_idle_one_has_no_timer(self) -> None:
        """Nothing is bound, so nothing is waited for."""
        router = started(line_of_2(stages=TWO))
        assert router.next_deadline() is None
        assert router.handle(on.ReplicaAlive(now=1.0, replica=replica(A))) == ()
        assert router.statistics().counters.late == 1

    def test_row_F9_one_without_work_is_not_evicted(self) -> None:
        """B has absorbed everything and waits for A; silence is no fault."""
        router = started(line_of_2(stages=TWO))
        router.feed(submitted(), produced(A), consumed(1))
        home = where(router, A)
        for now in range(5, 60, 5):
            router.handle(on.ReplicaAlive(now=float(now), replica=home))
            router.handle(passed(float(now)))
        assert states(router) == ["ready", "ready"]

    def test_a_step_older_than_its_backend_allows_has_hung(self) -> None:
        """The loop of its replica reacts, which does not help."""
        router = busy()
        home = where(router)
        commands = router.handle(on.ReplicaAlive(now=31.0, replica=home, step_age_s=30.5))
        assert do.StopReplica(replica=home) in commands
        assert "one step has run for 30 s" in str(router.story(R1))
