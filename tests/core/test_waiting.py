"""What an open request waits for is said in words, whoever holds it up."""

from __future__ import annotations

import pytest

from stretto.core import events as on
from stretto.core.graph import StageSpec
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
    consumed,
    died,
    finished,
    line_of_2,
    produced,
    replica,
    started,
    submitted,
)


def what(router: Checked, now: float = 1.0) -> list[str]:
    """Return the words for each open request."""
    return [each.what for each in router.waiting(now)]


def test_nothing_is_open_at_first() -> None:
    """An empty list, not a line about nothing."""
    assert started(line_of_2()).waiting(1.0) == ()


def test_a_request_is_described_by_its_names_state_and_age() -> None:
    """The client's own name is its label."""
    router = started(line_of_2())
    router.feed(submitted(R1, now=0.5))
    (found,) = router.waiting(2.0)
    assert (found.request, found.pipeline, found.state, found.age_s) == (R1, "p", "running", 1.5)


def test_an_entry_that_computes_and_a_successor_that_waits_for_it() -> None:
    """Each part that has not finished has a clause."""
    router = started(line_of_2())
    router.feed(submitted())
    assert what(router) == ["a: a/0#1 computes, nothing new for 1.0 s; b: waits for a to begin"]
    router.feed(produced(A, 0, now=1.0), consumed(1, now=1.0))
    assert what(router, 3.0) == [
        "a: a/0#1 computes, nothing new for 2.0 s; b: waits for the next chunk of a"
    ]


def test_a_successor_that_does_not_take_its_chunks() -> None:
    """The producer's window is full; its consumer is named."""
    router = started(line_of_2(chunks=2))
    router.feed(submitted(), produced(A, 0), produced(A, 1))
    (words,) = what(router, 5.0)
    assert words.startswith("a: waits for b to take its chunks, for 5.0 s; b: b/0#1 computes")


def test_a_client_that_does_not_read() -> None:
    """The output's window is full."""
    router = started(line_of_2())
    router.feed(submitted(), produced(A, 0), consumed(1), finished(A))
    seq = 0
    while router.waiting(0.0)[0].what.startswith("b: b/0#1 computes"):
        router.feed(produced(B, seq))
        seq += 1
    assert what(router, 3.0) == ["b: waits for the client to take its chunks, for 3.0 s"]


def test_a_full_stage_and_a_queue_behind_it() -> None:
    """Slots that are taken are counted."""
    router = started(line_of_2(stages=[StageSpec(id=B, slots=1)]))
    router.feed(submitted(R1), submitted(R2), submitted(R3))
    assert what(router)[1:] == ["queue: no free slot at b (1 taken)"] * 2
    assert [each.state for each in router.waiting(1.0)] == ["running", "queued", "queued"]


@pytest.mark.parametrize("loaded", [True, False])
def test_a_stage_without_a_ready_replica(loaded: bool) -> None:  # noqa: FBT001 - both are shown
    """It starts, or it has died."""
    router = started(line_of_2(), loaded=loaded)
    if loaded:
        router.feed(died(replica(B)))
    router.feed(submitted())
    missing = "b" if loaded else "a, b"
    assert what(router) == [f"queue: no ready replica of {missing}"]


def test_a_request_that_has_ended_and_waits_for_confirmation() -> None:
    """Its slot is not free yet."""
    router = started(line_of_2())
    router.feed(submitted(), aborted())
    assert what(router) == ["it has ended; a must confirm the cancellation"]


def test_requests_are_found_by_either_name() -> None:
    """Live and recently ended ones; labels need not be unique."""
    router = started(line_of_2())
    event = submitted(R1)
    router.feed(
        on.RequestSubmitted(
            now=0.0,
            channel=API,
            request=event.request,
            pipeline=event.pipeline,
            inputs=event.inputs,
            label="mine",
        ),
        submitted(R2),
    )
    assert router.named("mine") == router.named(R1) == (R1,)
    router.feed(aborted(R1), cancelled())
    assert router.named("mine") == (R1,)
    assert router.named("nobody") == ()
    assert {"mine", R1, R2} <= set(router.names())
