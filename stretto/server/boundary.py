"""The outermost layer of the application: what every request gets, whatever becomes of it.

A request id, the `Date` header, the end of the connection while the server shuts down, one line in the log
and one message for the metrics. Pure ASGI, so that nothing is put between a
response and its connection.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from email.utils import formatdate
from typing import TYPE_CHECKING

from starlette.datastructures import Headers

from stretto.messages.channel import HttpDone
from stretto.server.errors import CLIENT_LEFT

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from stretto.server.in_flight import InFlight

access_log = logging.getLogger("stretto.access")

QUIET_PATHS = frozenset({"/health", "/ready"})
"""Paths that probes ask for again and again; logged at debug level."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
_UNPRINTABLE = re.compile(r"[^!-~]")


class HttpDate:
    """The `Date` header's value, formatted at most once a second and only when it is asked for.

    Args:
        clock: Seconds since the epoch.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._second = -1
        self._value = b""

    def __call__(self) -> bytes:
        """Return the present time in HTTP's form."""
        second = int(self._clock())
        if second != self._second:
            self._second = second
            self._value = formatdate(second, usegmt=True).encode()
        return self._value


class Boundary:
    """ASGI middleware; see the module.

    It leaves `request_id` and `arrived_s` (monotonic) in the scope's state, and finds `first_audio_s` there
    if there was audio.

    Args:
        app: What is inside.
        in_flight: Says whether the server drains.
        report: Takes what the metrics count.
        date: Makes the `Date` header.
    """

    def __init__(
        self,
        app: ASGIApp,
        in_flight: InFlight,
        report: Callable[[HttpDone], None],
        date: HttpDate | None = None,
    ) -> None:
        self._app = app
        self._in_flight = in_flight
        self._report = report
        self._date = date or HttpDate()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(
            _request_id(Headers(scope=scope).get("x-request-id", "")), self._headers, send
        )
        state = scope.setdefault("state", {})
        state["request_id"] = exchange.request_id
        state["arrived_s"] = exchange.arrived_s
        try:
            await self._app(scope, receive, exchange.send)
        finally:
            exchange.log(scope)
            self._report(exchange.summary(scope))

    def _headers(self) -> list[tuple[bytes, bytes]]:
        headers = [(b"date", self._date())]
        if self._in_flight.is_draining:
            headers.append((b"connection", b"close"))
        return headers


class _Exchange:
    """One request and what was sent for it."""

    def __init__(
        self, request_id: str, headers: Callable[[], list[tuple[bytes, bytes]]], send: Send
    ) -> None:
        self.request_id = request_id
        self.arrived_s = time.monotonic()
        self._headers = headers
        self._send = send
        self._status = CLIENT_LEFT
        self._bytes = 0
        self._is_complete = False

    async def send(self, message: Message) -> None:
        """Pass a message on, with our headers."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            message["headers"] = [
                *message.get("headers", ()),
                *self._headers(),
                (b"x-request-id", self.request_id.encode()),
            ]
        else:
            self._bytes += len(message.get("body", b""))
            self._is_complete = not message.get("more_body", False)
        await self._send(message)

    def summary(self, scope: Scope) -> HttpDone:
        """Return what the metrics count."""
        state = scope["state"]
        return HttpDone(
            endpoint=getattr(scope.get("route"), "path", "other"),
            code=self._status,
            duration_s=time.monotonic() - self.arrived_s,
            first_audio_s=state.get("first_audio_s"),
        )

    def log(self, scope: Scope) -> None:
        """Write the access line."""
        level = logging.DEBUG if scope["path"] in QUIET_PATHS else logging.INFO
        if not access_log.isEnabledFor(level):
            return
        raw: bytes = scope.get("raw_path") or scope["path"].encode()
        client = scope.get("client")
        access_log.log(
            level,
            "%s %s %s %d %.0fms %dB %s%s",
            client[0] if client else "-",
            scope["method"],
            _UNPRINTABLE.sub("?", raw.decode("latin-1")),
            self._status,
            (time.monotonic() - self.arrived_s) * 1000,
            self._bytes,
            self.request_id,
            "" if self._is_complete else " incomplete",
        )


def _request_id(given: str) -> str:
    """Return the client's id if it is fit for headers and logs, else a new one."""
    return given if _REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(8)}"
