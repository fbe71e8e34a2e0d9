"""Connections within one process: what a channel is made of when the orchestrator is a thread.

A `LocalConnection` offers what a channel needs of `stretto.transport.connection.Connection`, with the same
callbacks and the same promises, over two hand-offs instead of a socket. Nothing is encoded: messages
are immutable and travel as they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

from stretto.errors import EngineDead
from stretto.transport.connection import HIGH_WATER_BYTES
from stretto.transport.frames import MAX_FRAME_BYTES, FrameEncoder
from stretto.transport.handoff import HandOff

if TYPE_CHECKING:
    from collections.abc import Callable

InT = TypeVar("InT")
UpT = TypeVar("UpT")
DownT = TypeVar("DownT")

_GONE = EngineDead("The other end has closed.", code="engine_closed")


class ChannelEnd(Protocol):
    """What a channel needs of its connection, whichever kind it is; see `Connection`."""

    def send(self, message: object, body: bytes | None = None) -> bool:
        """Queue a message for the end of this turn; false if the connection is closing or closed."""
        ...

    def flush(self) -> None:
        """Write what is queued now."""
        ...

    def pause_reading(self) -> None:
        """Receive nothing more until `resume_reading`."""
        ...

    def resume_reading(self) -> None:
        """Receive again."""
        ...

    def close(self) -> None:
        """Write what was sent, then close."""
        ...

    def abort(self) -> None:
        """Close at once; what is not written is lost."""
        ...


class Frame(Generic[InT]):
    """What one side has sent in one turn: messages, and the bytes of their inline payloads in order."""

    __slots__ = ("bodies", "messages", "size_bytes")

    def __init__(self) -> None:
        self.messages: list[InT] = []
        self.bodies: list[bytes] = []
        self.size_bytes = 0


class Lane(Generic[InT]):
    """One direction of a local connection.

    Attributes:
        frames: The hand-off.
        sent_bytes: Inline bytes that were sent; written by the sending side only.
        taken_bytes: Inline bytes that were received; written by the receiving side only.
    """

    __slots__ = ("frames", "sent_bytes", "taken_bytes")

    def __init__(self) -> None:
        self.frames: HandOff[Frame[InT]] = HandOff()
        self.sent_bytes = 0
        self.taken_bytes = 0


class LocalConnection(Generic[InT]):
    """One end of a connection to another thread of this process.

    It belongs to the loop on which it was attached. As with a socket, what was sent before the other
    side's end is delivered before it, `on_closed` is called exactly once, and after `close` or `abort`
    nothing more is delivered.

    Args:
        on_frame: Gets the messages that came together, and a view of their inline bytes.
        on_closed: Gets the reason.
        high_water_bytes: How many inline bytes may lie unread on the other side.
        on_full: Called when more of them do.
        is_checked: Refuse in `send` what a socket could not carry. For messages made of what callers gave:
            behind this connection they must be fit for sockets and files all the same.
    """

    def __init__(
        self,
        on_frame: Callable[[LocalConnection[InT], list[InT], memoryview], None],
        on_closed: Callable[[LocalConnection[InT], str], None],
        *,
        high_water_bytes: int = HIGH_WATER_BYTES,
        on_full: Callable[[LocalConnection[InT]], None] | None = None,
        is_checked: bool = False,
    ) -> None:
        self._on_frame = on_frame
        self._on_closed = on_closed
        self._high_water_bytes = high_water_bytes
        self._on_full = on_full
        self._is_checked = is_checked
        self._loop: asyncio.AbstractEventLoop | None = None
        self._incoming: Lane[InT] | None = None
        self._outgoing: Lane[object] | None = None
        self._unsent: Frame[object] = Frame()
        self._is_flush_due = False
        self._reason: str | None = None

    def attach(self, incoming: Lane[InT], outgoing: Lane[object]) -> None:
        """Begin to receive, on the running loop; what was sent before is handed over now."""
        self._loop = asyncio.get_running_loop()
        self._incoming, self._outgoing = incoming, outgoing
        incoming.frames.listen(self._deliver, self._other_has_closed)
        self.flush()

    # ---- what the owner calls

    @property
    def is_open(self) -> bool:
        """Whether `send` accepts messages."""
        return self._reason is None

    def send(self, message: object, body: bytes | None = None) -> bool:
        """Queue a message, and the bytes of its inline payloads, for the end of this turn.

        Raises:
            FrameError: The message is larger than a frame may be.
            UnicodeEncodeError: It holds text that is none.
            OverflowError: It holds a number that does not fit.
        """
        if self._reason is not None:
            return False
        if self._is_checked:
            FrameEncoder(MAX_FRAME_BYTES).add(message, body)
        self._unsent.messages.append(message)
        if body:
            self._unsent.bodies.append(body)
            self._unsent.size_bytes += len(body)
        if not self._is_flush_due and self._loop is not None:
            self._is_flush_due = True
            self._loop.call_soon(self._end_turn)
        return True

    def flush(self) -> None:
        """Hand over what is queued now instead of at the end of the turn."""
        lane, frame = self._outgoing, self._unsent
        if lane is None or not frame.messages:
            return
        self._unsent = Frame()
        lane.sent_bytes += frame.size_bytes
        lane.frames.put_nowait(frame)
        is_full = lane.sent_bytes - lane.taken_bytes > self._high_water_bytes
        if is_full and self._on_full is not None and self.is_open:
            self._on_full(self)

    def pause_reading(self) -> None:
        """Receive nothing more until `resume_reading`; the other side's end waits too."""
        if self._incoming is not None and self.is_open:
            self._incoming.frames.pause()

    def resume_reading(self) -> None:
        """Receive again."""
        if self._incoming is not None:
            self._incoming.frames.resume()

    def close(self) -> None:
        """Hand over what was sent, then close."""
        if self.is_open:
            self.flush()
        self._end("closed by this side")

    def abort(self) -> None:
        """Close at once; what was not handed over is lost."""
        self._unsent = Frame()
        self._end("aborted by this side")

    # ---- inside

    def _deliver(self, frames: list[Frame[InT]]) -> None:
        assert self._incoming is not None
        for frame in frames:
            self._incoming.taken_bytes += frame.size_bytes
            if self._reason is not None:
                return
            try:
                self._on_frame(self, frame.messages, memoryview(b"".join(frame.bodies)))
            except BaseException:
                self._end("this side failed on a message")
                raise

    def _other_has_closed(self) -> None:
        self._end("end of stream")

    def _end(self, reason: str) -> None:
        if self._reason is not None:
            return
        self._reason = reason
        if self._outgoing is not None:
            self._outgoing.frames.close(_GONE)
        if self._incoming is not None:
            self._incoming.frames.close(_GONE)
            self._incoming.frames.resume()
        if self._loop is not None:
            self._loop.call_soon(self._on_closed, self, reason)

    def _end_turn(self) -> None:
        self._is_flush_due = False
        if self.is_open:
            self.flush()


