"""Chunks, windows, credit, retention and payload holds."""

from __future__ import annotations

import pytest

from stretto.core import commands as do
from stretto.core import events as on
from stretto.core.commands import UNLIMITED
from stretto.core.graph import Limits, StageSpec
from stretto.errors import FailureKind, InvalidTransition
from stretto.types import ChannelId
from tests.core.builders import (
    API,
    AUDIO,
    FULL,
    R1,
    TEXT,
    A,
    B,
    C,
    D,
    aborted,
    cancelled,
    consumed,
    deployment,
    diamond,
    died,
    drained,
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
    shm,
    started,
    submitted,
    task,
    terminals,
)

FEW = Limits(client_window_chunks=4, client_window_bytes=1000)


def grants(commands: tuple[do.AnyCommand, ...]) -> list[tuple[int, int]]:
    """Return the send rights that were granted."""
    return [(c.chunks, c.bytes) for c in commands if isinstance(c, do.Grant)]


class TestWindows:
    """A producer may be ahead of its consumers by so much."""

    def test_credit_comes_back_in_steps_of_half_a_window(self) -> None:
        """One absorbed chunk of a window of four is not worth a message, two are."""
        router = started(line_of_2())
        router.feed(submitted(), produced(A), produced(A, 1))
        assert grants(router.handle(consumed(1))) == []
        assert grants(router.handle(consumed(2))) == [(6, 1020)]

    def test_a_producer_that_waits_gets_any_credit_at_once(self) -> None:
        """At the end of its right even one chunk is worth a message."""
        router = started(line_of_2())
        router.feed(submitted(), *[produced(A, seq) for seq in range(4)])
        assert grants(router.handle(consumed(1))) == [(5, 1010)]

    def test_bytes_bound_as_chunks_do(self) -> None:
        """The right ends at the byte bound, one chunk over it at most."""
        router = started(line_of_2())
        router.feed(submitted(), produced(A, payload=inline("big", 1500)))
        with pytest.raises(InvalidTransition, match="ends at chunk 4 and byte 1000"):
            router.handle(produced(A, 1))
        assert grants(router.handle(consumed(1))) == [(5, 2500)]

    def test_a_chunk_beyond_the_send_right_is_refused(self) -> None:
        """A replica that does not keep to its right is not believed."""
        router = started(line_of_2())
        router.feed(submitted(), *[produced(A, seq) for seq in range(4)])
        with pytest.raises(InvalidTransition, match="ends at chunk 4"):
            router.handle(produced(A, 4))

    def test_the_client_is_a_consumer_with_a_window(self) -> None:
        """What it takes flows back to the output's stage."""
        router = started(line_of_2(limits=FEW))
        router.feed(submitted(), produced(A))
        assert grants(router.feed(produced(B), produced(B, 1), drained(1))) == []
        assert grants(router.handle(drained(2))) == [(6, 1020)]

    def test_the_smallest_window_of_all_sinks_binds(self) -> None:
        """A feeds B and C: it may be ahead of the slower one only."""
        router = started(
            deployment(
                pipeline(
                    edge(TEXT, A),
                    edge(A, B, chunks=8),
                    edge(A, C, chunks=2),
                    edge(B, D, name="left"),
                    edge(C, D, name="right"),
                    outputs=[(AUDIO, D)],
                )
            )
        )
        dispatch = router.handle(submitted())[0]
        assert isinstance(dispatch, do.Dispatch)
        assert dispatch.chunks == 2
        router.feed(produced(A), produced(A, 1))
        assert grants(router.handle(consumed(2))) == [], "C has absorbed nothing"
        assert grants(router.handle(consumed(1, stage=C, edge_id="a->c.in"))) == [(3, 1010)]

    def test_a_producer_that_waits_for_chunks_gets_them_without_bytes(self) -> None:
        """B's chunk bound stops A, C's byte bound does not: B's credit alone is enough."""
        router = started(
            deployment(
                pipeline(
                    edge(TEXT, A),
                    edge(A, B, chunks=4, nbytes=9000),
                    edge(A, C, chunks=9, nbytes=1000),
                    edge(B, D, name="left"),
                    edge(C, D, name="right"),
                    outputs=[(AUDIO, D)],
                )
            )
        )
        router.feed(submitted(), *[produced(A, seq) for seq in range(4)])
        assert grants(router.handle(consumed(1))) == [(5, 1000)]

    def test_full_edges_do_not_bind_their_source(self) -> None:
        """A may make all it wants; B is fed within the window when A has ended."""
        router = started(
            deployment(
                pipeline(edge(TEXT, A), edge(A, B, mode=FULL, chunks=2), outputs=[(AUDIO, B)])
            )
        )
        dispatch = router.handle(submitted())[0]
        assert isinstance(dispatch, do.Dispatch)
        assert (dispatch.chunks, dispatch.bytes) == (UNLIMITED, UNLIMITED)
        for seq in range(5):
            assert of(do.Feed, router.handle(produced(A, seq))) == []
        commands = router.handle(finished(A))
        assert [c.seq for c in commands if isinstance(c, do.Feed)] == [0, 1]
        assert of(do.CloseInput, commands) == []
        commands = router.handle(consumed(2))
        assert [c.seq for c in commands if isinstance(c, do.Feed)] == [2, 3]
        commands = router.handle(consumed(3))
        assert [c.seq for c in commands if isinstance(c, do.Feed)] == [4]
        assert len(of(do.CloseInput, commands)) == 1

    def test_a_task_starts_when_all_its_full_inputs_are_there(self) -> None:
        """One of two is not enough, unless everything has ended."""
        router = started(
            deployment(
                pipeline(
                    edge(TEXT, A),
                    edge(TEXT, B),
                    edge(A, C, mode=FULL, name="left"),
                    edge(B, C, mode=FULL, name="right"),
                    outputs=[(AUDIO, C)],
                )
            )
        )
        router.handle(submitted())
        assert of(do.Dispatch, router.feed(produced(A), finished(A))) == []
        assert len(of(do.Dispatch, router.handle(finished(B)))) == 1

    def test_reconverging_streams_do_not_deadlock(self) -> None:
        """In a diamond C may go on while D waits for B and B for A's end."""
        router = started(diamond())
        router.feed(submitted(), produced(A))
        for seq in range(6):
            router.handle(produced(C, seq))
        router.handle(finished(C))
        commands = router.handle(finished(A))
        assert [c.task.stage for c in commands if isinstance(c, do.Dispatch)] == [B]
        router.feed(produced(B), finished(B))
        assert [type(c) for c in terminals(router.handle(finished(D)))] == [do.Finish]
        assert is_empty(router)


