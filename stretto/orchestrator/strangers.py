"""Connections that have not said hello yet: each has a deadline, and is let in or refused."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Protocol

from stretto.messages import PROTOCOL_VERSION

if TYPE_CHECKING:
    from stretto.transport.local import ChannelEnd
    from stretto.types import RunId

log = logging.getLogger("stretto.orchestrator")

HELLO_TIMEOUT_S = 10.0
"""How long an accepted connection may stay silent."""


class Hello(Protocol):
    """What the hellos of links and channels have in common."""

    @property
    def protocol(self) -> int:
        """Version of the sender's protocol."""
        ...

    @property
    def run(self) -> RunId:
        """The run that the sender belongs to."""
        ...


class Strangers:
    """The connections of one listening socket between their arrival and their hello.

    Args:
        socket: What they have connected to, for log texts.
        run: The run that a hello must name.
        patience_s: How long each may stay silent.
    """

    def __init__(self, socket: str, run: RunId, patience_s: float = HELLO_TIMEOUT_S) -> None:
        self._socket = socket
        self._run = run
        self._patience_s = patience_s
        self._timers: dict[ChannelEnd, asyncio.TimerHandle] = {}

    def arrived(self, connection: ChannelEnd) -> None:
        """Wait for its hello."""
        self._timers[connection] = asyncio.get_running_loop().call_later(
            self._patience_s, self.refuse, connection, "it did not say hello"
        )

    def is_ours(self, connection: ChannelEnd, hello: Hello | None) -> bool:
        """Say whether a first message is a hello for this run; anything else is refused."""
        if hello is None:
            self.refuse(connection, "its first message was no hello")
            return False
        if hello.protocol != PROTOCOL_VERSION or hello.run != self._run:
            self.refuse(connection, f"it speaks protocol {hello.protocol} for run {hello.run}")
            return False
        return True

    def left(self, connection: ChannelEnd) -> None:
        """It is no stranger any more, or gone; one that was none is ignored."""
        timer = self._timers.pop(connection, None)
        if timer is not None:
            timer.cancel()

    def refuse(self, connection: ChannelEnd, why: str) -> None:
        """Hang up on it."""
        self.left(connection)
        log.warning("a connection to the %s socket was refused: %s", self._socket, why)
        connection.abort()

    def close(self) -> None:
        """Hang up on all of them."""
        for connection in list(self._timers):
            self.refuse(connection, "the orchestrator ends")