class _Ends(NamedTuple, Generic[UpT, DownT]):
    """Both directions of a connection, named as the connecting side sees them."""

    up: Lane[UpT]
    down: Lane[DownT]

    def cut(self) -> None:
        """End both directions, as the kernel does with a dead process's sockets."""
        self.up.frames.close(_GONE)
        self.down.frames.close(_GONE)

    @property
    def is_over(self) -> bool:
        """Whether both directions have ended."""
        return self.up.frames.is_closed and self.down.frames.is_closed


class LocalListener(Generic[UpT, DownT]):
    """Where threads of this process connect to whatever serves at the time; usable from any thread.

    Like a listening socket it outlives who serves: connections made meanwhile wait, and the next one
    accepts them. `UpT` travels to the server, `DownT` from it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._life = 0
        self._backlog: deque[_Ends[UpT, DownT]] = deque()
        self._accepted: list[_Ends[UpT, DownT]] = []
        self._server: tuple[asyncio.AbstractEventLoop, Callable[[], LocalConnection[UpT]]] | None
        self._server = None
        self._is_closed = False

    def connect(self, connection: LocalConnection[DownT]) -> None:
        """Attach the connecting end, on the running loop.

        Raises:
            ConnectionRefusedError: The listener is closed.
        """
        ends: _Ends[UpT, DownT] = _Ends(Lane(), Lane())
        with self._lock:
            if self._is_closed:
                raise ConnectionRefusedError("nobody listens any more")
            self._backlog.append(ends)
        connection.attach(ends.down, ends.up)  # pyright: ignore[reportArgumentType] - `send` takes any message
        self._ring()

    def new_life(self) -> int:
        """Return the name of the next one who will serve; those before it may do so no more."""
        with self._lock:
            self._life += 1
            return self._life

    def serve(self, accept: Callable[[], LocalConnection[UpT]], life: int | None = None) -> None:
        """Accept connections on the running loop, until `hang_up`; `accept` makes each end.

        One whose successor was named already is left behind, and accepts nothing.
        """
        with self._lock:
            if life not in (None, self._life):
                return
            self._server = (asyncio.get_running_loop(), accept)
        self._ring()

    def hang_up(self, life: int | None = None) -> None:
        """Whoever serves is gone, and its loop: cut what it had accepted. Another may serve afterwards.

        One whose successor was named already cuts nothing: what is there is not its own.
        """
        with self._lock:
            if life not in (None, self._life):
                return
            self._server = None
            accepted, self._accepted = self._accepted, []
        for ends in accepted:
            ends.cut()
            ends.up.frames.abandon()

    def close(self) -> None:
        """Refuse who waits and who comes; connections that were accepted live on. May be called twice."""
        with self._lock:
            self._is_closed = True
            refused, self._backlog = self._backlog, deque()
        for ends in refused:
            ends.cut()

    def _ring(self) -> None:
        with self._lock:
            server = self._server
        if server is not None:
            with contextlib.suppress(
                RuntimeError
            ):  # that loop has just closed: the next one accepts
                server[0].call_soon_threadsafe(self._accept)

    def _accept(self) -> None:
        while True:
            with self._lock:
                if self._server is None or not self._backlog:
                    return
                if self._server[0] is not asyncio.get_running_loop():
                    return  # one that was left behind was still to look
                ends = self._backlog.popleft()
                self._accepted = [known for known in self._accepted if not known.is_over]
                self._accepted.append(ends)
                _, accept = self._server
            accept().attach(ends.up, ends.down)  # pyright: ignore[reportArgumentType] - as in `connect`
