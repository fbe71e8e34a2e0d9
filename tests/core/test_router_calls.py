"""Collective calls: beside the tasks or alone, answered once, never waited for longer than was said."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

import pytest

from stretto.core import commands as do
from stretto.core import events as on
from stretto.core.calls import MAX_OPEN_CALLS, MAX_UNANSWERED_CALLS
from stretto.core.graph import Limits, StageSpec
from stretto.errors import Failure, FailureKind, InvalidTransition
from stretto.types import CallId, ChannelId, ReplicaId, StageId
from tests.core.builders import (
    API,
    R1,
    R2,
    R3,
    A,
    B,
    Checked,
    aborted,
    cancelled,
    died,
    finished,
    line_of_2,
    of,
    passed,
    produced,
    replica,
    started,
    submitted,
    task,
    terminals,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stretto.types import CallClass

C1, C2, C3 = (CallId(f"1.1-call-{number}") for number in range(1, 4))
METHODS: tuple[tuple[str, CallClass], ...] = (
    ("look", "control"),
    ("tidy", "exclusive"),
    ("sleep", "exclusive"),
)
A0, A1, B0 = replica(A, 0), replica(A, 1), replica(B, 0)
REFUSED = Failure(kind=FailureKind.STAGE_ERROR, detail="no")


def serving(*, slots: int = 2, replicas: int = 1, limits: Limits | None = None) -> Checked:
    """Return a router of `text → a ⇒ b → audio` whose replicas can be called; only `b` has `only_b`."""
    stages = (StageSpec(id=A, slots=slots, replicas=replicas), StageSpec(id=B, slots=slots))
    router = started(line_of_2(limits=limits, stages=stages), loaded=False)
    for place in (*(replica(A, slot) for slot in range(replicas)), B0):
        more: tuple[tuple[str, CallClass], ...] = (("only_b", "control"),)
        load(router, place, METHODS + more * (place.stage == B))
    return router


def load(
    router: Checked, which: ReplicaId, methods: tuple[tuple[str, CallClass], ...] = METHODS
) -> tuple[do.AnyCommand, ...]:
    """Let a replica become ready."""
    return router.feed(
        on.ReplicaJoined(now=0.0, replica=which),
        on.ReplicaReady(now=0.0, replica=which, slots=2, methods=methods),
    )


def requested(
    method: str,
    *stages: StageId,
    call: CallId = C1,
    now: float = 0.0,
    timeout_s: float = 10.0,
    channel: ChannelId = API,
) -> on.RpcRequested:
    """Return somebody's wish."""
    return on.RpcRequested(
        now=now, call=call, channel=channel, method=method, stages=stages, timeout_s=timeout_s
    )


def answered(
    which: ReplicaId,
    call: CallId = C1,
    *,
    now: float = 0.0,
    failure: Failure | None = None,
    is_asleep: bool = False,
) -> on.RpcAnswered:
    """Return a replica's answer."""
    return on.RpcAnswered(now=now, call=call, replica=which, failure=failure, is_asleep=is_asleep)


def called(
    which: ReplicaId, method: str, call: CallId = C1, call_class: CallClass = "control"
) -> do.CallReplica:
    """Return the command that sends a call."""
    return do.CallReplica(replica=which, call=call, method=method, call_class=call_class)


def ok(which: ReplicaId) -> do.CallOutcome:
    """Return a good outcome."""
    return do.CallOutcome(replica=which, status="ok")


def answer(commands: Iterable[do.AnyCommand]) -> do.AnswerRpc:
    """Return the one answer among commands."""
    (found,) = of(do.AnswerRpc, commands)
    assert isinstance(found, do.AnswerRpc)
    return found


def refusal(router: Checked, event: on.RpcRequested) -> Failure:
    """Return why a call was refused; nothing else came of it."""
    (command,) = router.handle(event)
    assert isinstance(command, do.AnswerRpc)
    assert not command.outcomes
    assert command.failure is not None
    return command.failure


