"""Payloads as bytes: values come back as they were, arrays as views, and nonsense is refused."""

from __future__ import annotations

import array
import contextlib
import enum
import struct
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.errors import PayloadLost, StageError
from stretto.transport import decode, encode

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stretto.types import Value

DTYPES = ["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f4", "f8"]


def through(values: Mapping[str, object]) -> dict[str, Value]:
    """Encode, join and decode."""
    encoded = encode(values)
    data = encoded.join()
    assert len(data) == encoded.size_bytes
    return decode(data)


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
)


@given(st.dictionaries(st.text(), SCALARS))
def test_scalars_come_back_equal_and_of_the_same_type(values: dict[str, Value]) -> None:
    """Text, numbers, truth values, bytes and nothing survive, whatever their names."""
    result = through(values)

    assert result == values
    assert {name: type(value) for name, value in result.items()} == {
        n: type(v) for n, v in values.items()
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (7,), (3, 5), (2, 3, 4), (0,), (0, 3006), (0, 2, 3)])
def test_arrays_come_back_with_format_shape_and_content(dtype: str, shape: tuple[int, ...]) -> None:
    """An array of each native type and of several shapes is a read-only view of the same content."""
    source = np.arange(np.prod(shape), dtype="i8").astype(dtype).reshape(shape)

    view = through({"array": source, "name": "n"})["array"]

    assert isinstance(view, memoryview)
    assert view.readonly
    assert (view.format, view.shape) == (source.dtype.char, shape)
    np.testing.assert_array_equal(np.asarray(view), source)
    assert np.asarray(view).dtype == source.dtype


@given(st.lists(st.integers(0, 200), max_size=6), st.text(max_size=100))
def test_any_number_of_arrays_lies_aligned_behind_any_header(sizes: list[int], text: str) -> None:
    """Every array starts at a multiple of 64 bytes of the payload and has its own content."""
    sources = {str(index): np.full(size, index, "u1") for index, size in enumerate(sizes)}
    data = encode({**sources, "text": text}).join()
    start = np.frombuffer(data, "u1").ctypes.data

    result = decode(data)

    assert result.pop("text") == text
    for name, view in result.items():
        assert isinstance(view, memoryview)
        found = np.asarray(view)
        np.testing.assert_array_equal(found, sources[name])
        assert found.size == 0 or (found.ctypes.data - start) % 64 == 0


def test_decoding_copies_no_array() -> None:
    """A decoded array shares memory with the payload's bytes."""
    data = bytearray(encode({"samples": np.zeros(4, "f4")}).join())
    samples = views(decode(memoryview(data)))["samples"]

    data[-4:] = struct.pack("<f", 1.5)

    assert samples.readonly
    assert samples.tolist() == [0.0, 0.0, 0.0, 1.5]


def test_encoding_copies_no_array() -> None:
    """The array's own memory is among the buffers, so writing a payload out is its only copy."""
    source = np.zeros(100, "f4")

    encoded = encode({"samples": source})

    assert any(np.shares_memory(np.frombuffer(buffer, "u1"), source) for buffer in encoded.buffers)


def test_arrays_need_no_numpy() -> None:
    """Anything with the buffer protocol is an array, and a decoded one may be sent on."""
    values = {
        "a": array.array("d", [1.5, 2.5]),
        "b": bytearray(b"ab"),
        "c": memoryview(b"abcd").cast("H"),
    }

    once = through(values)
    twice = through(once)

    assert {name: (view.format, view.tolist()) for name, view in views(twice).items()} == {
        "a": ("d", [1.5, 2.5]),
        "b": ("B", [97, 98]),
        "c": ("H", [0x6261, 0x6463]),
    }


def views(values: Mapping[str, Value]) -> dict[str, memoryview]:
    """Return the arrays among the values."""
    return {name: value for name, value in values.items() if isinstance(value, memoryview)}


class Color(enum.IntEnum):
    """An integer with a name."""

    RED = 3


