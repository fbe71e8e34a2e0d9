"""Row M7: requests that run together or not at all."""

from __future__ import annotations

import pytest

from stretto.core import commands as do
from stretto.core import events as on
from stretto.core.graph import Limits, StageSpec
from stretto.core.requests import RequestState
from stretto.errors import FailureKind
from stretto.types import ChannelId, RequestId
from tests.core.builders import (
    API,
    R1,
    R2,
    R3,
    R4,
    TEXT,
    A,
    B,
    Checked,
    aborted,
    cancelled,
    consumed,
    died,
    failed,
    finished,
    inline,
    is_empty,
    line_of_2,
    of,
    passed,
    produced,
    ready,
    replica,
    started,
    submitted,
    terminals,
)


def asked(
    request: RequestId,
    *,
    companions: int = 0,
    of_leader: RequestId | None = None,
    channel: ChannelId = API,
) -> on.RequestSubmitted:
    """Return a request that goes with others."""
    return on.RequestSubmitted(
        now=0.0,
        channel=channel,
        request=request,
        pipeline=line_of_2().pipelines[0].name,
        inputs=((TEXT, inline(f"{request}.text")),),
        companions=companions,
        companion_of=of_leader,
    )


def pair(slots: int = 2, limits: Limits | None = None) -> Checked:
    """Return a router with a leader and its companion."""
    stages = (StageSpec(id=A, slots=slots), StageSpec(id=B, slots=slots))
    router = started(line_of_2(stages=stages, limits=limits))
    router.feed(asked(R1, companions=1), asked(R2, of_leader=R1))
    return router


def dispatched(commands: tuple[do.AnyCommand, ...]) -> list[RequestId]:
    """Return whose tasks were dispatched."""
    return [c.task.request for c in commands if isinstance(c, do.Dispatch)]


def run_through(router: Checked, request: RequestId) -> tuple[do.AnyCommand, ...]:
    """Let one request's tasks do their work."""
    router.feed(produced(A, request=request), finished(A, request=request))
    return router.feed(
        consumed(1, request=request), produced(B, request=request), finished(B, request=request)
    )


def test_row_M7_nobody_is_dispatched_before_all_are_there() -> None:
    """The leader waits in the queue; the last companion starts all, in order."""
    router = started(line_of_2(stages=(StageSpec(id=A, slots=4), StageSpec(id=B, slots=4))))
    assert dispatched(router.handle(asked(R1, companions=2))) == []
    assert router.waiting(1.0)[0].what == "waits for 2 companions"
    assert dispatched(router.handle(asked(R2, of_leader=R1))) == []
    assert dispatched(router.handle(asked(R3, of_leader=R1))) == [R1, R2, R3]


def test_row_M7_all_get_slots_or_none_does() -> None:
    """One slot is free: neither starts, and a request behind them does not overtake; two: both start."""
    router = started(line_of_2(stages=(StageSpec(id=A, slots=2), StageSpec(id=B, slots=2))))
    router.handle(submitted(R3))
    commands = router.feed(asked(R1, companions=1), asked(R2, of_leader=R1))
    assert dispatched(commands) == []
    assert [router.state_of(r) for r in (R1, R2)] == [RequestState.QUEUED] * 2
    assert dispatched(run_through(router, R3)) == [R1, R2]


def test_row_M7_the_leader_finishes_last() -> None:
    """Its own work is done, its companion's is not: its end waits."""
    router = pair()
    assert terminals(run_through(router, R1)) == []
    ends = terminals(run_through(router, R2))
    assert [(type(end), end.request) for end in ends] == [(do.Finish, R2), (do.Finish, R1)]
    assert is_empty(router)


def test_row_M7_a_companion_may_finish_first() -> None:
    """Then the leader ends with its own work."""
    router = pair()
    assert [end.request for end in terminals(run_through(router, R2))] == [R2]
    assert [end.request for end in terminals(run_through(router, R1))] == [R1]


def test_row_M7_a_lost_companion_fails_the_leader() -> None:
    """The leader's failure names it; its own work is cancelled."""
    router = pair()
    commands = router.handle(failed(A, request=R2))
    ends = {end.request: end for end in terminals(commands)}
    assert isinstance(ends[R2], do.Fail)
    fail = ends[R1]
    assert isinstance(fail, do.Fail)
    assert f"its companion {R2} has failed" in fail.failure.detail
    assert len(of(do.CancelTask, commands)) == 1
    router.handle(cancelled(A, request=R1))
    assert is_empty(router)


@pytest.mark.parametrize("gone", [R1, R2])
def test_row_M7_an_abort_of_one_ends_both(gone: RequestId) -> None:
    """Whoever is aborted; each ends once."""
    router = pair()
    ends = terminals(router.handle(aborted(gone)))
    assert sorted(end.request for end in ends) == [R1, R2]
    router.feed(cancelled(A, request=R1), cancelled(A, request=R2))
    assert is_empty(router)


def test_row_M7_a_death_repeats_both() -> None:
    """Neither had sent anything: both are dispatched again."""
    router = pair()
    router.feed(died(replica(A)), passed(1.0))
    assert dispatched(ready(router, replica(A, 0, 2), now=1.0)) == [R1, R2]


def test_row_M7_a_death_that_costs_one_ends_both_once() -> None:
    """Both were bound there, and one had been heard: two terminals, no more."""
    router = pair()
    router.handle(produced(A, request=R2))
    ends = terminals(router.handle(died(replica(A))))
    assert sorted(end.request for end in ends) == [R1, R2]
    router.handle(cancelled(B, request=R2))
    assert is_empty(router)


