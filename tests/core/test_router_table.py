"""The table of legal events: the code obeys it, and its picture in the docs is fresh."""

from __future__ import annotations

import pickle

import pytest

from scripts.router_table import TARGET, page
from stretto.core import commands as do
from stretto.core import events as on
from stretto.core.graph import StageSpec
from stretto.core.requests import RequestState
from stretto.core.router import LATE, LEGAL
from stretto.errors import Failure, FailureKind, InvalidTransition
from tests.core.builders import (
    R1,
    R2,
    TEXT,
    A,
    B,
    Checked,
    aborted,
    cancelled,
    consumed,
    drained,
    failed,
    finished,
    inline,
    line_of_2,
    produced,
    started,
    submitted,
)

BROKEN = on.RequestBroken(
    now=0.0,
    request=R1,
    failure=Failure(kind=FailureKind.INVALID_TRANSITION, detail="a bug"),
    payloads=(inline("lost"),),
)
EVENTS: dict[type[on.Event], on.AnyEvent] = {
    type(event): event
    for event in (
        submitted(),
        on.InputAppended(now=0.0, request=R1, input=TEXT, payload=inline("more")),
        on.InputClosed(now=0.0, request=R1, input=TEXT),
        aborted(),
        BROKEN,
        drained(0),
        produced(A, 1),
        consumed(1, stage=A, edge_id="request.text->a.in"),
        finished(A),
        failed(A),
        cancelled(A),
    )
}


def in_state(state: RequestState) -> Checked:
    """Return a router whose first request is in a state; running means that A has made one chunk."""
    router = started(
        line_of_2(
            stages=(
                StageSpec(id=A, slots=1),
                StageSpec(id=B, slots=1),
            )
        )
    )
    if state is RequestState.QUEUED:
        router.handle(submitted(R2))
    router.handle(submitted())
    if state is not RequestState.QUEUED:
        router.handle(produced(A))
    if state is RequestState.DRAINING:
        router.handle(aborted())
    if state is RequestState.DONE:
        router.feed(finished(A), finished(B))
    assert router.state_of(R1) is state
    return router


def test_the_page_is_fresh() -> None:
    """`python -m scripts.router_table` writes what is committed."""
    assert TARGET.read_text() == page()


def test_the_table_has_a_row_for_every_event_about_a_request() -> None:
    """No event that names a request or a task is missing."""
    about_requests = {
        event
        for event in on.Event.__subclasses__()
        if {"request", "task"} & set(event.__struct_fields__)
    }
    assert set(LEGAL) == about_requests == set(EVENTS)


@pytest.mark.parametrize("state", RequestState)
@pytest.mark.parametrize("kind", LEGAL, ids=lambda kind: kind.__name__)
def test_the_router_obeys_the_table(kind: type[on.Event], state: RequestState) -> None:
    """An absent pair raises and changes nothing; a late one is counted; others lead where it says."""
    router = in_state(state)
    outcomes = LEGAL[kind].get(state)
    before = pickle.dumps(router)
    late = router.statistics().counters.late
    if outcomes is None:
        with pytest.raises(InvalidTransition):
            router.handle(EVENTS[kind])
        assert pickle.dumps(router) == before
        return
    if kind is on.TaskCancelled and state is RequestState.RUNNING:
        router.handle(finished(B))  # A is abandoned and told to stop; only then may it be cancelled
    commands = router.handle(EVENTS[kind])
    if outcomes == LATE:
        payloads = on.payloads_of(EVENTS[kind])
        assert commands == tuple(do.Release(payload=payload) for payload in payloads)
        assert router.statistics().counters.late == late + 1
        assert router.state_of(R1) is state
    else:
        assert router.state_of(R1) in outcomes
