"""What every stream of chunks must do, real or a double: it parks, it ends, it loses nothing.

Code that reads `async for chunk in stream` is only as good as its doubles. One that answers at once for
ever, as a careless mock does, turns a test into a busy loop; one that answers `None` hides a bug.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NoReturn, Protocol

from stretto.errors import StageError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from stretto.errors import StrettoError

_IN_TIME_S = 5.0
_TURNS = 5


class StreamCheckFailed(AssertionError):
    """The stream breaks its contract; the text says which part, and how it was seen."""


class Source(Protocol):
    """The other end of a stream under check."""

    def put(self, number: int) -> None:
        """Send a chunk; chunks of different numbers differ."""
        ...

    def finish(self) -> None:
        """End the stream well."""
        ...

    def fail(self, error: StrettoError) -> None:
        """End the stream badly."""
        ...


async def check_stream(make: Callable[[], tuple[AsyncIterator[object], Source]]) -> None:
    """Check a kind of stream.

    Args:
        make: Returns a new stream and its other end.

    Raises:
        StreamCheckFailed: It breaks its contract.
    """
    await _check_parks(*make())
    await _check_order(*make())
    await _check_failure(*make())
    await _check_wakes(*make())
    await _check_cancelled_read(*make())


async def _check_parks(stream: AsyncIterator[object], source: Source) -> None:
    reading = asyncio.ensure_future(_next(stream))
    try:
        await _turns()
        if reading.done():
            _fail(f"a read of an empty stream did not wait: {_shown(reading)}")
        source.put(0)
        if await _in_time(reading, "a parked read was not woken by a chunk") is None:
            _fail("a read was answered with None")
    finally:
        await _drop(reading)


async def _check_order(stream: AsyncIterator[object], source: Source) -> None:
    for number in range(3):
        source.put(number)
    source.finish()
    seen: list[object] = []
    while True:
        try:
            seen.append(await _in_time(_next(stream), "a chunk that was sent is not read"))
        except StopAsyncIteration:
            break
        if len(seen) > 3 + 1:  # a bare end may come as a chunk of its own
            _fail("it gives more chunks than were sent, perhaps for ever")
    if len(seen) < 3:  # noqa: PLR2004 - as many as were put
        _fail(f"{3 - len(seen)} chunks that were sent before the end are missing")
    try:
        await _in_time(_next(stream), "a read after the end does not return")
    except StopAsyncIteration:
        return
    _fail("a read after the end gives something")


async def _check_failure(stream: AsyncIterator[object], source: Source) -> None:
    source.put(0)
    source.fail(StageError("broken"))
    await _in_time(_next(stream), "a chunk before a failure is not read")
    for _ in range(2):
        try:
            await _in_time(_next(stream), "a failed stream does not return")
        except StageError:
            continue
        except StopAsyncIteration:
            _fail("a failure looks like a good end")
        _fail("a failed stream gives something")


async def _check_wakes(stream: AsyncIterator[object], source: Source) -> None:
    reading = asyncio.ensure_future(_next(stream))
    await _turns()
    source.fail(StageError("broken"))
    try:
        await _in_time(reading, "a parked read is not woken by a failure")
    except StageError:
        return
    _fail("a parked read hides a failure")


async def _check_cancelled_read(stream: AsyncIterator[object], source: Source) -> None:
    reading = asyncio.ensure_future(_next(stream))
    await _turns()
    await _drop(reading)
    source.put(0)
    await _in_time(_next(stream), "a cancelled read has taken the next chunk with it")


async def _next(stream: AsyncIterator[object]) -> object:
    return await anext(stream)


async def _in_time(awaitable: Awaitable[object], what: str) -> object:
    try:
        async with asyncio.timeout(_IN_TIME_S):
            return await awaitable
    except TimeoutError:
        _fail(what)


async def _turns() -> None:
    loop = asyncio.get_running_loop()
    for _ in range(_TURNS):
        turn = loop.create_future()
        loop.call_soon(turn.set_result, None)
        await turn


async def _drop(task: asyncio.Task[object]) -> None:
    task.cancel()
    await asyncio.wait([task])


def _shown(task: asyncio.Task[object]) -> str:
    error = task.exception()
    return repr(task.result()) if error is None else f"it raised {error!r}"


def _fail(what: str) -> NoReturn:
    raise StreamCheckFailed(f"{what}.")
