"""The stream suite passes real streams and doubles of ours, and sees what a careless double does."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from stretto.testing import StreamCheckFailed, check_stream
from tests.support.fake_engine import FakeEngine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from stretto.errors import StrettoError
    from stretto.testing.stream_suite import Source
    from tests.support.fake_engine import Job


class EngineSource:
    """The other end of a fake engine's stream."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def put(self, number: int) -> None:
        """Send one sample."""
        self._job.audio(number.to_bytes(2, "little"))

    def finish(self) -> None:
        """End well."""
        self._job.finish()

    def fail(self, error: StrettoError) -> None:
        """End badly."""
        self._job.fail(error)


def of_fake_engine() -> tuple[AsyncIterator[object], Source]:
    """Return a stream of the double that the HTTP edge is tested with."""
    engine = FakeEngine()
    stream = engine.generate(pipeline="speech", outputs=(), options={}, label="", text="")
    return stream, EngineSource(engine.jobs[0])


async def test_row_Q3_the_double_of_the_engine_passes_the_suite() -> None:
    """What the HTTP edge is tested with behaves like the real thing: it is the real stream."""
    await check_stream(of_fake_engine)


class Careless:
    """A double with one fault."""

    def __init__(self, fault: str) -> None:
        self._fault = fault
        self._queue: asyncio.Queue[object] = asyncio.Queue()

    def __aiter__(self) -> Careless:
        """Return itself."""
        return self

    async def __anext__(self) -> object:
        """Return the next chunk, with the fault."""
        if self._fault == "never suspends":
            return 0
        item = await self._queue.get()
        if item is None:
            self._queue.put_nowait(None)
            if self._fault == "none at the end":
                return None
            raise StopAsyncIteration
        if isinstance(item, Exception):
            if self._fault == "hides a failure":
                raise StopAsyncIteration
            if self._fault != "fails only once":
                self._queue.put_nowait(item)
            raise item
        return None if self._fault == "gives nothing" else item

    def put(self, number: int) -> None:
        """Send."""
        if self._fault != "loses chunks" or number != 1:
            self._queue.put_nowait(number)

    def finish(self) -> None:
        """End well."""
        if self._fault == "ends before its chunks":
            while not self._queue.empty():
                self._queue.get_nowait()
        self._queue.put_nowait(None)

    def fail(self, error: StrettoError) -> None:
        """End badly."""
        if self._fault == "fails only once":
            self._queue.put_nowait(error)
            self._queue.put_nowait(0)
        else:
            self._queue.put_nowait(error)


async def test_a_careful_double_passes() -> None:
    """The faults below are what fails, not the double that has them."""

    def make() -> tuple[AsyncIterator[object], Source]:
        double = Careless("")
        return double, double

    await check_stream(make)


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("never suspends", "did not wait"),
        ("gives nothing", "answered with None"),
        ("none at the end", "more chunks than were sent"),
        ("hides a failure", "looks like a good end"),
        ("fails only once", "gives something"),
        ("loses chunks", "are missing"),
        ("ends before its chunks", "are missing"),
    ],
)
async def test_row_Q3_a_careless_double_is_seen(fault: str, text: str) -> None:
    """A source that never suspends is detected, not spun on; so are its relatives."""

    def make() -> tuple[AsyncIterator[object], Source]:
        double = Careless(fault)
        return double, double

    with pytest.raises(StreamCheckFailed, match=text):
        await check_stream(make)
