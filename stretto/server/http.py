"""Runs the application: uvicorn that sleeps when nothing happens and leaves in order.

Stock uvicorn wakes ten times a second to look at its clock and its flags, and polls while it shuts
down. Here both wait for events.

Shutdown, in order: new work is refused while the socket still listens; running requests end, or are
aborted after the drain time; the socket is closed; connections are flushed and closed, or cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from stretto.server.speech import BREAK_OFF

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Generator

    from starlette.types import ASGIApp

    from stretto.server.in_flight import InFlight

log = logging.getLogger("stretto.server")

KEEP_ALIVE_S = 30
"""How long an idle connection is kept; longer than clients keep theirs, so that they close first."""

FLUSH_S = 0.5
"""How long the end waits for clients to take what was written."""

_SIGNAL_EXIT = 128


class Protocol(HttpToolsProtocol):
    """uvicorn's protocol, able to break off a body, and telling when the last connection has gone."""

    def __init__(
        self,
        *args: Any,  # noqa: ANN401 - uvicorn's
        on_lost: Callable[[], None],
        receive_timeout_s: float,
        **options: Any,  # noqa: ANN401 - uvicorn's
    ) -> None:
        super().__init__(*args, **options)
        self.access_log = False  # uvicorn would turn it on for any handler of the root logger
        self._on_lost = on_lost
        self._receive_timeout_s = receive_timeout_s
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Begin to wait for a request; a client that sends none in time is not waited for."""
        super().connection_made(transport)
        self._head_timer = asyncio.get_running_loop().call_later(
            self._receive_timeout_s, self._give_up
        )

    def on_message_begin(self) -> None:
        """Begin to wait for the rest of a request's head."""
        super().on_message_begin()
        if self._head_timer is None:
            self._head_timer = asyncio.get_running_loop().call_later(
                self._receive_timeout_s, self._give_up
            )

    def on_headers_complete(self) -> None:
        """Begin a request, and tell the application how to break its body off."""
        self._stop_head_timer()
        super().on_headers_complete()
        call = partial(self._break_off, self.cycle)
        cast("dict[str, object]", self.scope)["extensions"] = {BREAK_OFF: {"call": call}}

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_head_timer()
        super().connection_lost(exc)
        self._on_lost()

    def _give_up(self) -> None:
        self._head_timer = None
        self.transport.close()

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _break_off(self, cycle: RequestResponseCycle, at_once: bool) -> None:  # noqa: FBT001 - see speech
        """End the connection so that the client sees an incomplete body: chunks without their end."""
        cycle.disconnected = True  # the application returns early, and uvicorn need not complain
        cycle.message_event.set()
        if at_once:
            self.transport.abort()
        else:
            self.transport.close()


class HttpServer(uvicorn.Server):
    """Serves an application on a listening socket until it is told to stop.

    Args:
        app: The application.
        in_flight: Its running requests.
        drain_timeout_s: How long they may go on after `stop`.
        on_ready: Called when requests are accepted.
        receive_timeout_s: How long a client may take for a request's head.
    """

    def __init__(
        self,
        app: ASGIApp,
        in_flight: InFlight,
        drain_timeout_s: float,
        on_ready: Callable[[], None] | None = None,
        receive_timeout_s: float = 30.0,
    ) -> None:
        self._stop = asyncio.Event()
        self._in_flight = in_flight
        self._drain_timeout_s = drain_timeout_s
        self._on_ready = on_ready
        self._all_lost = asyncio.Event()
        config = uvicorn.Config(
            app,
            http=cast(
                "Any",
                partial(Protocol, on_lost=self._note_lost, receive_timeout_s=receive_timeout_s),
            ),
            ws="none",
            lifespan="off",
            log_config=None,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        super().__init__(config)

    def stop(self) -> None:
        """Begin to drain. Called again, it does nothing."""
        self._stop.set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept requests, and say so."""
        await super().startup(sockets)
        if self._on_ready is not None:
            self._on_ready()

    async def main_loop(self) -> None:
        """Sleep until `stop`, then let running requests end."""
        await self._stop.wait()
        aborted = await self._in_flight.drain(self._drain_timeout_s)
        if aborted:
            log.warning("aborted %d requests that ran longer than the drain time", aborted)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the socket and the connections; those that take nothing are cut after `FLUSH_S`."""
        for server in self.servers:
            server.close()
        for listener in sockets or []:
            listener.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        try:
            async with asyncio.timeout(FLUSH_S):
                await self._wait_lost()
        except TimeoutError:
            for connection in list(self.server_state.connections):
                cast("Protocol", connection).transport.abort()
            await self._wait_lost()
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=FLUSH_S)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Leave signals alone: `stop_on_signals` handles them on the loop."""
        yield

    async def _wait_lost(self) -> None:
        while self.server_state.connections:
            self._all_lost.clear()
            await self._all_lost.wait()

    def _note_lost(self) -> None:
        self._all_lost.set()


def stop_on_signals(stop: Callable[[], None]) -> None:
    """Call `stop` on the first SIGTERM or SIGINT; end the process at the second, with 128 + signal."""
    loop = asyncio.get_running_loop()
    seen: list[int] = []

    def handle(number: int) -> None:
        if seen:
            os._exit(_SIGNAL_EXIT + number)
        seen.append(number)
        stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, handle, number)
