"""The one thread in which a replica computes, so that its event loop never does.

Work is handed over through a queue that blocks, results through the loop's own wake-up: nobody polls.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import traceback
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeVar

from stretto.errors import Failure, InternalError, StrettoError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class ComputeThread:
    """Runs work one by one, in order. Bound to the loop that is running when it is made.

    The thread is a daemon: a computation that hangs must not keep the process alive.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._begun_at: float | None = None
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._work, name="stretto-compute", daemon=True).start()

    def submit(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Run `work` in the thread; the future has its result, or `InternalError` if it raised.

        `work` handles what it expects to go wrong; see `attempt`. Anything else is a bug.
        """
        future: asyncio.Future[T] = self._loop.create_future()

        def run() -> None:
            try:
                result = work()
            except BaseException as error:  # noqa: BLE001 - SystemExit included: the loop must learn of it
                self.report(_set_bug, future, error)
            else:
                self.report(_set_result, future, result)

        self._queue.put(run)
        return future

    @property
    def step_age_s(self) -> float:
        """How long the present work has been running, in seconds; 0 if there is none."""
        begun_at = self._begun_at
        return 0.0 if begun_at is None else time.monotonic() - begun_at

    def report(self, callback: Callable[..., None], *args: object) -> None:
        """Call back on the loop, from within work."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(callback, *args)

    def stop(self) -> None:
        """Let the thread end after the work it already has."""
        self._queue.put(None)

    def _work(self) -> None:
        while (work := self._queue.get()) is not None:
            self._begun_at = time.monotonic()
            work()
            self._begun_at = None
            del work  # it may hold views of payloads, and the next wait is long


def attempt(call: Callable[[], T], where: str) -> T | Failure:
    """Call into a backend or an adapter; an exception becomes a failure, with a traceback on stderr.

    The traceback is not kept, since its frames hold views of payloads.
    """
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - whatever a backend raises fails its task only
        return failure_of(error, where)


def failure_of(error: Exception, where: str) -> Failure:
    """Describe what a backend raised or returned; errors that are not Stretto's show their traceback."""
    if not isinstance(error, StrettoError):
        traceback.print_exception(error)
    return Failure.of(error, where)


def _set_result(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _set_bug(future: asyncio.Future[T], error: BaseException) -> None:
    if not future.done():
        bug = InternalError(f"the compute thread got {type(error).__name__}: {error}")
        bug.__cause__ = error
        future.set_exception(bug)