def phase(router: Checked, which: ReplicaId) -> str:
    """Return where a replica stands."""
    return next(state.state for state in router.replica_states() if state.replica == which)


# ---------------------------------------------------------------------- control


def test_row_M5_a_call_is_answered_once_all_its_replicas_have_answered() -> None:
    """It is sent to all at once, and the answer has a line for each, in the order of the places."""
    router = serving(replicas=2)
    assert router.handle(requested("look")) == (
        called(A0, "look"),
        called(A1, "look"),
        called(B0, "look"),
    )
    assert router.feed(answered(B0), answered(A1, failure=REFUSED)) == ()
    assert router.statistics().calls == 1
    assert router.handle(answered(A0)) == (
        do.AnswerRpc(
            channel=API,
            call=C1,
            outcomes=(ok(A0), do.CallOutcome(replica=A1, status="error", failure=REFUSED), ok(B0)),
        ),
    )
    assert (router.statistics().calls, router.next_deadline()) == (0, None)


def test_row_M5_a_slow_call_delays_no_request() -> None:
    """While it is open, a request is dispatched, aborted and ended as ever."""
    router = serving()
    router.handle(requested("look"))
    assert of(do.Dispatch, router.handle(submitted()))
    assert of(do.CancelTask, router.handle(aborted()))
    router.handle(cancelled(A))
    assert answer(router.feed(answered(A0), answered(B0))).failure is None


def test_row_M5_a_call_fails_when_its_time_is_over_and_late_answers_are_dropped() -> None:
    """The failure names who is silent; what others have answered comes with it."""
    router = serving()
    router.feed(requested("look", timeout_s=3.0), answered(B0, now=1.0))
    assert router.next_deadline() == 3.0
    found = answer(router.handle(passed(3.0)))
    assert found.failure is not None
    assert found.failure.kind is FailureKind.DEADLINE_EXCEEDED
    assert str(A0) in found.failure.detail
    assert found.outcomes == (
        do.CallOutcome(replica=A0, status="error", failure=found.failure),
        ok(B0),
    )
    late = router.statistics().counters.late
    assert router.handle(answered(A0, now=4.0)) == ()
    assert router.handle(answered(A0, now=4.0)) == ()
    assert router.statistics().counters.late == late + 2


def test_row_M5_the_death_of_a_replica_is_its_answer() -> None:
    """The others are still waited for."""
    router = serving()
    router.handle(requested("look"))
    assert not of(do.AnswerRpc, router.handle(died(A0)))
    dead, alive = answer(router.handle(answered(B0))).outcomes
    assert (dead.status, alive) == ("died", ok(B0))
    assert dead.failure is not None
    assert (dead.failure.kind, "exit 9" in dead.failure.detail) == (FailureKind.REPLICA_LOST, True)


def test_row_M5_the_end_of_the_engine_is_everybodys_answer() -> None:
    """Before the processes are stopped; a call that comes later is refused, an answer is late."""
    router = serving()
    router.feed(requested("look"), requested("tidy", A, call=C2), submitted())
    commands = router.feed(
        on.ShutdownRequested(now=1.0, drain_s=1.0), requested("look", call=C3, now=1.0)
    )
    assert answer(commands).failure is not None
    commands = router.handle(passed(2.0))
    failures = [c.failure for c in of(do.AnswerRpc, commands) if isinstance(c, do.AnswerRpc)]
    assert [f and f.kind for f in failures] == [FailureKind.ENGINE_DEAD] * 2
    assert isinstance(commands[-1], do.Exit)
    assert router.handle(answered(A0, now=2.0)) == ()
    assert router.next_deadline() is None


def test_a_shutdown_waits_for_no_exclusive_call_that_runs() -> None:
    """Its deadline goes with its replica."""
    router = serving()
    router.feed(requested("tidy", A, timeout_s=1.0), passed(1.0))
    router.handle(on.ShutdownRequested(now=2.0, drain_s=1.0))
    assert router.next_deadline() is None


