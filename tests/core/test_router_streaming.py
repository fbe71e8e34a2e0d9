"""Row M8: input that streams into a running request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from stretto.core import commands as do
from stretto.core import events as on
from stretto.core.graph import Limits, StageSpec
from stretto.core.requests import RequestState
from stretto.core.router import MAX_KEPT_CHUNKS
from stretto.errors import FailureKind, InvalidTransition
from stretto.types import Boundary, EdgeId, PayloadRef, RequestId
from tests.core.builders import (
    API,
    AUDIO,
    FULL,
    R1,
    TEXT,
    A,
    B,
    Checked,
    consumed,
    deployment,
    died,
    edge,
    finished,
    inline,
    is_empty,
    line_of_2,
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

IN = EdgeId("request.text->a.in")
LIMITS = Limits(input_timeout_s=20.0, request_timeout_s=999.0)
STAGES = tuple(
    StageSpec(id=s, chunk_timeout_s=999.0, progress_timeout_s=999.0, replicas=2) for s in (A, B)
)


def opened(limits: Limits = LIMITS, first: PayloadRef | None = None) -> Checked:
    """Return a router with one request whose text is open."""
    router = started(line_of_2(limits=limits, stages=STAGES))
    router.handle(
        on.RequestSubmitted(
            now=0.0,
            channel=API,
            request=R1,
            pipeline=line_of_2().pipelines[0].name,
            inputs=() if first is None else ((TEXT, first),),
            open_inputs=(TEXT,),
        )
    )
    return router


def appended(key: str, size: int = 10, now: float = 0.0) -> on.InputAppended:
    """Return one more piece."""
    return on.InputAppended(now=now, request=R1, input=TEXT, payload=inline(key, size))


def closed(now: float = 0.0, request: RequestId = R1) -> on.InputClosed:
    """Return the end of the input."""
    return on.InputClosed(now=now, request=request, input=TEXT)


def fed(commands: tuple[do.AnyCommand, ...]) -> list[tuple[int, str]]:
    """Return number and payload of what was fed."""
    return [(c.seq, c.payload.key) for c in commands if isinstance(c, do.Feed)]


def test_row_M8_pieces_reach_the_running_task_in_order() -> None:
    """The first one starts it, the others follow, and closing ends its input once."""
    router = opened()
    assert router.state_of(R1) is RequestState.QUEUED
    commands = router.handle(appended("x"))
    assert len(of(do.Dispatch, commands)) == 1
    assert fed(commands) == [(0, "x")]
    assert fed(router.handle(appended("y"))) == [(1, "y")]
    assert len(of(do.CloseInput, router.handle(closed()))) == 1
    assert router.handle(closed()) == (), "once"
    late = router.handle(appended("z"))
    assert late == (do.Release(payload=inline("z", 10)),), "nothing follows the end"
    router.feed(produced(A), finished(A), consumed(1), produced(B), finished(B))
    assert is_empty(router)


def test_row_M8_an_input_may_begin_with_the_request() -> None:
    """It is fed at once, and stays open."""
    router = opened(first=inline("x", 10))
    assert router.state_of(R1) is RequestState.RUNNING
    assert fed(router.handle(appended("y"))) == [(1, "y")]


def test_row_M8_an_input_that_ends_empty_ends_the_request() -> None:
    """A task without any input is dispatched, closed, and finishes."""
    router = opened()
    commands = router.handle(closed())
    assert [type(c) for c in commands] == [do.Dispatch, do.CloseInput]


def test_row_M8_the_window_holds_back_what_a_task_has_not_absorbed() -> None:
    """Four chunks are on the way at most; absorbing lets the next one go."""
    router = opened()
    commands = [c for n in range(6) for c in router.handle(appended(str(n)))]
    assert fed(tuple(commands)) == [(n, str(n)) for n in range(4)]
    assert fed(router.handle(consumed(1, stage=A, edge_id=IN))) == [(4, "4")]


@pytest.mark.parametrize("recovery", ["retry", "replay"])
def test_row_M8_after_a_death_the_next_attempt_gets_every_piece(recovery: Recovery) -> None:
    """Those that came before it, in order, and those that come after."""
    router = started(line_of_2(limits=LIMITS, stages=STAGES), loaded=False)
    for stage in (A, B):
        for slot in (0, 1):
            which = replica(stage, slot)
            router.feed(
                on.ReplicaJoined(now=0.0, replica=which),
                on.ReplicaReady(now=0.0, replica=which, slots=4, recovery=recovery),
            )
    router.handle(
        on.RequestSubmitted(
            now=0.0,
            channel=API,
            request=R1,
            pipeline=line_of_2().pipelines[0].name,
            inputs=(),
            open_inputs=(TEXT,),
        )
    )
    router.feed(appended("x"), appended("y"), consumed(2, stage=A, edge_id=IN))
    if recovery == "replay":
        chunk = on.ChunkProduced(now=0.0, task=task(A), seq=0, payload=inline("c", 1), length=10)
        router.handle(chunk)
    home = next(
        state.replica
        for state in router.replica_states()
        if str(state.replica) in str(router.story(R1))
    )
    commands = router.handle(died(home))
    assert fed(commands) == [(0, "x"), (1, "y")]
    (dispatch,) = [c for c in commands if isinstance(c, do.Dispatch)]
    assert dispatch.skip_units == (10 if recovery == "replay" else 0)
    again = on.InputAppended(now=0.0, request=R1, input=TEXT, payload=inline("z", 10))
    assert fed(router.handle(again)) == [(2, "z")]


def test_row_M8_what_cannot_be_repeated_ends_with_replica_lost() -> None:
    """A heard request of a stage that only retries fails once, and later pieces are late."""
    router = opened(first=inline("x", 10))
    router.feed(produced(A), consumed(1))
    home = next(
        state.replica
        for state in router.replica_states()
        if f"a: dispatched to {state.replica}" in str(router.story(R1))
    )
    (fail,) = terminals(router.handle(died(home)))
    assert isinstance(fail, do.Fail)
    assert fail.failure.kind is FailureKind.REPLICA_LOST
    assert router.handle(appended("y")) == (do.Release(payload=inline("y", 10)),)


def test_row_M8_and_row_F11_a_client_that_sends_no_more_has_a_deadline() -> None:
    """Twenty seconds after the last piece was used up, however long that took; the client is named."""
    router = opened()
    router.feed(appended("x"), consumed(1, stage=A, edge_id=IN, now=5.0), appended("y", now=15.0))
    used = consumed(2, stage=A, edge_id=IN, now=46.0)
    assert terminals(router.feed(passed(40.0), used, passed(50.0))) == []
    router.handle(consumed(2, stage=A, edge_id=IN, now=60.0))  # told twice: nothing new
    assert terminals(router.handle(passed(65.9))) == []
    (fail,) = terminals(router.handle(passed(66.0)))
    assert isinstance(fail, do.Fail)
    assert fail.failure.where == "client"
    assert "no more of input text for 20 s" in fail.failure.detail


def test_a_request_that_never_gets_input_waits_no_longer() -> None:
    """It is queued, holds no slot, and says what it waits for."""
    router = opened()
    assert router.waiting(1.0)[0].what == "waits for the client to send input text"
    (fail,) = terminals(router.handle(passed(20.0)))
    assert isinstance(fail, do.Fail)
    assert is_empty(router)


def test_what_piles_up_is_bounded_by_the_retention_budget() -> None:
    """First the right to repeat goes, with the four pieces that were fed; then the request."""
    router = opened(limits=Limits(retention_bytes=100))
    for number in range(14):
        assert terminals(router.handle(appended(str(number)))) == []
    (fail,) = terminals(router.handle(appended("too much")))
    assert isinstance(fail, do.Fail)
    assert fail.failure.code == "retention_exceeded"


@pytest.mark.slow
def test_row_M8_many_small_pieces_are_bounded_by_their_number() -> None:
    """However few bytes they have: 65,536 may wait, and the window's four besides are kept for a repeat."""
    router = opened()
    router.is_checking = False
    for number in range(MAX_KEPT_CHUNKS):
        assert not terminals(router.handle(appended(str(number), size=1)))
    router.check_invariants()
    commands = [c for n in range(5) for c in router.handle(appended(f"more {n}", size=1))]
    (fail,) = terminals(commands)
    assert isinstance(fail, do.Fail)
    assert fail.failure.code == "retention_exceeded"
    assert "inputs too large to keep for another attempt" in str(router.story(R1))


