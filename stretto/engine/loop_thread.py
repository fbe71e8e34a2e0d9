"""A coroutine with a thread and an event loop of its own, whose end is told where it was made."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from typing import TYPE_CHECKING

import uvloop

from stretto.errors import text_of
from stretto.launch.child import CLEAN_EXIT

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

log = logging.getLogger("stretto.engine")


class LoopThread:
    """Runs a coroutine to its end, on uvloop, in a daemon thread that starts at once.

    Made, and used but for `main` and `at_end`, on one loop: its home.

    Args:
        name: Of the thread.
        main: Makes the coroutine; its result is an exit code.
        on_exit: Called once at home with the reason of the end, in the words of a process's end.
        at_end: Called in the thread when its loop has closed.
    """

    def __init__(
        self,
        name: str,
        main: Callable[[], Coroutine[None, None, int]],
        on_exit: Callable[[str], None],
        *,
        at_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._main = main
        self._on_exit = on_exit
        self._at_end = at_end
        self._home = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._has_ended = False
        self._calls: list[Callable[[], object]] = []
        self._task: asyncio.Task[int] | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, call: Callable[[], object]) -> None:
        """Have something called on its loop, once the coroutine has begun; too late is no mistake."""
        with self._lock:
            if self._has_ended:
                return
            if self._loop is None:
                self._calls.append(call)
                return
            with contextlib.suppress(RuntimeError):  # the loop has just closed
                self._loop.call_soon_threadsafe(call)

    def cancel(self) -> None:
        """Cancel the coroutine."""
        self.call(self._cancel)

    def _run(self) -> None:
        reason = CLEAN_EXIT
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                code = runner.run(self._begin())
            if code:
                reason = f"exit code {code}"
        except BaseException as error:  # the top of the thread: its end is told at home
            if not isinstance(error, asyncio.CancelledError):
                log.exception("thread %s has ended", self._thread.name)
            text = text_of(error)
            reason = f"{type(error).__name__}: {text}" if text else type(error).__name__
        finally:
            with self._lock:
                self._loop = None
                self._has_ended = True
                self._calls.clear()
            try:
                self._at_end()
            finally:
                with contextlib.suppress(RuntimeError):  # the program's loop has ended before
                    self._home.call_soon_threadsafe(self._tell, reason)

    async def _begin(self) -> int:
        loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        with self._lock:
            self._loop = loop
            calls, self._calls = self._calls, []
        for call in calls:
            loop.call_soon(call)
        return await self._main()

    def _cancel(self) -> None:
        assert self._task is not None
        self._task.cancel()

    def _tell(self, reason: str) -> None:
        self._thread.join()  # telling us was the last thing that it did
        self._on_exit(reason)
