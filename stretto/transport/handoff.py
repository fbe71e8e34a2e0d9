"""The hand-off: messages from any thread to one waiting side, without a poll, a lock or a task each.

Rules

* The pushing side never waits and needs no loop: `put_nowait` works from any thread, also before
  anybody reads. It returns; it does not raise because the other side is gone.
* The waiting side awaits its own loop (`get`, `listen`), or blocks its own thread (`get_blocking`).
* Closing is graceful: what was put before stays readable; "closed" comes after the last message, as one
  error at every read. It wakes everybody: readers on both faces, blocked producers, joiners.
* What is put after the end is swallowed and counted.

Theory of operation

  Messages lie in a `deque`, whose `append` and `popleft` are atomic. Beside it is an eventfd, which an
  event loop and a blocked thread can both wait for. `_is_signalled` says that a wake-up is on its
  way or not taken yet: only the put that finds it unset writes to the eventfd, so a burst costs one
  wake-up. The reader takes the wake-up first, unsets the flag next and looks for messages last; a put
  that saw the flag set was therefore made before that look.

  The lock guards what happens rarely: the end, the life of the descriptor (a put that races with
  the end must not write to a closed one), and those who wait for room or for the queue to be empty.

Source: chosen by measurement; `python -m scripts.measure.handoff` compares it with other ways.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

from stretto.errors import DeadlineExceeded, EngineDead, InvalidRequest, Overloaded
from stretto.transport.parking import Parking

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

T = TypeVar("T")

ITEMS_PER_TURN = 256
"""How many messages one turn of the reading loop takes at most; other callbacks run in between."""


class HandOff(Generic[T]):
    """A queue between threads; see the module.

    Args:
        max_items: How many messages may lie here. A full one refuses `put_nowait` and blocks `put`;
            without a bound whoever pushes has another one, such as credits. The last messages, given
            to `close`, always fit.
    """

    def __init__(self, *, max_items: int | None = None) -> None:
        self._items: deque[T] = deque()
        self._max_items = max_items
        self._is_signalled = False
        self._death: EngineDead | None = None
        self._is_finished = False  # a reader has seen the end
        self._late = 0
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._blocked = 0  # producers that wait for room
        self._parked = 0  # threads that wait for a message
        self._is_read_by_threads = False
        self._joiners: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiters: deque[Parking] = deque()
        self._turn = 0  # messages that reads have taken without a pause
        self._is_paused = False
        self._on_items: Callable[[list[T]], None] | None = None
        self._on_closed: Callable[[], None] | None = None
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def __del__(self) -> None:
        """Close the descriptor of a hand-off that nobody has read to its end."""
        if getattr(self, "_fd", -1) >= 0:
            os.close(self._fd)

    @property
    def is_closed(self) -> bool:
        """Whether nothing more can be put."""
        return self._death is not None

    @property
    def late_total(self) -> int:
        """How many messages came after the end."""
        return self._late

    # ---- the pushing side: any thread

    def put_nowait(self, item: T) -> bool:
        """Add a message and wake the reader; return whether it was taken.

        One that comes after the end is counted and dropped.

        Raises:
            Overloaded: A bounded hand-off is full.
        """
        if self._death is not None:
            self._count_late(1)
            return False
        if self._max_items is not None and len(self._items) >= self._max_items:
            raise Overloaded(f"The queue is full: {self._max_items} messages.", code="queue_full")
        self._items.append(item)
        if not self._is_signalled:
            self._wake_reader()
        if self._is_finished:
            self._sweep()
        return True

    def put(self, item: T, timeout_s: float | None = None) -> None:
        """Add a message; block this thread while a bounded hand-off is full.

        Raises:
            EngineDead: The hand-off is closed, or was while this call waited.
            DeadlineExceeded: There was no room within `timeout_s` seconds.
        """
        limit = self._max_items
        with self._room:
            self._blocked += 1  # before the look: a reader that takes one after it sees us
            try:
                has_room = self._room.wait_for(
                    lambda: self._death is not None or limit is None or len(self._items) < limit,
                    timeout_s,
                )
            finally:
                self._blocked -= 1
            if self._death is not None:
                raise self._closed()
            if not has_room:
                raise DeadlineExceeded(f"The queue was full for {timeout_s:g} s.")
            self._items.append(item)
        self._wake_reader()
        if self._is_finished:
            self._sweep()

    def close(self, death: EngineDead | None = None, last: Iterable[T] = ()) -> None:
        """Let nothing more in and wake everybody. Only the first call counts.

        Args:
            death: What reads raise after the last message.
            last: Messages to add first; no bound applies to them.
        """
        with self._lock:
            if self._death is not None:
                return
            self._items.extend(last)
            self._death = death or EngineDead("The hand-off was closed.", code="engine_closed")
            self._room.notify_all()
            joiners, self._joiners = self._joiners, []
            if self._loop is None and not self._parked:
                self._close_descriptor()
            elif self._fd >= 0:
                os.eventfd_write(self._fd, 1)
        for loop, joiner in joiners:
            _call(loop, _fail, joiner, self._closed())

    def abandon(self) -> None:
        """Close, and forget what is unread: the reader's loop has ended, so nobody will look again."""
        self.close()
        self._is_finished = True
        with self._lock:
            self._close_descriptor()
        self._sweep()

    async def wait_taken(self) -> None:
        """Sleep until no message waits, on whatever loop this is called.

        Raises:
            EngineDead: The hand-off is closed, or was while this call waited.
        """
        with self._lock:
            if not self._items:
                return
            if self._death is not None:
                raise self._closed()
            loop = asyncio.get_running_loop()
            joiner = loop.create_future()
            self._joiners.append((loop, joiner))
        if not self._items:  # the last one was taken before its reader could see us
            self._tell_joiners()
        await joiner

    # ---- the waiting side: one loop

    async def get(self) -> T:
        """Return the next message; wait until there is one.

        A read that is cancelled loses nothing. The first call binds the hand-off to its loop.

        Raises:
            EngineDead: Everything was read and nothing more comes.
            InvalidRequest: This is another loop than the first one.
        """
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._bind(loop, self._wake_waiters)
        if self._turn >= ITEMS_PER_TURN:
            await self._end_turn(loop)
        items = self._items
        while not items:
            if self._death is not None:
                if items:  # put between the two looks, and before the end
                    break
                raise self._finish()
            self._turn = 0
            waiter = Parking(loop)
            self._waiters.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                self._stop_waiting(loop, waiter)
                raise
        self._turn += 1
        item = items.popleft()
        if self._joiners or self._blocked:
            self._taken()
        return item

    def listen(self, on_items: Callable[[list[T]], None], on_closed: Callable[[], None]) -> None:
        """Have messages delivered on the running loop, all that are there at once, instead of `get`.

        Args:
            on_items: Gets at most `ITEMS_PER_TURN` messages per turn of the loop.
            on_closed: Called once, after the last message.

        Raises:
            InvalidRequest: The hand-off is read on another loop.
        """
        self._bind(asyncio.get_running_loop(), self._deliver)
        self._on_items, self._on_closed = on_items, on_closed
        if self._death is not None:  # there is no descriptor to wait for any more
            asyncio.get_running_loop().call_soon(self._deliver)

    def pause(self) -> None:
        """Stop delivering to what listens; messages, and the end, wait. May be called twice."""
        self._is_paused = True
        if self._loop is not None and self._fd >= 0:
            self._loop.remove_reader(self._fd)

    def resume(self) -> None:
        """Deliver again. May be called twice."""
        if self._is_paused and self._loop is not None:
            self._is_paused = False
            if self._fd >= 0:
                self._loop.add_reader(self._fd, self._deliver)
            self._loop.call_soon(self._deliver)

    # ---- the waiting side: a thread

    def get_blocking(self, timeout_s: float | None = None) -> T:
        """Return the next message; block this thread until there is one.

        Several threads may read, but none beside a loop.

        Raises:
            EngineDead: Everything was read and nothing more comes.
            DeadlineExceeded: There was none within `timeout_s` seconds.
            InvalidRequest: An event loop reads it.
        """
        self._bind(None)
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            try:
                item = self._items.popleft()
            except IndexError:
                if self._death is None:
                    self._park(until)
                elif not self._items:  # else: put between the two looks, and before the end
                    raise self._finish() from None
            else:
                if self._items:  # the wake-up that brought us may have been for several threads
                    self._wake_reader()
                if self._joiners or self._blocked:
                    self._taken()
                return item

    # ---- inside: the pushing side

    def _wake_reader(self) -> None:
        self._is_signalled = True
        with self._lock:
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)

    def _count_late(self, number: int) -> None:
        with self._lock:
            self._late += number

    def _sweep(self) -> None:
        """Count what was put while the last reader left: nobody will see it."""
        number = 0
        with contextlib.suppress(IndexError):
            while True:
                self._items.popleft()
                number += 1
        self._count_late(number)

    # ---- inside: the waiting side

    def _bind(
        self, loop: asyncio.AbstractEventLoop | None, on_readable: Callable[[], None] | None = None
    ) -> None:
        """Let the first reader choose the face: an event loop, or threads (`None`)."""
        with self._lock:
            if self._loop is None and not self._is_read_by_threads:
                self._loop, self._is_read_by_threads = loop, loop is None
                if loop is not None and on_readable is not None and self._fd >= 0:
                    loop.add_reader(self._fd, on_readable)
            elif self._loop is not loop:
                raise InvalidRequest(
                    "This hand-off is read elsewhere; read it where it was first read: on one event loop, "
                    "or in threads.",
                    code="wrong_event_loop",
                )

    def _take_signal(self) -> None:
        try:  # noqa: SIM105 - on the way of every message, and `suppress` costs more than the read
            os.eventfd_read(self._fd)
        except BlockingIOError:
            pass
        self._is_signalled = False

    def _wake_waiters(self) -> None:
        """Let reads go on while there are messages, or all of them at the end: each takes its own here."""
        if self._death is None:
            self._take_signal()
        else:
            self._leave()
        waiters, items = self._waiters, self._items
        while waiters and (items or self._death is not None):
            waiters.popleft().release()

    def _stop_waiting(self, loop: asyncio.AbstractEventLoop, waiter: Parking) -> None:
        with contextlib.suppress(ValueError):  # it was told to look, at the same moment
            self._waiters.remove(waiter)
        if self._items:
            loop.call_soon(self._wake_waiters)  # somebody else shall look

    async def _end_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let the loop turn once: a producer that keeps up must not stop everything else."""
        self._turn = 0
        turn = loop.create_future()
        loop.call_soon(_succeed, turn)
        await turn

    def _deliver(self) -> None:
        if self._is_paused or self._is_finished or self._on_items is None:
            return
        is_closed = self._death is not None  # asked first: what was put before it is seen below
        if not is_closed:
            self._take_signal()
        number = min(len(self._items), ITEMS_PER_TURN)
        items = [self._items.popleft() for _ in range(number)]
        if self._items and not is_closed:
            self._wake_reader()
        if self._joiners or self._blocked:
            self._taken(number)
        if items:
            self._on_items(items)
        if is_closed and not self._is_finished and not self._is_paused:
            self._deliver_end()

    def _deliver_end(self) -> None:
        assert self._loop is not None
        self._leave()
        if self._items:
            self._loop.call_soon(self._deliver)
            return
        self._finish()
        if self._on_closed is not None:
            self._on_closed()

    def _leave(self) -> None:
        """The end has come: nobody waits for the descriptor any more."""
        if self._fd >= 0 and self._loop is not None:
            self._loop.remove_reader(self._fd)
            with self._lock:
                if not self._parked:
                    self._close_descriptor()

    def _park(self, until: float | None) -> None:
        with self._lock:
            if self._fd < 0:
                return
            self._parked += 1
        try:
            left_ms = None if until is None else max(until - time.monotonic(), 0.0) * 1000
            poll = select.poll()
            poll.register(self._fd, select.POLLIN)
            if not poll.poll(left_ms):
                raise DeadlineExceeded("No message came in time.")
            if self._death is None:
                self._take_signal()
        finally:
            with self._lock:
                self._parked -= 1
                if self._death is not None and self._loop is None and not self._parked:
                    self._close_descriptor()

    def _taken(self, number: int = 1) -> None:
        """Messages were taken: tell those who wait for room, and for the last one."""
        if self._blocked:
            with self._room:
                self._room.notify(number)
        if not self._items:
            self._tell_joiners()

    def _tell_joiners(self) -> None:
        with self._lock:
            joiners, self._joiners = self._joiners, []
        for loop, joiner in joiners:
            _call(loop, _succeed, joiner)

    def _finish(self) -> EngineDead:
        self._is_finished = True
        if self._items:  # put by somebody who did not see the end yet
            self._sweep()
        return self._closed()

    def _closed(self) -> EngineDead:
        assert self._death is not None
        return EngineDead(self._death.detail, code=self._death.code)

    def _close_descriptor(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _call(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *arguments: object) -> None:
    with contextlib.suppress(RuntimeError):  # that loop is closed, and its waiter gone with it
        loop.call_soon_threadsafe(call, *arguments)


def _succeed(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _fail(future: asyncio.Future[None], error: EngineDead) -> None:
    if not future.done():
        future.set_exception(error)
