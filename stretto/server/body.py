"""Reads a request's body, whatever its declared type, within a limit that holds while reading."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from stretto.errors import Cancelled, InvalidRequest

if TYPE_CHECKING:
    from starlette.requests import Request


async def read_body(request: Request, limit: int, pause_s: float) -> bytes:
    """Return the whole body.

    Args:
        request: Whose.
        limit: The largest size that is read, in bytes.
        pause_s: How long the client may send nothing, in seconds.

    Raises:
        InvalidRequest: It is larger than `limit` bytes, of which no more was read, or it stopped coming.
        Cancelled: The client has left.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > limit:
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    while True:
        try:
            async with asyncio.timeout(pause_s):
                message = await request.receive()
        except TimeoutError:
            raise InvalidRequest(
                f"Nothing of the body came for {pause_s:g} s.", code="request_timeout"
            ) from None
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
