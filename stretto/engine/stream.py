"""One request's way back: the inbox that its channel fills, and the stream that its client reads.

Theory of operation

  The channel puts messages into the `Inbox` and never waits; the reader takes them out. A read that
  finds nothing parks on a future that only says "look again", so a cancelled read loses nothing.
  What was put before the end is read before the end.

  Taking a chunk earns a credit. Credits are returned when half of the window was taken, or when the
  reader is about to wait; so a fast reader sends few of them and a slow one holds its producers back.
  The inbox itself has no other bound: without credits nothing is sent to it.

  The channel holds the inbox, the client holds the stream. A client that just lets go of its stream
  has aborted the request.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from stretto.engine.payloads import input_values
from stretto.errors import Cancelled, InvalidRequest, StrettoError
from stretto.transport.pulling import is_far
from stretto.types import InputName

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from types import TracebackType
    from typing import Self

    from stretto.core.commands import Timings
    from stretto.messages.channel import Output
    from stretto.types import OutputName, Payload, PayloadRef, RequestId, Value


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputChunk:
    """An increment of one output.

    Attributes:
        output: Which output of the pipeline.
        seq: Counts the output's data chunks from 0.
        values: Named values; arrays are read-only `memoryview`s that stay valid. Empty on a bare end.
        offset: Where it begins, in the stage's units.
        length: How many units it adds.
        kind: `data` or `preview`.
        media_s: Playback duration in seconds.
        final: The output ends with this chunk.
        timings: With an output's first chunk: where the time went until then.
    """

    output: OutputName
    seq: int
    values: Mapping[str, Value]
    offset: int = 0
    length: int = 0
    kind: Literal["data", "preview"] = "data"
    media_s: float = 0.0
    final: bool = False
    timings: Timings | None = None


class Window(NamedTuple):
    """How many chunks and bytes of an output may be on the way, untaken."""

    chunks: int
    bytes: int


class Upstream(Protocol):
    """What an inbox needs of its channel."""

    def grant(self, number: int, output: OutputName, up_to: int) -> None:
        """Return credit: the output's chunks below `up_to` were taken."""
        ...

    def append(self, number: int, name: InputName, values: Payload) -> None:
        """Send more of an open input."""
        ...

    def close_input(self, number: int, name: InputName) -> None:
        """End an open input."""
        ...

    def abandon(self, number: int) -> None:
        """Abort the request; nothing more of it is wanted."""
        ...

    async def pulled(self, payload: PayloadRef) -> bytes | memoryview:
        """Return the bytes of a payload that is on another host.

        Raises:
            PayloadLost: They can't be had in time.
        """
        ...

    def values(self, payload: PayloadRef, inline: bytes | memoryview | None) -> dict[str, Value]:
        """Return a payload's values and give it up.

        Raises:
            PayloadLost: Its bytes can't be read.
        """
        ...

    def discard(self, payload: PayloadRef) -> None:
        """Give a payload up unread."""
        ...


