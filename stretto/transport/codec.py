"""Payloads as bytes: named scalars in a small header, arrays behind it as they lie in memory.

    u32 header length │ header │ zeros to a multiple of 64 │ array │ zeros to a multiple of 64 │ array …

The header is msgpack, three maps by name: scalars, byte strings, and for each array its format (of
`struct`), its shape, and its offset from where the first one lies. Arrays are in the byte order of the
host. This module must not know numpy: an array is whatever has the buffer protocol.
"""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, cast

import msgspec

from stretto.errors import PayloadLost, StageError

if TYPE_CHECKING:
    import mmap
    from collections.abc import Mapping

    from typing_extensions import Buffer

    from stretto.types import Value

_Scalar: TypeAlias = str | int | float | bool | None
_Array: TypeAlias = tuple[str, tuple[int, ...], int]
_Header: TypeAlias = tuple[dict[str, _Scalar], dict[str, bytes], dict[str, _Array]]

_ALIGNMENT = 64
_LENGTH = struct.Struct("<I")
_FORMATS = {code: struct.calcsize(code) for code in "?bBhHiIlLqQfd"}
_MAX_DIMENSIONS = 64
_MAX_EMPTY_ROW = 1 << 20
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_Header)


class EncodedPayload(NamedTuple):
    """A payload as the buffers that make up its bytes, in order.

    Arrays are referred to, not copied: they must not change until the payload is written or joined.
    """

    buffers: tuple[bytes | memoryview, ...]
    size_bytes: int

    def join(self) -> bytes:
        """Return the payload's bytes, in one copy."""
        return b"".join(self.buffers)

    def write_into(self, target: mmap.mmap) -> None:
        """Copy the payload to the start of a mapping of at least `size_bytes`."""
        at = 0
        for buffer in self.buffers:
            end = at + len(buffer)
            target[at:end] = buffer
            at = end


def encode(values: Mapping[str, object]) -> EncodedPayload:
    """Encode named values: text, numbers, truth values, bytes, `None` and arrays.

    Anything C-contiguous with the buffer protocol and a native number format is an array: a numpy
    array, an `array.array`, a `memoryview`. Zero-dimensional ones, numpy scalars among them, become
    Python scalars.

    Raises:
        StageError: A value can't be carried; the text names it and says what to pass instead.
    """
    scalars: dict[str, _Scalar] = {}
    strings: dict[str, bytes] = {}
    arrays: dict[str, _Array] = {}
    views: list[memoryview] = []
    offset = 0
    for name, value in values.items():
        if value is None or isinstance(value, str | int | float):
            scalars[name] = _plain(value)
            continue
        if isinstance(value, bytes):
            strings[name] = bytes(value)
            continue
        view = _view(name, value)
        shape = view.shape or ()
        if not shape:
            scalars[name] = view[()]
            continue
        arrays[name] = (view.format, shape, offset)
        if view.nbytes:  # an array without items has no bytes, and can't be cast
            views.append(view.cast("B"))
            offset = _aligned(offset + view.nbytes)
    return _laid_out(_encode_header((scalars, strings, arrays)), views)


def decode(data: bytes | memoryview) -> dict[str, Value]:
    """Return the values of an encoded payload.

    Arrays are read-only views of `data`, with the format and the shape that they had.

    Raises:
        PayloadLost: These are not the bytes of a payload.
    """
    view = memoryview(data).toreadonly()
    try:
        (length,) = _LENGTH.unpack_from(view)
        start = _LENGTH.size + length
        if start > len(view):
            raise PayloadLost(f"A payload of {len(view)} bytes claims a header of {length} bytes.")
        scalars, strings, arrays = _DECODER.decode(view[_LENGTH.size : start])
    except (struct.error, msgspec.MsgspecError) as error:
        raise PayloadLost(
            f"A payload of {len(view)} bytes has no readable header: {error}."
        ) from error
    values: dict[str, Value] = {**scalars, **strings}
    content = view[_aligned(start) :]
    for name, (code, shape, offset) in arrays.items():
        values[name] = _array(name, content, code, shape, offset)
    return values