def test_row_M7_companions_that_do_not_come_have_a_deadline() -> None:
    """The leader fails, and says how many were missing."""
    router = started(line_of_2(limits=Limits(queue_timeout_s=10.0)))
    router.feed(asked(R1, companions=2), asked(R2, of_leader=R1))
    ends = terminals(router.handle(passed(10.0)))
    assert sorted(end.request for end in ends) == [R1, R2]
    (fail,) = [end for end in ends if isinstance(end, do.Fail)]
    assert fail.failure.kind is FailureKind.DEADLINE_EXCEEDED
    assert "1 of its companions did not come in 10 s" in fail.failure.detail
    assert is_empty(router)


@pytest.mark.parametrize("number", [-1, 16, 2**40])
def test_so_many_companions_are_refused(number: int) -> None:
    """The refusal names the field and the range."""
    router = started(line_of_2())
    (reject, _) = router.handle(asked(R1, companions=number))
    assert isinstance(reject, do.Reject)
    assert (reject.failure.kind, reject.failure.param) == (
        FailureKind.INVALID_REQUEST,
        "companions",
    )
    assert "use 0 to 15" in reject.failure.detail


def test_row_M7_a_refused_companion_fails_the_leader_at_once() -> None:
    """The queue is full for it: the leader need not wait for one that will not come."""
    router = started(line_of_2(limits=Limits(max_queued=2)))
    router.feed(asked(R1, companions=2), asked(R2, of_leader=R1))
    reject, *_ = commands = router.handle(asked(R3, of_leader=R1))
    assert isinstance(reject, do.Reject)
    fail, cancel = terminals(commands)
    assert isinstance(fail, do.Fail)
    assert (fail.request, fail.failure.kind) == (R1, FailureKind.OVERLOADED)
    assert f"its companion {R3} was refused" in fail.failure.detail
    assert (type(cancel), cancel.request) == (do.Cancelled, R2)
    assert is_empty(router)


def test_another_channels_companion_harms_nobody() -> None:
    """It is refused, and the leader goes on waiting for its own."""
    router = started(line_of_2())
    other = ChannelId("1.2")
    router.feed(on.ChannelOpened(now=0.0, channel=other), asked(R1, companions=1))
    router.handle(asked(RequestId("1.2-1"), of_leader=R1, channel=other))
    assert dispatched(router.handle(asked(R2, of_leader=R1))) == [R1, R2]


def test_a_party_that_can_not_fit_delays_nobody_and_says_why() -> None:
    """Three need three slots at once, and there are two: others go on, and the three fail."""
    limits = Limits(queue_timeout_s=10.0)
    stages = (StageSpec(id=A, slots=2), StageSpec(id=B, slots=2))
    router = started(line_of_2(stages=stages, limits=limits))
    router.feed(asked(R1, companions=2), asked(R2, of_leader=R1), asked(R3, of_leader=R1))
    assert dispatched(router.handle(submitted(R4))) == [R4]
    fail, *_ = terminals(router.handle(passed(10.0)))
    assert isinstance(fail, do.Fail)
    assert (fail.request, fail.failure.where) == (R1, A)
    assert "need 3 slots of stage a at once, which has 2" in fail.failure.detail


def test_a_companion_without_a_leader_is_refused() -> None:
    """Unknown, complete, running, or another channel's; nothing changes."""
    router = pair()
    other = ChannelId("1.2")
    router.handle(on.ChannelOpened(now=0.0, channel=other))
    for event in (
        asked(R3, of_leader=R1),
        asked(R3, of_leader=RequestId("nobody")),
        asked(RequestId("1.2-1"), of_leader=R1, channel=other),
    ):
        (reject,) = router.handle(event)[:1]
        assert isinstance(reject, do.Reject)
        assert reject.failure.param == "companion_of"


def test_a_closed_channel_ends_its_pairs() -> None:
    """Each of them once."""
    router = pair()
    ends = terminals(router.handle(on.ChannelClosed(now=0.0, channel=API)))
    assert sorted(end.request for end in ends) == [R1, R2]
    router.feed(cancelled(A, request=R1), cancelled(A, request=R2))
    assert router.statistics().running == 0


def test_shutting_down_ends_pairs_that_wait() -> None:
    """The drain time is over: both end, and so does the engine."""
    router = pair()
    router.handle(on.ShutdownRequested(now=0.0, drain_s=1.0))
    commands = router.handle(passed(1.0))
    assert len(terminals(commands)) == 2
    assert len(of(do.Exit, commands)) == 1


def test_row_M7_input_that_streams_to_a_leader_does_not_start_it_alone() -> None:
    """The first piece comes before the companion: both start when that is there."""
    router = started(line_of_2(stages=(StageSpec(id=A, slots=4), StageSpec(id=B, slots=4))))
    leader = on.RequestSubmitted(
        now=0.0,
        channel=API,
        request=R1,
        pipeline=line_of_2().pipelines[0].name,
        inputs=(),
        open_inputs=(TEXT,),
        companions=1,
    )
    piece = on.InputAppended(now=0.0, request=R1, input=TEXT, payload=inline("piece", 10))
    assert dispatched(router.feed(leader, piece)) == []
    assert dispatched(router.handle(asked(R2, of_leader=R1))) == [R1, R2]
