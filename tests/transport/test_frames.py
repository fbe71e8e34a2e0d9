"""Frames: any split of the byte stream gives the same messages; nothing else is a frame."""

from __future__ import annotations

import array
import struct

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stretto.transport.frames import COALESCED_BYTES, FrameEncoder, FrameError, FrameReader
from tests.transport.wire import DECODER, Mark, Message, Note, frame_bytes

SMALL = FrameReader().buffer_bytes
PATTERN = bytes(range(251))


def feed(reader: FrameReader, data: bytes, sizes: list[int]) -> list[tuple[list[Message], bytes]]:
    """Give a reader `data` in reads of the given sizes, over and over, as an event loop would."""
    frames: list[tuple[list[Message], bytes]] = []
    at = turn = 0
    while at < len(data):
        buffer = reader.get_buffer()
        assert buffer
        count = min(sizes[turn % len(sizes)], len(buffer), len(data) - at)
        buffer[:count] = data[at : at + count]
        reader.buffer_updated(count)
        at += count
        turn += 1
        while (frame := reader.next_frame()) is not None:
            frames.append((DECODER.decode(frame.header), bytes(frame.body)))
    return frames


SHORT = st.integers(0, 40)
SIZES = SHORT | st.integers(SMALL - 40, SMALL + 40)


def contents_of(sizes: st.SearchStrategy[int]) -> st.SearchStrategy[list[list[tuple[str, int]]]]:
    """Frames as lists of messages with a text and the size of a body."""
    return st.lists(
        st.lists(st.tuples(st.text(max_size=20), sizes), min_size=1, max_size=4), max_size=6
    )


@settings(deadline=None)
@given(contents=contents_of(SHORT), reads=st.lists(st.integers(1, 50), min_size=1, max_size=6))
@example(contents=[[("a", 1), ("b", 0)], [("c", 2)]], reads=[1])
def test_any_split_of_short_frames_gives_the_same_frames(
    contents: list[list[tuple[str, int]]], reads: list[int]
) -> None:
    """However the bytes are cut into reads, the same messages and bodies come out in order."""
    check_split(contents, reads)


@settings(deadline=None, max_examples=50)
@given(
    contents=contents_of(SIZES),
    reads=st.lists(st.integers(1000, 2 * SMALL), min_size=1, max_size=6),
)
@example(contents=[[("large", SMALL * 9)], [("after", 1)]], reads=[SMALL])
def test_any_split_of_frames_around_the_buffer_size_gives_the_same_frames(
    contents: list[list[tuple[str, int]]], reads: list[int]
) -> None:
    """Frames that just fit in the buffer, just do not, or need another one come out whole."""
    check_split(contents, reads)


def check_split(contents: list[list[tuple[str, int]]], reads: list[int]) -> None:
    """Read a stream in the given reads and compare."""
    expected: list[tuple[list[Message], bytes]] = []
    stream = b""
    for content in contents:
        notes: list[Message] = [
            Note(number, text, size) for number, (text, size) in enumerate(content)
        ]
        bodies = [(PATTERN * (size // len(PATTERN) + 1))[:size] for _, size in content]
        expected.append((notes, b"".join(bodies)))
        stream += frame_bytes(notes, bodies)

    assert feed(FrameReader(), stream, reads) == expected


def test_one_read_with_many_frames_gives_them_all() -> None:
    """Frames that arrive together are all delivered, and the part of the next one is kept."""
    one = frame_bytes([Note(7, "seven")])
    reader = FrameReader()

    frames = feed(reader, one * 100 + one[:5], [SMALL])

    assert len(frames) == 100
    assert reader.partial_bytes == 5


def test_an_encoder_without_messages_has_no_frame() -> None:
    """Taking a frame twice gives nothing the second time."""
    encoder = FrameEncoder()
    encoder.add(Mark())

    assert encoder.take() is not None
    assert encoder.take() is None


def test_a_frame_stops_growing_at_the_coalescing_limit() -> None:
    """The message that does not fit any more opens the next frame and hands back the full one."""
    encoder = FrameEncoder()
    half = bytes(COALESCED_BYTES // 2)

    assert encoder.add(Note(0, size=len(half)), half) is None
    full = encoder.add(Note(1, size=len(half)), half)

    assert full is not None
    assert feed(FrameReader(), b"".join(full), [SMALL]) == [([Note(0, size=len(half))], half)]
    assert feed(FrameReader(), b"".join(encoder.take() or ()), [SMALL]) == [
        ([Note(1, size=len(half))], half)
    ]


def test_a_message_larger_than_a_frame_is_refused_and_leaves_no_trace() -> None:
    """The error names the class and the limit; what was added before still goes out."""
    encoder = FrameEncoder(max_frame_bytes=1000)
    encoder.add(Note(1))

    with pytest.raises(FrameError, match=r"Note of 1\d\d\d bytes does not fit .* 1000 bytes"):
        encoder.add(Note(2, size=1000), bytes(1000))

    assert feed(FrameReader(), b"".join(encoder.take() or ()), [SMALL]) == [([Note(1)], b"")]


def test_the_largest_frame_that_may_be_sent_may_be_received() -> None:
    """Both ends count the limit alike."""
    limit = 1000
    overhead = len(frame_bytes([Note(1, size=500)]))
    body = bytes(limit - overhead)
    encoder = FrameEncoder(limit)
    encoder.add(Note(1, size=500), body)

    assert feed(FrameReader(limit), b"".join(encoder.take() or ()), [SMALL]) == [
        ([Note(1, size=500)], body)
    ]
    with pytest.raises(FrameError):
        encoder.add(Note(1, size=500), body + b"x")


def test_a_body_counts_in_bytes_whatever_its_format() -> None:
    """A view of floats contributes its bytes, not its items."""
    floats = array.array("f", [1.0, 2.0])
    encoder = FrameEncoder()
    encoder.add(Note(1, size=8), memoryview(floats))

    assert feed(FrameReader(), b"".join(encoder.take() or ()), [3]) == [
        ([Note(1, size=8)], floats.tobytes())
    ]


@pytest.mark.parametrize(
    ("prefix", "reason"),
    [
        (struct.pack("<II", 0xFFFFFFFF, 0), "frame of 4294967299 bytes, the limit is 67108864"),
        (struct.pack("<II", 10, 7), "header of 7 bytes in a frame of 14"),
        (struct.pack("<II", 0, 0), "header of 0 bytes in a frame of 4"),
        (b"GET / HTTP/1.1\r\n", "frame of"),
    ],
)
def test_bytes_that_are_no_frame_are_refused_before_room_is_made(
    prefix: bytes, reason: str
) -> None:
    """A claim beyond the limits fails at once and allocates nothing."""
    reader = FrameReader()

    with pytest.raises(FrameError, match=reason):
        feed(reader, prefix, [len(prefix)])

    assert reader.buffer_bytes == SMALL


def test_the_buffer_goes_back_after_a_huge_frame() -> None:
    """A frame far beyond the usual size does not pin its memory."""
    size = 4 << 20
    reader = FrameReader()
    frame = frame_bytes([Note(1, size=size)], [bytes(size)])

    assert len(feed(reader, frame[:-1], [size])) == 0
    assert reader.buffer_bytes == len(frame)
    assert len(feed(reader, frame[-1:] + frame_bytes([Mark()]), [size])) == 2
    assert reader.buffer_bytes == SMALL
