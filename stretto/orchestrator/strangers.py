"""Connections that have not said hello yet: each has a deadline, and is let in or refused."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stretto.transport.connection import Connection

log = logging.getLogger("stretto.orchestrator")

HELLO_TIMEOUT_S = 10.0
"""How long an accepted connection may stay silent."""


class Strangers:
    """The connections of one listening socket between their arrival and their hello.

    Args:
        socket: What they have connected to, for log texts.
    """

    def __init__(self, socket: str) -> None:
        self._socket = socket
        self._timers: dict[Connection[Any], asyncio.TimerHandle] = {}

    def arrived(self, connection: Connection[Any]) -> None:
        """Wait for its hello."""
        self._timers[connection] = asyncio.get_running_loop().call_later(
            HELLO_TIMEOUT_S, self.refuse, connection, "it did not say hello"
        )

    def left(self, connection: Connection[Any]) -> None:
        """It is no stranger any more, or gone; one that was none is ignored."""
        timer = self._timers.pop(connection, None)
        if timer is not None:
            timer.cancel()

    def refuse(self, connection: Connection[Any], why: str) -> None:
        """Hang up on it."""
        self.left(connection)
        log.warning("a connection to the %s socket was refused: %s", self._socket, why)
        connection.abort()

    def close(self) -> None:
        """Hang up on all of them."""
        for connection in list(self._timers):
            self.refuse(connection, "the orchestrator ends")
