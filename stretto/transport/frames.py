"""Frames: how messages and the bytes of inline payloads lie on a byte stream.

    u32 length of what follows │ u32 header length │ header │ body

Integers are little-endian. The header is a msgpack list of messages; the body is the raw bytes of
their inline payloads, in message order. This module must not know what a message means.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from stretto.errors import InternalError

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAX_FRAME_BYTES = 64 * 1024 * 1024
"""Default limit of a frame's length field; a peer that claims more is not one of ours."""

COALESCED_BYTES = 256 * 1024
"""A frame that carries several messages stops growing here, so that no receiver waits for megabytes."""

_PREFIX = struct.Struct("<II")
_LENGTH = struct.Struct("<I")
_LIST_OF = struct.Struct(">BI")
_MSGPACK_ARRAY32 = 0xDD
_OVERHEAD = _PREFIX.size + _LIST_OF.size
_SMALL_BUFFER = 64 * 1024
_LARGE_BUFFER = 512 * 1024


class FrameError(InternalError):
    """Bytes that are not a frame, or a message that no frame may carry."""


class Frame(NamedTuple):
    """A received frame. Both views are valid until the reader is touched again; copy what must stay."""

    header: memoryview
    body: memoryview


class FrameEncoder:
    """Collects messages into one frame.

    A message is encoded when it is added, so that a mistake surfaces at its sender and later changes
    to the message do not matter. A body is kept by reference until its frame is written.
    """

    __slots__ = ("_bodies", "_coalesced_bytes", "_encode", "_headers", "_max_bytes", "_size")

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._encode = msgspec.msgpack.Encoder().encode
        self._max_bytes = max_frame_bytes
        self._coalesced_bytes = min(COALESCED_BYTES, max_frame_bytes)
        self._headers: list[bytes] = []
        self._bodies: list[bytes | memoryview] = []
        self._size = _OVERHEAD

    def add(self, message: object, body: Buffer | None = None) -> list[bytes | memoryview] | None:
        """Add a message and the bytes of its inline payloads.

        Returns:
            The buffers of the frame so far if the message did not fit in it and opened the next one;
            they must be written first. Usually `None`.

        Raises:
            FrameError: The message alone is larger than a frame may be. Nothing was added.
            TypeError: msgspec can't encode the message. Nothing was added.
        """
        header = self._encode(message)
        content = None if body is None else _as_bytes(body)
        added = len(header) if content is None else len(header) + len(content)
        full = None
        if self._size + added > self._coalesced_bytes:
            if added + _OVERHEAD > self._max_bytes:
                raise FrameError(
                    f"A {type(message).__name__} of {added} bytes does not fit in a frame of at most "
                    f"{self._max_bytes} bytes; send its payload in smaller chunks."
                )
            full = self.take()
        self._headers.append(header)
        if content is not None:
            self._bodies.append(content)
        self._size += added
        return full

    def take(self) -> list[bytes | memoryview] | None:
        """Return the buffers of the frame so far, for `writelines`, and start the next one.

        Returns `None` if no message was added since the last one.
        """
        if not self._headers:
            return None
        header_length = _LIST_OF.size + sum(map(len, self._headers))
        prefix = _PREFIX.pack(self._size - _LENGTH.size, header_length)
        count = _LIST_OF.pack(_MSGPACK_ARRAY32, len(self._headers))
        buffers: list[bytes | memoryview] = [b"".join((prefix, count, *self._headers))]
        buffers += self._bodies
        self._headers = []
        self._bodies = []
        self._size = _OVERHEAD
        return buffers


class FrameReader:
    """Incremental parser: bytes arrive in its buffer, complete frames leave it.

    Bytes `start..end` of the buffer are received and not yet parsed. The buffer is small until a frame
    needs the large one, which is kept; for a frame larger than that it grows to hold just this frame and
    goes back after it. It is replaced, never resized, because the event loop may hold a view of it.

    Attributes:
        max_bytes: Larger frames are refused before they are read.
    """

    __slots__ = ("_end", "_start", "_view", "max_bytes")

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self.max_bytes = max_frame_bytes
        self._view = memoryview(bytearray(_SMALL_BUFFER))
        self._start = 0
        self._end = 0

    @property
    def partial_bytes(self) -> int:
        """How many bytes of an incomplete frame are here."""
        return self._end - self._start

    @property
    def buffer_bytes(self) -> int:
        """How large the receive buffer is now."""
        return len(self._view)

    def release(self) -> None:
        """Give the buffer up, whoever still holds this reader; nothing comes any more."""
        self._view = memoryview(b"")
        self._start = self._end = 0

    def get_buffer(self) -> memoryview:
        """Return where the next bytes go; never empty."""
        return self._view[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        """Take note of `nbytes` received; then call `next_frame` until it returns `None`."""
        self._end += nbytes

    def next_frame(self) -> Frame | None:
        """Return the next complete frame, or `None` once there is room for the rest of it.

        Raises:
            FrameError: The stream is not made of frames; nothing after this can be read.
        """
        start, available = self._start, self._end - self._start
        if available < _PREFIX.size:
            self._make_room(_PREFIX.size)
            return None
        length, header_length = _PREFIX.unpack_from(self._view, start)
        size = length + _LENGTH.size
        if size > self.max_bytes:
            raise FrameError(f"frame of {size} bytes, the limit is {self.max_bytes}")
        if header_length + _LENGTH.size > length:
            raise FrameError(f"header of {header_length} bytes in a frame of {size}")
        if available < size:
            self._make_room(size)
            return None
        header_at = start + _PREFIX.size
        body_at = header_at + header_length
        self._start = start + size
        return Frame(self._view[header_at:body_at], self._view[body_at : self._start])

    def _make_room(self, needed: int) -> None:
        """Let the buffer hold `needed` bytes from `start` on, and move what is there to its front."""
        start, end = self._start, self._end
        rest = end - start
        capacity = len(self._view)
        if needed > capacity or (capacity > _LARGE_BUFFER and needed <= _LARGE_BUFFER):
            usual = _SMALL_BUFFER if needed <= _SMALL_BUFFER else _LARGE_BUFFER
            fresh = memoryview(bytearray(max(needed, usual)))
            fresh[:rest] = self._view[start:end]
            self._view = fresh
        elif start:
            self._view[:rest] = self._view[start:end]
        self._start, self._end = 0, rest


def _as_bytes(body: Buffer) -> bytes | memoryview:
    """Return `body` such that `len` counts its bytes."""
    if isinstance(body, bytes):
        return body
    view = memoryview(body)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")