def test_calls_end_with_their_channel() -> None:
    """What was sent is late when it is answered; other channels' calls go on."""
    router = serving()
    other = ChannelId("1.2")
    router.handle(on.ChannelOpened(now=0.0, channel=other))
    router.feed(submitted(R2, channel=other))
    router.feed(
        requested("look"),
        requested("tidy", A, call=C2),
        requested("look", call=C3, channel=other),
    )
    commands = router.handle(on.ChannelClosed(now=1.0, channel=API))
    assert [c.call for c in of(do.AnswerRpc, commands) if isinstance(c, do.AnswerRpc)] == [C1, C2]
    assert phase(router, A0) == "ready"
    assert not of(do.AnswerRpc, router.feed(answered(A0), answered(B0)))
    assert answer(router.feed(answered(A0, C3), answered(B0, C3))).channel == other


def test_a_call_of_a_channel_that_is_gone_is_answered_all_the_same() -> None:
    """Whatever the shell keeps for it is let go."""
    router = serving()
    failure = refusal(router, requested("look", channel=ChannelId("1.9")))
    assert failure.kind is FailureKind.CANCELLED


def test_a_call_cannot_be_requested_twice() -> None:
    """The shell mints the numbers; nothing changes."""
    router = serving()
    router.handle(requested("look"))
    before = pickle.dumps(router)
    with pytest.raises(InvalidTransition):
        router.handle(requested("look"))
    assert pickle.dumps(router) == before


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("event", "kind", "words"),
    [
        (requested("nothing"), FailureKind.INVALID_REQUEST, "look, tidy, sleep, only_b"),
        (requested("only_b", A), FailureKind.INVALID_REQUEST, "stage 'a' has no method"),
        (requested("look", StageId("z")), FailureKind.INVALID_REQUEST, "a, b"),
    ],
    ids=["no such method", "not there", "no such stage"],
)
def test_a_call_that_goes_nowhere_is_refused(
    event: on.RpcRequested, kind: FailureKind, words: str
) -> None:
    """The text names what there is."""
    failure = refusal(serving(), event)
    assert failure.kind is kind
    assert words in failure.detail


def test_a_method_of_one_stage_is_called_there_only() -> None:
    """If no stage is named, the call goes wherever there is such a method."""
    assert serving().handle(requested("only_b")) == (called(B0, "only_b"),)


def test_a_stage_that_is_named_twice_is_called_once() -> None:
    """A replica gets each call once."""
    assert serving().handle(requested("look", B, B)) == (called(B0, "look"),)


def test_replicas_that_load_are_not_called() -> None:
    """A stage of which none can be called is refused if it was named, and so is an engine of such."""
    router = serving()
    router.handle(died(A0))
    assert router.handle(requested("look")) == (called(B0, "look"),)
    failure = refusal(router, requested("look", A, call=C2))
    assert (failure.kind, failure.where) == (FailureKind.NO_REPLICA, A)
    router.handle(died(B0))
    assert refusal(router, requested("look", call=C2)).kind is FailureKind.NO_REPLICA


def test_open_calls_are_bounded_per_channel() -> None:
    """One too many is refused; the others are not disturbed."""
    router = serving()
    for number in range(MAX_OPEN_CALLS):
        router.handle(requested("look", A, call=CallId(f"1.1-call-{number + 100}")))
    failure = refusal(router, requested("look", A))
    assert failure.kind is FailureKind.OVERLOADED
    router.handle(on.ChannelOpened(now=0.0, channel=ChannelId("1.2")))
    assert router.handle(requested("look", B, channel=ChannelId("1.2"))) == (called(B0, "look"),)


def test_calls_that_a_replica_never_answers_are_bounded() -> None:
    """Those that nobody waits for any more count too."""
    router = serving()
    for number in range(MAX_UNANSWERED_CALLS):
        router.handle(requested("look", A, call=CallId(f"1.1-call-{number + 100}"), timeout_s=1.0))
    router.handle(passed(1.0))
    (outcome,) = answer(router.handle(requested("look", A, now=2.0))).outcomes
    assert outcome.failure is not None
    assert outcome.failure.kind is FailureKind.OVERLOADED
    assert not of(do.AnswerRpc, router.handle(died(A0, now=3.0)))