class Inbox:
    """What has arrived for one request and was not read yet.

    Attributes:
        number: The request's number on its channel.
        timings: Where the request's time went; set by a good end.
    """

    __slots__ = (
        "_credit",
        "_end",
        "_is_pulling",
        "_items",
        "_open_inputs",
        "_upstream",
        "_waiter",
        "_window",
        "number",
        "timings",
    )

    def __init__(
        self,
        number: int,
        upstream: Upstream,
        window: Window,
        open_inputs: Iterable[InputName] = (),
    ) -> None:
        self.number = number
        self._open_inputs = set(open_inputs)
        self.timings: Timings | None = None
        self._upstream = upstream
        self._window = window
        self._items: deque[tuple[Output, bytes | None]] = deque()
        self._credit: dict[OutputName, _Credit] = {}
        self._end: _End | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._is_pulling = False

    @property
    def is_over(self) -> bool:
        """Whether the end has come and everything before it was read."""
        return self._end is not None and not self._items

    # ---- the channel's side

    def put(self, message: Output, inline: bytes | None) -> None:
        """Add an output message. A preview replaces an unread one of its output."""
        if message.kind == "preview" and self._items:
            last, _ = self._items[-1]
            if last.kind == "preview" and last.output == message.output:
                self._discard(self._items.pop()[0])
        self._items.append((message, inline))
        self._wake()

    def end(self, error: StrettoError | None, timings: Timings | None = None) -> None:
        """Note the end: read after all that was put before. Only the first one counts."""
        if self._end is None:
            self._end = _End(error)
            self.timings = timings
            self._wake()

    # ---- the reader's side

    async def take(self) -> OutputChunk | None:
        """Return the next chunk, or `None` at a good end.

        Raises:
            StrettoError: The request has ended badly, or its payload can't be read.
        """
        if self._waiter is not None or self._is_pulling:
            raise InvalidRequest(
                "This stream is being read by another task; read it in one place.",
                code="concurrent_read",
            )
        while True:
            while not self._items:
                if self._end is not None:
                    if self._end.error is not None:
                        raise self._end.error
                    return None
                self._grant_all()
                self._waiter = asyncio.get_running_loop().create_future()
                try:
                    await self._waiter
                finally:
                    self._waiter = None
            message, inline = self._items[0]
            data = inline
            if message.payload is not None and is_far(message.payload.place):
                data = await self._pulled(message.payload)
            if self._items and self._items[0][0] is message:  # it was not given up meanwhile
                self._items.popleft()
                return self._opened(message, data)

    def append(self, name: InputName, values: Payload) -> None:
        """Send more of an open input.

        Raises:
            StrettoError: The request has ended badly.
            InvalidRequest: The input is not open, or a value can't be sent.
        """
        self._check_open(name)
        self._upstream.append(self.number, name, values)

    def close_input(self, name: InputName) -> None:
        """End an open input; one that has ended, or whose request has, is left alone."""
        if name in self._open_inputs:
            self._open_inputs.discard(name)
            if self._end is None:
                self._upstream.close_input(self.number, name)

    def close(self, reason: StrettoError) -> None:
        """Give up: drop what is unread, abort what still runs; reads raise `reason` from now on.

        Nothing happens if everything was read.
        """
        if not self.is_over:
            self._give_up(reason)

    # ---- inside

    async def _pulled(self, payload: PayloadRef) -> bytes | memoryview | None:
        """Return the bytes of a payload of another host; `None` if it was given up meanwhile.

        The message stays in the inbox until they are here, so a read that is cancelled loses nothing.
        """
        self._is_pulling = True
        try:
            return await self._upstream.pulled(payload)
        except StrettoError as error:
            if self._items:
                self._give_up(error)
                raise
            return None
        finally:
            self._is_pulling = False

    def _check_open(self, name: InputName) -> None:
        if self._end is not None and self._end.error is not None:
            raise self._end.error
        if name not in self._open_inputs or self._end is not None:
            known = ", ".join(sorted(self._open_inputs)) or "none"
            raise InvalidRequest(
                f"Input {name!r} is not open; open are: {known}.",
                param=name,
                code="input_closed",
            )

    def _give_up(self, reason: StrettoError) -> None:
        while self._items:
            self._discard(self._items.popleft()[0])
        if self._end is None:
            self._upstream.abandon(self.number)
        self._end = _End(reason)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _opened(self, message: Output, inline: bytes | memoryview | None) -> OutputChunk:
        values: dict[str, Value] = {}
        if message.payload is not None:
            try:
                values = self._upstream.values(message.payload, inline)
            except StrettoError as error:
                self._give_up(error)
                raise
            if message.kind == "data":
                self._count(message.output, message.seq, message.payload.size_bytes)
        return OutputChunk(
            output=message.output,
            seq=message.seq,
            values=values,
            offset=message.offset,
            length=message.length,
            kind=message.kind,
            media_s=message.media_s,
            final=message.final,
            timings=message.timings,
        )

    def _count(self, output: OutputName, seq: int, size_bytes: int) -> None:
        credit = self._credit.setdefault(output, _Credit())
        credit.taken = seq + 1
        credit.bytes += size_bytes
        chunks = credit.taken - credit.granted
        if chunks * 2 >= self._window.chunks or credit.bytes * 2 >= self._window.bytes:
            self._grant(output, credit)

    def _grant_all(self) -> None:
        for output, credit in self._credit.items():
            if credit.taken > credit.granted:
                self._grant(output, credit)

    def _grant(self, output: OutputName, credit: _Credit) -> None:
        credit.granted = credit.taken
        credit.bytes = 0
        if self._end is None:
            self._upstream.grant(self.number, output, credit.granted)

    def _discard(self, message: Output) -> None:
        if message.payload is not None:
            self._upstream.discard(message.payload)