class TestHolds:
    """A payload is released once, when nobody needs it any more."""

    def test_a_payload_in_shared_memory_is_held_while_it_is_viewed(self) -> None:
        """Absorbing is not the end of viewing."""
        router = started(line_of_2())
        chunk = shm("frames")
        router.feed(submitted(), produced(A, payload=chunk), consumed(1))
        assert of(do.Release, router.handle(produced(B))) != []
        done = on.PayloadDone(now=0.0, holder=task(B), payload=chunk)
        assert router.handle(done) == (do.Release(payload=chunk),)
        assert router.handle(done) == (), "late"

    def test_a_payload_on_two_edges_is_held_by_both(self) -> None:
        """Fan-out: one payload, several holders; also when one task views it twice."""
        router = started(
            deployment(
                pipeline(
                    edge(TEXT, A),
                    edge(A, B, name="left"),
                    edge(A, B, name="right"),
                    outputs=[(AUDIO, B)],
                )
            )
        )
        chunk = shm("frames")
        router.feed(submitted(), produced(A, payload=chunk), produced(B))
        done = on.PayloadDone(now=0.0, holder=task(B), payload=chunk)
        assert router.handle(done) == (), "still viewed by the other edge"
        assert router.handle(done) == (do.Release(payload=chunk),)

    def test_the_end_of_a_task_drops_its_views(self) -> None:
        """A replica that has ended a task views nothing of it."""
        router = started(line_of_2())
        chunk = shm("frames")
        router.feed(submitted(), produced(A, payload=chunk), produced(B))
        assert do.Release(payload=chunk) in router.handle(finished(B))

    def test_what_a_client_views_outlives_its_request(self) -> None:
        """The API process is done with it later, or closes."""
        for last in (
            on.PayloadDone(now=0.0, holder=API, payload=shm("audio")),
            on.ChannelClosed(now=0.0, channel=API),
        ):
            router = started(line_of_2())
            router.feed(submitted(), produced(A), finished(A), produced(B, payload=shm("audio")))
            assert do.Release(payload=shm("audio")) not in router.handle(finished(B))
            assert router.handle(last) == (do.Release(payload=shm("audio")),)

    def test_inline_output_is_released_when_it_has_been_sent(self) -> None:
        """The command after the `Emit` releases it, also if a stage takes it too and was done at once."""
        router = started(line_of_2())
        router.feed(submitted(), produced(A))
        emit, trimmed, release = router.handle(produced(B))
        assert isinstance(emit, do.Emit)
        assert trimmed == do.Release(payload=inline(f"{R1}.a.0"))
        assert release == do.Release(payload=inline(f"{R1}.b.0"))
        assert router.handle(produced(A, 1))[-1] == do.Release(payload=inline(f"{R1}.a.1"))

    def test_late_views_are_counted_and_dropped(self) -> None:
        """Unknown holders and payloads change nothing."""
        router = started(line_of_2())
        router.handle(submitted())
        for holder in (task(A), task(B), task(A, attempt=3), task(C), API, ChannelId("9.9")):
            assert router.handle(on.PayloadDone(now=0.0, holder=holder, payload=shm("x"))) == ()
        assert router.statistics().counters.late == 6