# ---------------------------------------------------------------------- exclusive


def test_an_exclusive_call_waits_for_the_tasks_that_its_replica_has() -> None:
    """The replica gets no new one; another replica does, and then it takes part again."""
    router = serving(replicas=2)
    router.handle(submitted(R1))
    busy = next(c.replica for c in router.feed(submitted(R2)) if isinstance(c, do.Dispatch))
    router.feed(aborted(R1), cancelled(A, request=R1))
    commands = router.handle(requested("tidy", A))
    (sent,) = of(do.CallReplica, commands)
    assert isinstance(sent, do.CallReplica)
    assert sent.replica != busy
    assert (phase(router, busy), phase(router, sent.replica)) == ("calling", "calling")
    assert not of(do.Dispatch, router.handle(submitted(R3)))
    commands = router.handle(answered(sent.replica))
    assert [c.replica for c in of(do.Dispatch, commands) if isinstance(c, do.Dispatch)] == [
        sent.replica
    ]
    router.feed(aborted(R2))
    assert router.handle(cancelled(A, request=R2))[-1] == called(
        busy, "tidy", call_class="exclusive"
    )
    assert len(answer(router.handle(answered(busy))).outcomes) == 2
    assert phase(router, busy) == "ready"


def test_an_exclusive_call_that_does_not_get_its_turn_in_time_gives_the_replica_back() -> None:
    """It was never sent; the task goes on, and a waiting request is served."""
    router = serving(slots=2)
    router.feed(submitted(R1), requested("tidy", A, timeout_s=2.0))
    assert not of(do.Dispatch, router.handle(submitted(R2)))
    commands = router.handle(passed(2.0))
    assert answer(commands).failure is not None
    assert of(do.Dispatch, commands)
    assert phase(router, A0) == "ready"
    assert not of(do.CallReplica, router.feed(produced(A), finished(A)))


def test_exclusive_calls_run_one_after_the_other() -> None:
    """A control call does not wait for them."""
    router = serving()
    assert of(do.CallReplica, router.handle(requested("tidy", A)))
    assert not of(do.CallReplica, router.handle(requested("tidy", A, call=C2)))
    assert router.handle(requested("look", A, call=C3)) == (called(A0, "look", C3),)
    commands = router.handle(answered(A0))
    assert commands[-1] == called(A0, "tidy", C2, "exclusive")
    assert phase(router, A0) == "calling"
    router.feed(answered(A0, C3), answered(A0, C2))
    assert phase(router, A0) == "ready"


def test_a_replica_that_was_put_to_sleep_gets_no_task_until_it_was_woken() -> None:
    """It can be called meanwhile; a task that waits is dispatched when it wakes."""
    router = serving()
    router.feed(requested("sleep", A), answered(A0, is_asleep=True))
    assert phase(router, A0) == "asleep"
    router.handle(submitted())
    assert router.handle(requested("look", A, call=C2)) == (called(A0, "look", C2),)
    router.handle(answered(A0, C2, is_asleep=True))
    assert phase(router, A0) == "asleep"
    commands = router.handle(requested("tidy", A, call=C3))
    assert commands[-1] == called(A0, "tidy", C3, "exclusive")
    commands = router.handle(answered(A0, C3, is_asleep=False))
    assert of(do.Dispatch, commands)
    assert phase(router, A0) == "ready"


def test_a_request_that_waits_for_a_sleeping_stage_is_told_so() -> None:
    """It fails like one that waits for a missing replica, with the next step."""
    router = serving(limits=Limits(stage_unavailable_timeout_s=5.0))
    router.feed(requested("sleep", A), answered(A0, is_asleep=True), submitted())
    (failed,) = terminals(router.handle(passed(5.0)))
    assert isinstance(failed, do.Fail)
    assert failed.failure.kind is FailureKind.NO_REPLICA
    assert "`wake`" in failed.failure.detail


