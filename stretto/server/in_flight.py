"""Requests that run, so that a shutdown can wait for them and end those that take too long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager

from stretto.errors import Overloaded, StrettoError

Abort = Callable[[StrettoError], None]


class InFlight:
    """Counts running requests. Once `is_draining`, no new one may begin."""

    def __init__(self) -> None:
        self.is_draining = False
        self._aborts: dict[int, Abort] = {}
        self._next = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        """Return how many requests run."""
        return len(self._aborts)

    @contextmanager
    def running(self, abort: Abort) -> Generator[None]:
        """Count a request for as long as the block runs; `abort` ends it early.

        Raises:
            Overloaded: The server is shutting down.
        """
        self.check_open()
        key = self._next
        self._next += 1
        self._aborts[key] = abort
        self._idle.clear()
        try:
            yield
        finally:
            del self._aborts[key]
            if not self._aborts:
                self._idle.set()

    def check_open(self) -> None:
        """Raise if no new request may begin.

        Raises:
            Overloaded: The server is shutting down.
        """
        if self.is_draining:
            raise shutting_down()

    async def drain(self, timeout_s: float) -> int:
        """Let nothing new begin and wait for what runs; abort the rest, and return how many that were."""
        self.is_draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            rest = list(self._aborts.values())
            for abort in rest:
                abort(shutting_down())
            return len(rest)
        return 0


def shutting_down() -> Overloaded:
    """Return the error of requests that come, or still run, too late."""
    return Overloaded(
        "The server is shutting down.", code="server_shutting_down", retry_after_s=2.0
    )
