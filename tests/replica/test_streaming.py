"""Per-request backends in a replica, at the other end of a real link."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from stretto.backends.scripted import check_counter_audio, tag_of
from stretto.core.commands import UNLIMITED
from stretto.errors import FailureKind
from stretto.messages.link import Cancel, Consumed, Ended, Grant, Produced, Reported, Viewed
from stretto.types import SHARED_MEMORY
from tests.replica import backends
from tests.replica.rig import Rig, listening, numbered, replica_here, task_key

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

STREAMING = f"{backends.__name__}:Streaming"
A, B = task_key("a"), task_key("b")


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncGenerator[Rig]:
    """Listen for a replica."""
    shared = tmp_path / "shm"
    shared.mkdir()
    async with listening(tmp_path, shared) as rig:
        yield rig


@pytest.fixture
def seen() -> backends.Recorder:
    """Record what the backend is asked."""
    return backends.forget()


async def test_tasks_run_side_by_side(rig: Rig) -> None:
    """Each gets its own audio, whole, although all of them wait all the time."""
    async with replica_here(rig, "scripted-stream"):
        keys = list(numbered(10))
        for key in keys:
            rig.run_task(key, key.request, '{"chunks": 5, "delay_s": 0.002}')
        for key in keys:
            assert (await rig.ended(key)).outcome == "finished"
            assert check_counter_audio(rig.audio(key), tag_of(key.request)) == 5 * 480
            assert [m.offset for m in rig.of(Produced, key)] == [480 * n for n in range(5)]


async def test_a_generator_that_never_waits_does_not_keep_the_loop(rig: Rig) -> None:
    """Its chunks leave one by one, and a cancel reaches it."""
    backends.forget()
    async with replica_here(rig, STREAMING):
        rig.run_task(A, "count 1000000")
        await rig.until(lambda: rig.of(Produced, A))
        rig.send(Cancel(A))
        assert (await rig.ended(A)).outcome == "cancelled"


async def test_a_generator_is_advanced_only_with_send_right(
    rig: Rig, seen: backends.Recorder
) -> None:
    """As many chunks are made as were granted, and inputs beyond them are not taken."""
    async with replica_here(rig, STREAMING):
        rig.open(A, chunks=2)
        for text in ("one", "two", "three"):
            rig.feed(A, {"text": text})
        rig.close_input(A)
        await rig.until(lambda: len(rig.chunks(A)) == 2)
        rig.run_task(B, "x")
        await rig.ended(B)
        assert len(seen.inputs["a"]) == 2
        assert rig.of(Consumed, A)[-1].up_to == 2
        rig.send(Grant(A, 4, UNLIMITED))
        assert (await rig.ended(A)).outcome == "finished"
        assert [values["text"] for values in rig.chunks(A)] == ["one", "two", "three"]


async def test_returning_ends_the_task(rig: Rig, seen: backends.Recorder) -> None:
    """Inputs that are left do not matter."""
    async with replica_here(rig, STREAMING):
        rig.open(A)
        rig.feed(A, {"text": "return"})
        rig.feed(A, {"text": "ignored"})
        assert (await rig.ended(A)).outcome == "finished"
        assert seen.closed == {"a": 1}


@pytest.mark.parametrize(
    ("text", "detail"),
    [("fail so", "ValueError: so"), ("none", "a NoneType where a Chunk belongs")],
)
async def test_what_goes_wrong_fails_its_task_only(
    rig: Rig, seen: backends.Recorder, text: str, detail: str
) -> None:
    """The failure says what it was, and the generator is closed."""
    async with replica_here(rig, STREAMING):
        rig.open(B)
        rig.run_task(A, text)
        failure = (await rig.ended(A)).failure
        assert failure is not None
        assert detail in failure.detail
        assert seen.closed["a"] == 1
        rig.feed(B, {"text": "fine"})
        await rig.until(lambda: rig.chunks(B))


async def test_an_input_that_is_lost_fails_its_task(rig: Rig, seen: backends.Recorder) -> None:
    """The generator is told by an exception at its next input."""
    async with replica_here(rig, STREAMING):
        rig.open(A)
        payload = rig.feed(A, {"text": "x" * 100_000})
        assert rig.shared_memory_dir is not None
        (Path(rig.shared_memory_dir) / payload.key).unlink()
        failure = (await rig.ended(A)).failure
        assert failure is not None
        assert failure.kind is FailureKind.PAYLOAD_LOST
        assert seen.closed == {"a": 1}


@pytest.mark.parametrize("text", ["hang", "deaf"])
async def test_a_cancel_closes_the_generator(rig: Rig, seen: backends.Recorder, text: str) -> None:
    """Also one that answers its cancellation with another chunk, which is dropped."""
    async with replica_here(rig, STREAMING):
        rig.open(A)
        rig.feed(A, {"text": "x"})
        rig.feed(A, {"text": text})
        await rig.until(lambda: rig.of(Consumed, A) and rig.of(Consumed, A)[-1].up_to == 2)
        rig.send(Cancel(A))
        rig.send(Cancel(A))
        assert await rig.ended(A) == Ended(A, "cancelled")
        assert rig.chunks(A) == [{"text": "x"}]
        assert seen.closed == {"a": 1}


@pytest.mark.parametrize("text", ["hang", "deaf"])
async def test_a_cancelled_task_ends_when_its_generator_has_tidied_up(
    rig: Rig, seen: backends.Recorder, text: str
) -> None:
    """A second cancel does not disturb it."""
    seen.may_tidy.clear()
    async with replica_here(rig, STREAMING):
        rig.run_task(A, text)
        await rig.until(lambda: rig.of(Consumed, A))
        rig.send(Cancel(A))
        async with asyncio.timeout(5):
            await seen.tidying.wait()
        rig.send(Cancel(A))
        rig.send(Grant(A, 1, UNLIMITED))
        for _ in range(3):
            key = task_key(f"b{len(rig.frames)}")
            rig.open(key)
            rig.send(Cancel(key))
            await rig.ended(key)
        assert rig.end(A) is None
        assert not seen.closed
        seen.may_tidy.set()
        assert (await rig.ended(A)).outcome == "cancelled"
        assert seen.closed == {"a": 1}


async def test_a_task_cancelled_in_the_frame_that_opened_it_never_runs(
    rig: Rig, seen: backends.Recorder
) -> None:
    """It ends as cancelled all the same."""
    async with replica_here(rig, STREAMING):
        rig.run_task(A, "x")
        rig.send(Cancel(A))
        assert (await rig.ended(A)).outcome == "cancelled"
        assert not seen.opened


async def test_payloads_in_shared_memory_are_let_go(rig: Rig) -> None:
    """Each is reported once no view of it remains, the last one before the end."""
    async with replica_here(rig, "scripted-stream", {"script": {"mode": "echo"}}):
        rig.open(A)
        payloads = [rig.feed(A, {"data": memoryview(bytes(100_000))}) for _ in range(3)]
        assert all(payload.place == SHARED_MEMORY for payload in payloads)
        await rig.until(lambda: len(rig.chunks(A)) == 3)
        assert len(rig.of(Viewed, A)) < 3
        rig.close_input(A)
        await rig.ended(A)
        assert [m.payload for m in rig.of(Viewed, A)] == payloads


async def test_a_replica_that_ends_stops_its_generators(rig: Rig, seen: backends.Recorder) -> None:
    """With the link gone nobody hears them; the exit code is 0."""
    async with replica_here(rig, STREAMING) as living:
        rig.run_task(A, "hang")
        await rig.until(lambda: rig.of(Consumed, A))
        rig.hang_up()
        assert await living == 0
        assert seen.closed == {"a": 1}


async def test_row_E21_metrics_are_told_whatever_comes_of_the_chunk(rig: Rig) -> None:
    """The numbers of a chunk that can't be sent are true all the same."""
    backends.forget()
    async with replica_here(rig, STREAMING):
        rig.run_task(A, "measured")
        assert (await rig.ended(A)).outcome == "failed"
        told = await rig.until(lambda: rig.of(Reported)[1:] and rig.of(Reported))
        assert [(m.running, m.values) for m in told] == [(1, {"seen": 1.0}), (0, {"seen": 1.0})]