def _laid_out(header: bytes, views: list[memoryview]) -> EncodedPayload:
    """Put the arrays behind the header, each at a multiple of the alignment."""
    buffers: list[bytes | memoryview] = [_LENGTH.pack(len(header)) + header]
    size = len(buffers[0])
    for view in views:
        start = _aligned(size)
        buffers += (bytes(start - size), view)
        size = start + len(view)
    return EncodedPayload(tuple(buffers), size)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def _plain(value: _Scalar) -> _Scalar:
    """Return a scalar as exactly its built-in type; msgpack takes no subclass such as `numpy.float64`."""
    for kind in (bool, int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, str):
        return str.__str__(value)
    return None


def _view(name: str, value: object) -> memoryview:
    """Return an array's bytes with format and shape, or say why it is none."""
    try:
        view = memoryview(cast("Buffer", value))
    except (TypeError, ValueError, BufferError) as error:
        raise _refusal(
            name, f"a {type(value).__name__} is neither a scalar nor an array ({error})"
        ) from None
    if view.format not in _FORMATS:
        reason = f"its array format {view.format!r} is not one of {', '.join(_FORMATS)}"
        raise _refusal(name, f"{reason}; convert it, for example with astype('float32')")
    if not view.c_contiguous:
        raise _refusal(name, "its array is not C-contiguous; use numpy.ascontiguousarray")
    if view.nbytes == 0 and not _is_sliceable(view.shape or ()):
        raise _refusal(
            name, f"an empty array's first dimension alone may be zero, its shape is {view.shape}"
        )
    return view


def _encode_header(header: _Header) -> bytes:
    try:
        return _ENCODER.encode(header)
    except (OverflowError, UnicodeEncodeError):
        for name, value in header[0].items():
            try:
                _ENCODER.encode(value)
            except (OverflowError, UnicodeEncodeError) as error:
                raise _refusal(name, str(error)) from None
        raise


def _refusal(name: str, reason: str) -> StageError:
    return StageError(
        f"The value {name!r} can't be carried by a chunk: {reason}.", code="unsupported_value"
    )


def _array(
    name: str, content: memoryview, code: str, shape: tuple[int, ...], offset: int
) -> memoryview:
    """Return one array of a payload after checking that it lies within it."""
    item_bytes = _FORMATS.get(code)
    if item_bytes is None or not 0 < len(shape) <= _MAX_DIMENSIONS or min(shape) < 0 or offset < 0:
        raise PayloadLost(f"The payload's array {name!r} has an impossible description.")
    size = math.prod(shape) * item_bytes
    if size == 0:
        return _empty(name, code, shape)
    if offset + size > len(content):
        raise PayloadLost(
            f"The payload's array {name!r} of {size} bytes at {offset} exceeds its {len(content)} bytes."
        )
    return _cast(content[offset : offset + size], code, shape)


def _empty(name: str, code: str, shape: tuple[int, ...]) -> memoryview:
    """Return an array without items: `cast` can't make one, but a slice of a one-row array is one."""
    if not _is_sliceable(shape):
        raise PayloadLost(f"The payload's array {name!r} has an impossible shape.")
    row = memoryview(bytes(math.prod(shape[1:]) * _FORMATS[code]))
    return _cast(row, code, (1, *shape[1:]))[0:0]


def _cast(content: memoryview, code: str, shape: tuple[int, ...]) -> memoryview:
    """Cast to any supported format; the type stubs know literal formats only."""
    return content.cast(cast("Literal['B']", code), shape)


def _is_sliceable(shape: tuple[int, ...]) -> bool:
    """Whether a shape without items is `0 × rows` of a reasonable size."""
    return 0 < math.prod(shape[1:]) <= _MAX_EMPTY_ROW
