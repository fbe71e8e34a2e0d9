"""The serial dispatcher: many inboxes, one router, one callback.

Whoever has an event posts it to its own inbox. One callback per turn of the loop takes up to 64 events
from each inbox, round robin, so a flood on one link starves no other; what is left waits for the next
turn. Event n is handled and its commands are executed before event n + 1 starts. Events that arise
while commands run are appended, never handled inside.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Protocol

from stretto.core.events import AnyEvent, DeadlinePassed, RequestBroken, payloads_of, request_of
from stretto.errors import InvalidTransition

if TYPE_CHECKING:
    from collections.abc import Callable

    from stretto.core.commands import AnyCommand
    from stretto.core.router import Router
    from stretto.types import Clock

EVENTS_PER_TURN = 64
"""How many events one inbox may have handled per turn."""

INBOX_HIGH = 1024
INBOX_LOW = 256
"""Reading from a source pauses above the high mark and resumes below the low one."""


class Observer(Protocol):
    """Sees each event with the router's answer."""

    def observe(
        self, event: AnyEvent, commands: tuple[AnyCommand, ...], error: str | None = None
    ) -> None:
        """Take note; must not block and must not raise."""
        ...

    def flush(self) -> None:
        """The turn is over."""
        ...


class Inbox:
    """Events of one source, in order. Above the high mark the source is told to pause."""

    __slots__ = ("events", "is_paused", "pause", "resume")

    def __init__(self, pause: Callable[[], None] | None, resume: Callable[[], None] | None) -> None:
        self.events: deque[AnyEvent] = deque()
        self.pause = pause
        self.resume = resume
        self.is_paused = False


class Dispatcher:
    """Owns the router, its timer and the order of events.

    Args:
        router: The pure core.
        execute: Executes one command; synchronous and total.
        end_turn: Called after the last command of a turn, to write what was queued.
        on_crash: Called once with what the router or the executor raised; then nothing more is handled.
        clock: Monotonic seconds.
        observers: See `(event, commands)` pairs.
    """

    def __init__(
        self,
        router: Router,
        execute: Callable[[AnyCommand], None],
        end_turn: Callable[[], None],
        on_crash: Callable[[BaseException], None],
        clock: Clock,
        observers: tuple[Observer, ...] = (),
    ) -> None:
        self.router = router
        self._execute = execute
        self._end_turn = end_turn
        self._on_crash = on_crash
        self._clock = clock
        self._observers = observers
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Inbox] = deque()
        self._is_armed = False
        self._is_stopped = False
        self._own = self.inbox()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at: float | None = None

    def inbox(
        self, pause: Callable[[], None] | None = None, resume: Callable[[], None] | None = None
    ) -> Inbox:
        """Return a new inbox; `pause` and `resume` control its source."""
        return Inbox(pause, resume)

    def add_observer(self, observer: Observer) -> None:
        """Show each event and its commands to one more observer from now on."""
        self._observers = (*self._observers, observer)

    def post(self, event: AnyEvent, inbox: Inbox | None = None) -> None:
        """Queue an event; without an inbox it is the shell's own."""
        if self._is_stopped:
            return
        box = self._own if inbox is None else inbox
        if not box.events:
            self._waiting.append(box)
        box.events.append(event)
        if len(box.events) > INBOX_HIGH and not box.is_paused and box.pause is not None:
            box.is_paused = True
            box.pause()
        if not self._is_armed:
            self._is_armed = True
            self._loop.call_soon(self._turn)

    def stop(self) -> None:
        """Handle nothing more."""
        self._is_stopped = True
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _turn(self) -> None:
        self._is_armed = False
        try:
            self._handle_waiting()
            self._end_turn()
            for observer in self._observers:
                observer.flush()
            self._set_timer()
        except BaseException as error:  # noqa: BLE001 - the state is unknown now: the engine ends
            self.stop()
            self._on_crash(error)

    def _handle_waiting(self) -> None:
        for _ in range(len(self._waiting)):
            if self._is_stopped:
                return
            box = self._waiting.popleft()
            events = box.events
            for _ in range(min(EVENTS_PER_TURN, len(events))):
                self._handle(events.popleft())
            if events:
                self._waiting.append(box)
            if box.is_paused and len(events) < INBOX_LOW and box.resume is not None:
                box.is_paused = False
                box.resume()
        if self._waiting and not self._is_armed and not self._is_stopped:
            self._is_armed = True
            self._loop.call_soon(self._turn)

    def _handle(self, event: AnyEvent) -> None:
        try:
            commands = self.router.handle(event)
        except InvalidTransition as error:
            self._refused(event, error)
            return
        for observer in self._observers:
            observer.observe(event, commands)
        for command in commands:
            self._execute(command)

    def _refused(self, event: AnyEvent, error: InvalidTransition) -> None:
        """The router changed nothing: only the request that the event names is broken."""
        for observer in self._observers:
            observer.observe(event, (), error.detail)
        request = request_of(event)
        if request is None:
            raise error
        self.post(
            RequestBroken(
                now=event.now,
                request=request,
                failure=error.failure(),
                payloads=payloads_of(event),
            )
        )

    def _set_timer(self) -> None:
        """Keep one timer at the router's next deadline; none if nothing waits."""
        when = self.router.next_deadline()
        if when == self._timer_at or self._is_stopped:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = when
        self._timer = None
        if when is not None:
            # A millisecond more than needed: the loop's timers may fire that much early.
            self._timer = self._loop.call_later(max(when - self._clock(), 0.0) + 0.001, self._ring)

    def _ring(self) -> None:
        self._timer = None
        self._timer_at = None
        self.post(DeadlinePassed(now=self._clock()))