class Mood(str, enum.Enum):  # noqa: UP042 - unlike a StrEnum's, its `str` is not its value
    """A text with a name."""

    GLAD = "glad"


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.float32(1.5), 1.5),
        (np.float64(2.5), 2.5),
        (np.int64(-4), -4),
        (np.bool_(True), True),
        (np.array(7, "i2"), 7),
        (np.str_("text"), "text"),
        (Color.RED, 3),
        (Mood.GLAD, "glad"),
    ],
)
def test_scalars_in_disguise_become_plain_ones(value: object, plain: object) -> None:
    """Numpy scalars, zero-dimensional arrays and enum members arrive as built-in values."""
    result = through({"value": value})["value"]

    assert result == plain
    assert type(result) is type(plain)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (np.zeros(2, "f2"), "format 'e'"),
        (np.zeros(2, "c8"), "format 'Zf'"),
        (np.zeros(2, ">f4"), "format '>f'"),
        (np.zeros(2, "U3"), "format '3w'"),
        (np.zeros(2, [("a", "i4"), ("b", "f4")]), "format 'T{"),
        (np.array([object()]), "format 'O'"),
        (np.zeros(2, "M8[s]"), "ndarray is neither a scalar nor an array"),
        (np.zeros((4, 4), "f4")[:, ::2], "not C-contiguous"),
        (np.zeros((4, 4), "f4").T[:, :2], "not C-contiguous"),
        (np.zeros((3, 0), "f4"), "first dimension alone may be zero"),
        ([1, 2], "list is neither"),
        ({"a": 1}, "dict is neither"),
        (1j, "complex is neither"),
        (object(), "object is neither"),
        (2**64, "ints"),
        ("\ud800", "surrogates"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isascii() else type(value).__name__,
)
def test_a_value_that_cannot_be_carried_is_named(value: object, reason: str) -> None:
    """The error names the value, the reason and belongs to the stage that made it."""
    with pytest.raises(StageError) as caught:
        encode({"fine": 1, "broken": value})

    assert "The value 'broken' can't be carried" in caught.value.detail
    assert reason in caught.value.detail
    assert caught.value.code == "unsupported_value"


def payload_with(header: object, content: bytes = b"") -> bytes:
    """Return a payload with a header of our making."""
    packed = msgspec.msgpack.encode(header)
    data = struct.pack("<I", len(packed)) + packed
    return data + bytes(-len(data) % 64) + content


def test_the_layout_is_what_the_module_says() -> None:
    """A payload built by hand from the description decodes."""
    data = payload_with([{"n": 1}, {"b": b"x"}, {"a": ["h", [2], 0]}], struct.pack("<hh", 5, 6))

    result = decode(data)

    assert (result["n"], result["b"], views(result)["a"].tolist()) == (1, b"x", [5, 6])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x01",
        struct.pack("<I", 100) + b"\x93\x80\x80\x80",
        struct.pack("<I", 3) + b"\x93\x80\x80",
        struct.pack("<I", 4) + b"\xc1\xc1\xc1\xc1",
        payload_with([{}, {}, {"a": ["h", [2], 0]}], b"123"),
        payload_with([{}, {}, {"a": ["h", [2], 1]}], b"1234"),
        payload_with([{}, {}, {"a": ["h", [1], -2]}], b"1234"),
        payload_with([{}, {}, {"a": ["h", [-1], 0]}], b"1234"),
        payload_with([{}, {}, {"a": ["h", [-1, -1], 0]}], b"1234"),
        payload_with([{}, {}, {"a": ["h", [2**62, 4], 0]}], b"1234"),
        payload_with([{}, {}, {"a": ["h", [2**63, 2**63, 0], 0]}], b"1234"),
        payload_with([{}, {}, {"a": ["h", [0, 2**40], 0]}], b"1234"),
        payload_with([{}, {}, {"a": ("h", (), 0)}], b"1234"),
        payload_with([{}, {}, {"a": ["h", [1] * 65, 0]}], b"1234"),
        payload_with([{}, {}, {"a": ["O", [1], 0]}], bytes(8)),
        payload_with([{}, {}, {"a": ["hh", [1], 0]}], bytes(8)),
        payload_with([{"a": [1]}, {}, {}]),
        payload_with({"a": 1}),
        struct.pack("<I", 20_001) + b"\x91" * 20_000 + b"\x00",
        struct.pack("<I", 20_005) + b"\x93\x81\xa1a" + b"\x91" * 20_000 + b"\x00",
    ],
)
def test_bytes_that_are_no_payload_are_refused(data: bytes) -> None:
    """No description reaches outside the payload, and each refusal is a lost payload."""
    with pytest.raises(PayloadLost):
        decode(data)


@given(st.binary(max_size=200), st.integers(0, 60))
def test_damaged_payloads_never_raise_anything_else(noise: bytes, at: int) -> None:
    """Whatever is overwritten, decoding gives values or the one error."""
    data = bytearray(encode({"text": "hello", "a": np.arange(6, dtype="f4").reshape(2, 3)}).join())
    data[at : at + len(noise)] = noise

    with contextlib.suppress(PayloadLost):
        decode(bytes(data))