class TestPreviews:
    """A preview goes to outputs only; it costs no credit and has no place in the stream."""

    def test_a_preview_reaches_the_client_beside_the_chunks(self) -> None:
        """It carries its own number, and what follows is numbered as if it had not been."""
        router = started(line_of_2(limits=FEW))
        router.feed(submitted(), produced(A))
        emit, release = router.handle(produced(B, 7, kind="preview", payload=inline("p")))
        assert isinstance(emit, do.Emit)
        assert (emit.kind, emit.seq, emit.timings) == ("preview", 7, None)
        assert release == do.Release(payload=inline("p"))
        for seq in (0, 1):
            emit = router.handle(produced(B, seq))[0]
            assert isinstance(emit, do.Emit)
            assert (emit.seq, emit.timings is not None) == (seq, seq == 0)

    def test_a_preview_of_an_inner_stage_is_released(self) -> None:
        """It is not fed over edges."""
        router = started(line_of_2())
        router.handle(submitted())
        commands = router.handle(produced(A, 0, kind="preview", payload=shm("p")))
        assert commands == (do.Release(payload=shm("p")),)

    def test_a_preview_of_a_task_that_has_ended_is_impossible(self) -> None:
        """Nothing follows a task's end."""
        router = started(line_of_2())
        router.feed(submitted(), produced(A), finished(A))
        with pytest.raises(InvalidTransition, match="while finished"):
            router.handle(produced(A, 1, kind="preview"))


class TestRetention:
    """What is kept for full edges and for retries is bounded in bytes."""

    def test_inputs_that_are_too_large_to_keep_are_given_up_first(self) -> None:
        """B can't be repeated any more, but the request goes on."""
        router = started(line_of_2(limits=Limits(retention_bytes=500)))
        chunk = inline("big", 600)
        router.feed(submitted(), produced(A, payload=chunk))
        story = router.story(R1)
        assert story is not None
        assert "b: inputs too large to keep for another attempt" in str(story)
        commands = router.handle(died(replica(B)))
        assert [c.failure.detail for c in commands if isinstance(c, do.Fail)] == [
            "request 1.1-1: replica b/0#1 died (exit 9) and this can't be repeated; try again"
        ]

    def test_a_task_that_has_not_begun_keeps_its_right_to_a_retry(self) -> None:
        """Giving up what A was fed is enough; B begins later, dies and is repeated."""
        router = started(line_of_2(limits=Limits(retention_bytes=500)))
        router.feed(submitted(), died(replica(B)), produced(A, payload=inline("x", 495)))
        story = str(router.story(R1))
        assert "a: inputs too large to keep for another attempt" in story
        for incarnation in (2, 3):
            router.handle(passed(float(incarnation)))
            ready(router, replica(B, 0, incarnation), now=float(incarnation))
            if incarnation == 2:
                assert of(do.Fail, router.handle(died(replica(B, 0, 2), now=2.5))) == []
        assert "b: dispatched to b/0#3" in str(router.story(R1))

    def test_a_full_edge_that_grows_too_large_fails_its_request(self) -> None:
        """Row of architecture 11.4: overflow is that request's failure."""
        router = started(
            deployment(
                pipeline(edge(TEXT, A), edge(A, B, mode=FULL), outputs=[(AUDIO, B)]),
                limits=Limits(retention_bytes=500),
            )
        )
        router.feed(submitted(), produced(A, payload=inline("x", 400)))
        commands = router.handle(produced(A, 1, payload=inline("y", 200)))
        (fail,) = [c for c in commands if isinstance(c, do.Fail)]
        assert fail.failure.code == "retention_exceeded"
        assert fail.failure.kind is FailureKind.STAGE_ERROR
        router.handle(cancelled(A))
        assert is_empty(router)

    def test_inputs_are_dropped_when_the_first_chunk_was_forwarded(self) -> None:
        """After that they are not needed for a retry."""
        router = started(line_of_2())
        router.feed(submitted(), produced(A))
        assert do.Release(payload=inline(f"{R1}.a.0")) in router.handle(produced(B))

    def test_a_stage_that_never_repeats_keeps_nothing(self) -> None:
        """Its inputs are dropped as soon as they are fed."""
        router = started(line_of_2(stages=(StageSpec(id=A, recovery="fail"),)))
        assert do.Release(payload=inline(f"{R1}.text")) in router.handle(submitted())


def test_chunks_after_an_abort_are_late_and_released() -> None:
    """No `Emit` follows the terminal; the count of late events grows."""
    router = started(line_of_2())
    router.feed(submitted(), produced(A), aborted())
    assert router.handle(produced(B)) == (do.Release(payload=inline(f"{R1}.b.0")),)
    assert router.feed(consumed(1), drained(0)) == ()
    assert router.statistics().counters.late == 3