def test_row_M8_a_full_input_that_is_never_closed_has_a_deadline() -> None:
    """Its task does not start before the end, so the wait is the client's from the last piece on."""
    full = pipeline(edge(TEXT, A, mode=FULL), outputs=[(AUDIO, A)])
    router = started(deployment(full, limits=LIMITS))
    submitted_open = on.RequestSubmitted(
        now=0.0, channel=API, request=R1, pipeline=full.name, inputs=(), open_inputs=(TEXT,)
    )
    router.feed(submitted_open, appended("x", now=5.0))
    assert router.waiting(6.0)[0].what == "waits for the client to send input text"
    assert terminals(router.handle(passed(24.0))) == []
    (fail,) = terminals(router.handle(passed(25.0)))
    assert isinstance(fail, do.Fail)
    assert fail.failure.where == "client"


def test_row_F2_a_replaying_task_goes_on_behind_its_boundary() -> None:
    """The next attempt gets the boundary, the inputs behind it, and how many units to leave out."""
    router = started(line_of_2(limits=LIMITS, stages=STAGES), loaded=False)
    for stage in (A, B):
        which = replica(stage)
        router.feed(
            on.ReplicaJoined(now=0.0, replica=which),
            on.ReplicaReady(now=0.0, replica=which, slots=4, recovery="replay"),
        )
    router.handle(submitted())
    boundary = Boundary(b"7", {IN: (1, 0)})
    chunk = produced(A, payload=inline("one", 10))
    at_boundary = on.ChunkProduced(
        now=0.0, task=task(A), seq=1, payload=inline("two", 10), length=5, boundary=boundary
    )
    beyond = on.ChunkProduced(now=0.0, task=task(A), seq=2, payload=inline("three", 10), length=3)
    commands = router.feed(
        on.ChunkProduced(now=0.0, task=task(A), seq=0, payload=chunk.payload, length=4), at_boundary
    )
    assert do.Release(payload=inline(f"{R1}.text")) in commands, "what lies before it is not kept"
    router.handle(beyond)
    router.handle(died(replica(A)))
    router.handle(passed(1.0))
    (dispatch,) = [
        c for c in ready(router, replica(A, 0, 2), now=1.0) if isinstance(c, do.Dispatch)
    ]
    assert (dispatch.skip_units, dispatch.resume_units, dispatch.resume) == (12, 9, boundary)
    more = on.ChunkProduced(
        now=1.0, task=task(A, attempt=1), seq=0, payload=inline("four", 10), offset=12, length=1
    )
    assert fed(router.handle(more)) == [(3, "four")]


