"""Replicas that were started elsewhere: joining, coming back, leaving."""

from __future__ import annotations

import pytest

from stretto.core import commands as do
from stretto.core import events as on
from stretto.core.graph import StageSpec
from stretto.errors import FailureKind
from stretto.types import StageId
from tests.core.builders import (
    R1,
    R2,
    A,
    B,
    Checked,
    aborted,
    cancelled,
    consumed,
    died,
    finished,
    is_empty,
    line_of_2,
    of,
    passed,
    produced,
    replica,
    started,
    submitted,
    terminals,
)

NONE = StageSpec(id=A, replicas=0, slots=2)


def offered(
    connection: int = 1, *, nonce: str = "n", stage: StageId = A, now: float = 0.0
) -> on.ReplicaOffered:
    """Return an offer."""
    return on.ReplicaOffered(now=now, stage=stage, nonce=nonce, connection=connection)


def loaded(slot: int = 0, incarnation: int = 1) -> on.ReplicaReady:
    """Return the news that a replica that has joined is ready."""
    return on.ReplicaReady(now=0.0, replica=replica(A, slot, incarnation), slots=2)


def refusal(commands: tuple[do.AnyCommand, ...]) -> do.RefuseReplica:
    """Return the only command, a refusal."""
    (command,) = commands
    assert isinstance(command, do.RefuseReplica)
    return command


def without_replicas() -> Checked:
    """Return a router whose first stage is meant to have no replica."""
    return started(line_of_2(stages=(NONE,)))


def test_row_E17_a_stage_without_replicas_works_when_one_joins() -> None:
    """Its requests wait for it; nothing is started, and the target stays."""
    router = without_replicas()
    router.handle(submitted())
    commands = router.handle(offered())
    assert commands == (
        do.AdmitReplica(replica=replica(A), nonce="n", connection=1),
        do.Announce(state=do.ReplicaState(replica=replica(A), state="loading")),
    )
    assert [type(c) for c in router.handle(loaded())] == [
        do.Announce,
        do.Dispatch,
        do.Feed,
        do.CloseInput,
    ]
    (stage, _) = router.statistics().stages
    assert (stage.target, stage.replicas) == (0, ((replica(A), "ready"),))


def test_row_M1_joining_twice_is_ignored_and_joining_again_replaces() -> None:
    """The same connection changes nothing; a new one gets a new incarnation in the same place."""
    router = without_replicas()
    router.feed(offered(), loaded(), submitted())
    late = router.statistics().counters.late
    assert router.handle(offered()) == ()
    assert router.statistics().counters.late == late + 1
    commands = router.handle(offered(2))
    assert of(do.StopReplica, commands) == [do.StopReplica(replica=replica(A))]
    assert of(do.AdmitReplica, commands) == [
        do.AdmitReplica(replica=replica(A, 0, 2), nonce="n", connection=2)
    ]
    assert terminals(commands) == [], "nothing of the request was forwarded: it waits"
    assert len(of(do.Dispatch, router.handle(loaded(0, 2)))) == 1


def test_row_M2_nothing_of_the_former_incarnation_is_heard() -> None:
    """Its chunks and its end are late; the repeated task goes to the new one, once."""
    router = without_replicas()
    router.feed(offered(), loaded(), submitted(), died(replica(A)))
    assert router.next_deadline() is not None, "the request has one; no restart is planned"
    assert of(do.StartReplica, router.handle(passed(5.0))) == []
    commands = router.feed(offered(2), loaded(0, 2))
    (dispatch,) = (c for c in commands if isinstance(c, do.Dispatch))
    assert (dispatch.replica, dispatch.task.attempt) == (replica(A, 0, 2), 1)
    assert [type(c) for c in router.handle(produced(A, attempt=0))] == [do.Release]
    assert router.handle(finished(A, attempt=0)) == ()
    assert router.handle(died(replica(A))) == ()
    router.feed(produced(A, attempt=1), consumed(1), finished(A, attempt=1), produced(B))
    assert [type(c) for c in terminals(router.handle(finished(B)))] == [do.Finish]