class Stream:
    """A request's chunks, in order, as they are made: an async iterator with one reader.

    It ends when the request has finished, and raises the request's error otherwise, again at each
    further read. Leaving it early, by `aclose`, by `async with`, or by letting go of it, aborts the request.

    Attributes:
        request: The engine's name of the request; `Engine.abort` takes it.
    """

    def __init__(self, request: RequestId, inbox: Inbox, loop: asyncio.AbstractEventLoop) -> None:
        self.request = request
        self._inbox = inbox
        self._loop = loop

    @property
    def number(self) -> int:
        """The request's number on its channel."""
        return self._inbox.number

    @property
    def timings(self) -> Timings | None:
        """Where the request's time went; `None` until it has finished well."""
        return self._inbox.timings

    def __aiter__(self) -> Self:
        """Return itself: chunks are delivered once."""
        return self

    async def __anext__(self) -> OutputChunk:
        """Return the next chunk.

        Raises:
            StrettoError: What ended the request; `EngineDead` if the engine is gone.
            InvalidRequest: The stream is read elsewhere at the same time, or on another event loop.
        """
        self._check_loop("read it")
        chunk = await self._inbox.take()
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    def append(self, **inputs: Value | Payload) -> None:
        """Send more of inputs that were left open at the start (`open_inputs`); never blocks.

        Pieces reach the stages in this order, and each may have values of its own. What was sent and not
        used yet counts against the request's `retention_bytes`.

        Raises:
            StrettoError: What ended the request.
            InvalidRequest: An input is not open, a value can't be sent, or this is another event loop.
        """
        self._check_loop("append to it")
        for name, value in inputs.items():
            self._inbox.append(InputName(name), input_values(name, value))

    def close_input(self, *names: str) -> None:
        """End open inputs: the request goes on to its end. May be called twice.

        Raises:
            InvalidRequest: This is another event loop.
        """
        self._check_loop("close its inputs")
        for name in names:
            self._inbox.close_input(InputName(name))

    def abort(self, reason: StrettoError | None = None) -> None:
        """Stop the request now and drop what is unread; a parked read raises `reason`, or `Cancelled`.

        A stream that was read to its end is left alone.
        """
        self._inbox.close(reason or Cancelled(f"Request {self.request} was aborted by its reader."))

    async def aclose(self) -> None:
        """Abort what still runs. May be called twice."""
        self.abort()

    async def __aenter__(self) -> Self:
        """Return the stream itself."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Abort what still runs."""
        await self.aclose()

    def _check_loop(self, what: str) -> None:
        if asyncio.get_running_loop() is not self._loop:
            raise InvalidRequest(
                f"This stream belongs to another event loop; {what} where it was made.",
                code="wrong_event_loop",
            )

    def __del__(self) -> None:
        """Abort what nobody can read any more; this may run in any thread, or after the loop has closed."""
        if not self._inbox.is_over:
            reason = Cancelled(f"Request {self.request} was let go of.")
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._inbox.close, reason)


class _Credit:
    """Credit of one output: chunks taken, chunks granted, and the bytes taken since."""

    __slots__ = ("bytes", "granted", "taken")

    def __init__(self) -> None:
        self.taken = 0
        self.granted = 0
        self.bytes = 0


class _End(NamedTuple):
    """How a request has ended: well, or with an error."""

    error: StrettoError | None
