"""Reads a request's body, whatever its declared type, within a limit that holds while reading."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stretto.errors import Cancelled, InvalidRequest

if TYPE_CHECKING:
    from starlette.requests import Request


async def read_body(request: Request, limit: int) -> bytes:
    """Return the whole body.

    Raises:
        InvalidRequest: It is larger than `limit` bytes; no more than that was read.
        Cancelled: The client has left.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > limit:
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await request.receive()
        if message["type"] != "http.request":
            raise Cancelled("The client left before its request was complete.")
        part: bytes = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _too_large(limit: int) -> InvalidRequest:
    return InvalidRequest(f"The body is larger than {limit} bytes.", code="request_too_large")