def test_one_that_has_left_is_not_replaced_and_its_place_is_used_again() -> None:
    """By itself or by another one; incarnations go on."""
    router = without_replicas()
    commands = router.feed(offered(), loaded(), died(replica(A)))
    assert of(do.Announce, commands) == [
        do.Announce(state=do.ReplicaState(replica=replica(A), state="stopped", detail="exit 9"))
    ]
    assert router.next_deadline() is None
    (admit,) = of(do.AdmitReplica, router.handle(offered(2, nonce="m")))
    assert admit == do.AdmitReplica(replica=replica(A, 0, 2), nonce="m", connection=2)
    (admit,) = of(do.AdmitReplica, router.handle(offered(3)))
    assert admit == do.AdmitReplica(replica=replica(A, 1, 1), nonce="n", connection=3)


def test_a_scaled_stage_may_use_the_place_of_one_that_has_left() -> None:
    """The process that comes back then gets another one."""
    router = without_replicas()
    router.feed(offered(), died(replica(A)))
    commands = router.handle(on.ScaleRequested(now=0.0, stage=A, replicas=1))
    assert of(do.StartReplica, commands) == [do.StartReplica(replica=replica(A, 0, 2))]
    (admit,) = of(do.AdmitReplica, router.handle(offered(2)))
    assert admit == do.AdmitReplica(replica=replica(A, 1, 1), nonce="n", connection=2)
    commands = router.handle(on.ScaleRequested(now=0.0, stage=A, replicas=0))
    assert of(do.StopReplica, commands) == [do.StopReplica(replica=replica(A, 0, 2))], "not ours"


def test_a_drained_one_is_told_before_its_link_ends() -> None:
    """Also when it has nothing to finish: else it would come back."""
    router = without_replicas()
    router.feed(offered(), loaded())
    commands = router.handle(on.DrainRequested(now=0.0, replica=replica(A)))
    assert [type(c) for c in commands] == [
        do.AnnounceTarget,
        do.DrainReplica,
        do.StopReplica,
        do.Announce,
    ]


def test_one_that_does_not_load_in_time_is_out() -> None:
    """Its link is ended; it may come again."""
    router = without_replicas()
    router.handle(offered())
    deadline = router.next_deadline()
    assert deadline is not None
    assert of(do.StopReplica, router.handle(passed(deadline)))
    assert of(do.AdmitReplica, router.handle(offered(2, now=deadline)))


def test_row_M1_a_failed_join_leaves_the_pool_unchanged() -> None:
    """An unknown stage is named; during a shutdown, and before the start, nobody joins."""
    router = Checked(line_of_2(stages=(NONE,)))
    assert refusal(router.handle(offered())).failure.kind is FailureKind.OVERLOADED
    router = without_replicas()
    before = router.statistics().stages
    refused = refusal(router.handle(offered(stage=StageId("x"))))
    assert (refused.connection, refused.failure.kind) == (1, FailureKind.INVALID_REQUEST)
    assert "this server has: a, b" in refused.failure.detail
    router.handle(submitted())
    router.handle(on.ShutdownRequested(now=0.0, drain_s=9.0))
    assert refusal(router.handle(offered(2))).failure.code == "server_shutting_down"
    assert router.statistics().stages == before


@pytest.mark.parametrize("is_full", [False, True])
def test_a_stage_has_room_for_so_many(*, is_full: bool) -> None:
    """At the limit a new one is refused; one that comes back is not new."""
    router = Checked(line_of_2(stages=(StageSpec(id=A, replicas=255 + is_full),)))
    router.is_checking = False
    router.handle(on.EngineStarted(now=0.0))
    commands = router.handle(offered())
    if is_full:
        assert "256" in refusal(commands).failure.detail
    else:
        assert of(do.AdmitReplica, router.handle(offered(2)))


def test_an_abort_after_a_cut_leaves_nothing() -> None:
    """The task that waited for the replica's return is forgotten."""
    router = without_replicas()
    router.feed(offered(), loaded(), submitted(R1), submitted(R2), died(replica(A)))
    router.feed(aborted(R1), aborted(R2))
    router.feed(offered(2), loaded(0, 2), cancelled(A))
    assert is_empty(router)
