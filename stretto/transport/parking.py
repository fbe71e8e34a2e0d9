"""Where one task waits on its loop until a callback of the same loop lets it go on, at once.

A future that is set schedules its task for the next turn of the loop: one more system call between a
message and its reader. Whoever is already a callback of the loop, outside any task, can as well run the
task's next step itself. `Parking` is the least that a task accepts to wait for.

Source: the awaiting protocol of `asyncio.Future` (`_asyncio_future_blocking`, "Future-like objects");
`python -m scripts.measure.handoff` measures what it saves.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from contextvars import Context


class Parking:
    """A place for one task; `await` it once. See the module."""

    __slots__ = (
        "_asyncio_future_blocking",
        "_context",
        "_is_cancelled",
        "_is_left",
        "_loop",
        "_step",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._asyncio_future_blocking = False
        self._loop = loop
        self._step: Callable[[Any], object] | None = None
        self._context: Context | None = None
        self._is_left = False
        self._is_cancelled = False

    def release(self) -> None:
        """Let the task run until it waits again. Only from a callback of its loop, never from a task.

        One whose task was cancelled, or is not there, is left alone.
        """
        if self._is_left or self._step is None:
            return
        self._is_left = True
        assert self._context is not None
        self._context.run(self._step, self)

    def __await__(self) -> Generator[Any, None, None]:
        """Hand this to the task, which calls `add_done_callback`."""
        self._asyncio_future_blocking = True
        yield self
        self.result()

    # ---- what a task asks of what it waits for

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """Return the loop of the task."""
        return self._loop

    def add_done_callback(self, step: Callable[[Any], object], /, *, context: Context) -> None:
        """Remember how the task goes on."""
        self._step, self._context = step, context

    def done(self) -> bool:
        """Return whether the task was let go, or cancelled."""
        return self._is_left

    def result(self) -> None:
        """Return nothing.

        Raises:
            asyncio.CancelledError: The task was cancelled here.
        """
        if self._is_cancelled:
            raise asyncio.CancelledError

    def cancel(self, msg: object = None) -> bool:  # noqa: ARG002 - the shape that a task calls
        """Let the task go on with a cancellation, on the next turn; return whether it waited here."""
        if self._is_left or self._step is None:
            return False
        self._is_left = self._is_cancelled = True
        self._loop.call_soon(self._step, self, context=self._context)
        return True
