"""A stream of typed messages between two processes: links and channels are both made of it.

Both ends of a Unix socket (or, between hosts, a TCP socket) hold one `Connection`. All work happens
in callbacks of the event loop: there is no task and no timer per message. This module must not know
what a message means, nor where it goes next.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar, cast

import msgspec

from stretto.transport.frames import MAX_FRAME_BYTES, FrameEncoder, FrameError, FrameReader
from stretto.transport.listening import BACKLOG, listen_unix

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from typing_extensions import Buffer

HIGH_WATER_BYTES = 1024 * 1024
"""Default number of unsent bytes at which a connection counts as full."""

InT = TypeVar("InT")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionStatistics:
    """Counters of one connection since it was made.

    Attributes:
        frames_in_total: Frames received and delivered.
        frames_out_total: Frames handed to the transport.
        messages_in_total: Messages delivered.
        messages_out_total: Messages accepted by `send`.
        bytes_in_total: Bytes received.
        bytes_out_total: Bytes handed to the transport.
        ignored_sends_total: Messages refused by `send` because the connection was closing or closed.
    """

    frames_in_total: int
    frames_out_total: int
    messages_in_total: int
    messages_out_total: int
    bytes_in_total: int
    bytes_out_total: int
    ignored_sends_total: int


class Connection(asyncio.BufferedProtocol, Generic[InT]):
    """One end of a connection that receives messages of type `InT`.

    * Messages sent in one turn of the loop travel in one frame (up to `frames.COALESCED_BYTES`).
    * Every complete frame that arrived before the peer's end, orderly or not, is delivered.
    * `on_closed` is called exactly once for a connection that was made, after the last frame.
    * After `close` or `abort` nothing more is delivered.

    Callbacks run on the loop and get the connection first:

    * `on_frame(connection, messages, body)`: `body` is a view of the receive buffer that is valid
      until the callback returns; take `bytes(body[a:b])` of each inline payload. An exception
      closes the connection and goes to the loop's exception handler.
    * `on_closed(connection, reason)`: the peer ended, an error, a violation of the frame format, or
      this side's own `close` or `abort`.
    * `on_full(connection)`, `on_drained(connection)`: unsent bytes have passed `high_water_bytes`,
      or have fallen well below it. `on_full` may be called from within `send` or `flush`. Sending goes
      on working meanwhile: whoever sends decides what to hold back.

    `max_received_bytes` bounds what a peer that nobody knows yet may send; it ends with `hand_over`.

    Reading can be paused; what was already received is delivered all the same, at most one
    receive buffer of it. While reading is paused, the peer's end is not noticed.
    """

    def __init__(  # noqa: PLR0913 - callbacks and bounds
        self,
        decoder: msgspec.msgpack.Decoder[list[InT]],
        on_frame: Callable[[Connection[InT], list[InT], memoryview], None],
        on_closed: Callable[[Connection[InT], str], None],
        *,
        max_frame_bytes: int = MAX_FRAME_BYTES,
        max_received_bytes: int | None = None,
        high_water_bytes: int = HIGH_WATER_BYTES,
        on_full: Callable[[Connection[InT]], None] | None = None,
        on_drained: Callable[[Connection[InT]], None] | None = None,
    ) -> None:
        self._decoder = decoder
        self._on_frame = on_frame
        self._on_closed = on_closed
        self._on_full = on_full
        self._on_drained = on_drained
        self._high_water_bytes = high_water_bytes
        self._encoder = FrameEncoder(max_frame_bytes)
        self._reader = FrameReader(max_received_bytes or max_frame_bytes)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._transport: asyncio.Transport | None = None
        # Why it ends; set once, and nothing is delivered after that.
        self._reason: str | None = None
        # The transport has gone; the rest of what it received may still be delivered.
        self._is_lost = False
        self._is_flush_due = False
        self._is_reading_paused = False
        self._max_frame_bytes = max_frame_bytes
        self._frames_in = 0
        self._frames_out = 0
        self._messages_in = 0
        self._messages_out = 0
        self._bytes_in = 0
        self._bytes_out = 0
        self._ignored_sends = 0

    # ---- what the owner calls

    @property
    def is_open(self) -> bool:
        """Whether `send` accepts messages."""
        return self._reason is None and not self._is_lost

    @property
    def hosts(self) -> tuple[str, str]:
        """The addresses of this end and of the peer; empty if it is no TCP connection that is open."""
        if self._transport is None:
            return "", ""
        ends: list[object] = [
            self._transport.get_extra_info(name) for name in ("sockname", "peername")
        ]
        here, there = (
            str(cast("tuple[object, ...]", end)[0]) if isinstance(end, tuple) else ""
            for end in ends
        )
        return here, there

    def send(self, message: object, body: Buffer | None = None) -> bool:
        """Queue a message, and the bytes of its inline payloads, for the end of this turn.

        A body must not change until it is written; pass `bytes`.

        Returns:
            False, with no effect but a count, if the connection is closing or closed.

        Raises:
            FrameError: The message is larger than a frame may be.
            TypeError: msgspec can't encode the message.
        """
        if self._reason is not None or self._is_lost:
            self._ignored_sends += 1
            return False
        full = self._encoder.add(message, body)
        if full is not None:
            self._write(full)
        self._messages_out += 1
        if not self._is_flush_due and self._loop is not None:
            self._is_flush_due = True
            self._loop.call_soon(self._end_turn)
        return True

    def flush(self) -> None:
        """Write what is queued now instead of at the end of the turn."""
        if self._transport is not None and (frame := self._encoder.take()) is not None:
            self._write(frame)

    def hand_over(
        self,
        on_frame: Callable[[Connection[InT], list[InT], memoryview], None],
        on_closed: Callable[[Connection[InT], str], None],
        on_full: Callable[[Connection[InT]], None] | None = None,
    ) -> None:
        """Give the connection to another owner, who trusts the peer: frames may have their full size."""
        self._on_frame, self._on_closed, self._on_full = on_frame, on_closed, on_full
        self._reader.max_bytes = self._max_frame_bytes

    def pause_reading(self) -> None:
        """Receive nothing more until `resume_reading`. May be called twice."""
        self._is_reading_paused = True
        if self.is_open and self._transport is not None:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Receive again. May be called twice."""
        self._is_reading_paused = False
        if self.is_open and self._transport is not None:
            self._transport.resume_reading()

    def close(self) -> None:
        """Write what was sent, then close. Waits for a peer that does not read; `abort` ends that."""
        if self.is_open:
            self.flush()
        if self._end("closed by this side") and self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close at once; what is not written is lost."""
        self._end("aborted by this side")
        if self._transport is not None:
            self._transport.abort()

    def statistics(self) -> ConnectionStatistics:
        """Return the counters as they are now."""
        return ConnectionStatistics(
            frames_in_total=self._frames_in,
            frames_out_total=self._frames_out,
            messages_in_total=self._messages_in,
            messages_out_total=self._messages_out,
            bytes_in_total=self._bytes_in,
            bytes_out_total=self._bytes_out,
            ignored_sends_total=self._ignored_sends,
        )

    # ---- what the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start; what was sent before is written now."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=self._high_water_bytes)
        if self._reason is not None:
            self._transport.abort()
            return
        self._loop = asyncio.get_running_loop()
        if self._is_reading_paused:
            self._transport.pause_reading()
        self.flush()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the free part of the receive buffer; the hint is not needed."""
        del sizehint
        return self._reader.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        """Deliver every frame that is complete now."""
        self._bytes_in += nbytes
        self._reader.buffer_updated(nbytes)
        while self._reason is None:
            try:
                frame = self._reader.next_frame()
                if frame is None:
                    return
                messages = self._decode(frame.header)
            except FrameError as error:
                self._abort_for(f"protocol violation: {error}")
                return
            self._frames_in += 1
            self._messages_in += len(messages)
            self._on_frame(self, messages, frame.body)

    def eof_received(self) -> bool:
        """Take the peer's end for the end of both directions: a peer never half-closes."""
        partial = self._reader.partial_bytes
        self._abort_for(
            f"end of stream {partial} bytes into a frame" if partial else "end of stream"
        )
        return False

    def pause_writing(self) -> None:
        """Report that the unsent bytes have passed the high-water mark."""
        if self._on_full is not None and self.is_open:
            self._on_full(self)

    def resume_writing(self) -> None:
        """Report that the unsent bytes have been written."""
        if self._on_drained is not None and self.is_open:
            self._on_drained(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Deliver what a dying peer managed to send, then report the end."""
        self._is_lost = True
        try:
            if isinstance(exc, OSError) and self._reason is None:
                self._read_rest()
        finally:
            self._end("closed" if exc is None else f"{type(exc).__name__}: {exc}")
            self._transport = None
            self._reader.release()
            self._on_closed(self, cast("str", self._reason))

    # ---- inside

    def _end(self, reason: str) -> bool:
        """Note the reason unless there is one already; return whether it was noted."""
        if self._reason is not None:
            return False
        self._reason = reason
        return True

    def _abort_for(self, reason: str) -> None:
        self._end(reason)
        if self._transport is not None:
            self._transport.abort()

    def _end_turn(self) -> None:
        self._is_flush_due = False
        if self.is_open:
            self.flush()

    def _write(self, frame: list[bytes | memoryview]) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        self._frames_out += 1
        self._bytes_out += sum(map(len, frame))
        self._transport.writelines(frame)

    def _decode(self, header: memoryview) -> list[InT]:
        try:
            return self._decoder.decode(header)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise FrameError(f"undecodable header: {error}") from error

    def _read_rest(self) -> None:
        """Read what the peer sent before it died.

        A write to a dead peer fails at once, and the transport then drops its socket without reading.
        The peer's last messages, which may say why it died, are still in the kernel's buffer.
        """
        sock = None if self._transport is None else self._transport.get_extra_info("socket")
        if sock is None:
            return
        unread = self._max_frame_bytes  # bounds a peer that has only stopped reading
        while self._reason is None and unread > 0:
            try:
                nbytes = os.readv(sock.fileno(), [self._reader.get_buffer()])
            except OSError:
                return
            if nbytes == 0:
                return
            unread -= nbytes
            self.buffer_updated(nbytes)


async def connect_unix(path: str, factory: Callable[[], Connection[InT]]) -> Connection[InT]:
    """Connect to a Unix socket.

    Raises:
        OSError: Nobody listens there (`FileNotFoundError`, `ConnectionRefusedError`).
    """
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_unix_connection(factory, path)
    return connection


async def serve_unix(
    listener: str | socket.socket, factory: Callable[[], Connection[InT]]
) -> asyncio.AbstractServer:
    """Accept connections on a path, or on a socket that already listens; `factory` makes each end.

    Closing the server closes the socket and leaves its connections and its path alone.

    Raises:
        OSError: The path can't be bound.
        ConfigError: The path is too long for a Unix socket.
    """
    sock = listen_unix(listener) if isinstance(listener, str) else listener
    loop = asyncio.get_running_loop()
    return await loop.create_unix_server(factory, sock=sock, backlog=BACKLOG)