def test_an_exclusive_call_that_is_late_keeps_its_replica_until_it_ends() -> None:
    """Nobody waits for it, but the replica can't compute; what it says about sleep counts."""
    router = serving()
    router.feed(requested("sleep", A, timeout_s=1.0), passed(1.0))
    assert phase(router, A0) == "calling"
    router.handle(answered(A0, now=5.0, is_asleep=True))
    assert phase(router, A0) == "asleep"
    assert router.next_deadline() is None


def test_an_exclusive_call_that_never_ends_costs_its_replica() -> None:
    """After the drain time-out; the stage gets another process."""
    router = serving(limits=Limits(drain_timeout_s=7.0))
    router.feed(requested("tidy", A, timeout_s=1.0), passed(1.0))
    assert not of(do.StopReplica, router.handle(passed(7.9)))
    assert of(do.StopReplica, router.handle(passed(8.0)))
    assert phase(router, A0) == "dead"


def test_a_replica_that_dies_while_it_is_drained_for_a_call_answers_so() -> None:
    """Its task is repeated, its queue is gone."""
    router = serving()
    router.feed(submitted(), requested("tidy", A))
    commands = router.handle(died(A0))
    assert [outcome.status for outcome in answer(commands).outcomes] == ["died"]
    assert not terminals(commands)


def test_a_suspect_replica_is_held_back_for_a_call_and_evicted_like_any_other() -> None:
    """What it says of itself does not bring it new work before the call has run; its silence ends it."""
    router = serving()
    router.feed(submitted(), passed(10.0))
    assert phase(router, A0) == "suspect"
    router.handle(requested("tidy", A, now=10.0, timeout_s=60.0))
    assert phase(router, A0) == "calling"
    router.handle(on.ReplicaAlive(now=11.0, replica=A0))
    assert phase(router, A0) == "calling"
    commands: tuple[do.AnyCommand, ...] = ()
    while (when := router.next_deadline()) is not None and phase(router, A0) == "calling":
        commands = router.handle(passed(when))
    assert [outcome.status for outcome in answer(commands).outcomes] == ["died"]


def test_a_replica_that_leaves_takes_no_exclusive_call() -> None:
    """Whether it was asked before or after it began to drain; a control call reaches it."""
    router = serving()
    router.feed(submitted(), requested("tidy", A))
    commands = router.handle(on.DrainRequested(now=0.0, replica=A0))
    (outcome,) = answer(commands).outcomes
    assert outcome.failure is not None
    assert outcome.failure.kind is FailureKind.NO_REPLICA
    (outcome,) = answer(router.handle(requested("tidy", A, call=C2))).outcomes
    assert outcome.status == "error"
    assert router.handle(requested("look", A, call=C3)) == (called(A0, "look", C3),)
    (outcome,) = answer(router.feed(aborted(), cancelled(A))).outcomes
    assert (outcome.status, outcome.failure and "stopped" in outcome.failure.detail) == (
        "died",
        True,
    )


def test_affinity_waits_for_a_replica_that_is_called() -> None:
    """`require` is not lost by an exclusive call, and `prefer` goes elsewhere meanwhile."""
    router = serving(replicas=2)
    require, prefer = on.Affinity(key="k", mode="require"), on.Affinity(key="k")
    (first,) = of(do.Dispatch, router.handle(submitted(R1, affinity=require)))
    assert isinstance(first, do.Dispatch)
    router.feed(aborted(R1), cancelled(A, request=R1))
    other = A1 if first.replica == A0 else A0
    router.feed(requested("tidy", A), answered(other))
    assert not of(do.Dispatch, router.handle(submitted(R2, affinity=require)))
    (elsewhere,) = of(do.Dispatch, router.handle(submitted(R3, affinity=prefer)))
    assert isinstance(elsewhere, do.Dispatch)
    assert elsewhere.replica == other
    assert task(A, R2) not in {
        c.task for c in router.handle(answered(first.replica)) if isinstance(c, do.CancelTask)
    }