def test_a_boundary_ahead_of_what_was_fed_is_impossible() -> None:
    """It would drop what nobody has seen."""
    router = started(line_of_2())
    router.handle(submitted())
    wrong = on.ChunkProduced(
        now=0.0, task=task(A), seq=0, payload=inline("x", 1), boundary=Boundary(b"", {IN: (2, 0)})
    )
    with pytest.raises(InvalidTransition, match="bug in Stretto"):
        router.handle(wrong)


def test_row_F2_what_lies_behind_a_boundary_comes_again() -> None:
    """Three pieces, a boundary behind the first: the next attempt gets the second and the third."""
    router = started(line_of_2(limits=LIMITS), loaded=False)
    for stage in (A, B):
        which = replica(stage)
        router.feed(
            on.ReplicaJoined(now=0.0, replica=which),
            on.ReplicaReady(now=0.0, replica=which, slots=4, recovery="replay"),
        )
    router.handle(
        on.RequestSubmitted(
            now=0.0,
            channel=API,
            request=R1,
            pipeline=line_of_2().pipelines[0].name,
            inputs=(),
            open_inputs=(TEXT,),
        )
    )
    router.feed(appended("x"), appended("y"), appended("z"), consumed(3, stage=A, edge_id=IN))
    chunk = on.ChunkProduced(
        now=0.0,
        task=task(A),
        seq=0,
        payload=inline("c", 1),
        length=4,
        boundary=Boundary(b"1", {IN: (1, 0)}),
    )
    assert do.Release(payload=inline("x", 10)) in router.handle(chunk)
    router.feed(died(replica(A)), passed(1.0))
    assert fed(ready(router, replica(A, 0, 2), now=1.0)) == [(1, "y"), (2, "z")]
