"""Connections over real sockets, on asyncio's and on uvloop's event loop."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import TYPE_CHECKING, Any

import pytest

from stretto.transport import FrameError, connect_unix, serve_unix
from stretto.transport.frames import COALESCED_BYTES
from tests.transport.wire import (
    Mark,
    Message,
    Note,
    Owner,
    frame_bytes,
    open_descriptors,
    socket_pair,
)

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable

    from stretto.transport import Connection


class RecordingTransport(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Take note of nothing."""

    def is_closing(self) -> bool:
        """Return that it is open."""
        return False

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview[Any]]) -> None:
        """Keep one write."""
        self.writes.append(b"".join(list_of_data))


async def turn() -> None:
    """Let the loop finish this turn."""
    await asyncio.sleep(0)


async def ends(first: Owner, second: Owner) -> tuple[Connection[Message], Connection[Message]]:
    """Return both ends of one connection."""
    one, other = socket.socketpair()
    return await first.over(one), await second.over(other)


async def round_trip() -> None:
    """Send a message there and back over a connection of its own: the loop has looked at all sockets."""
    here, there = Owner(), Owner()
    there.react = answer
    client, _ = await ends(here, there)
    client.send(Mark())
    await here.wait(lambda: here.messages)
    client.close()
    await here.wait_closed()
    await there.wait_closed()


def answer(connection: Connection[Message], messages: list[Message]) -> None:
    """Answer each message with its number, and with bytes of that length."""
    for message in messages:
        number = message.number if isinstance(message, Note) else 0
        connection.send(Note(-number, size=number), b"x" * number)


async def test_messages_and_bodies_travel_both_ways(socket_path: str) -> None:
    """What one end sends, the other receives in order with the bytes of each message."""
    serving, calling = Owner(), Owner()
    serving.react = answer
    server = await serve_unix(socket_path, serving.make)
    client = await connect_unix(socket_path, calling.make)
    sent = [Note(number, "é", size=2) for number in range(1, 101)]

    for note in sent:
        client.send(note, b"%02d" % (note.number % 100))
    await calling.wait(lambda: len(calling.messages) == 100)
    client.close()
    server.close()
    await serving.wait_closed()
    await calling.wait_closed()
    await server.wait_closed()

    assert serving.messages == sent
    assert serving.bodies == [b"%02d" % (number % 100) for number in range(1, 101)]
    assert calling.messages == [Note(-number, size=number) for number in range(1, 101)]
    assert calling.bodies == [b"x" * number for number in range(1, 101)]


async def test_all_messages_of_a_turn_are_one_write_of_one_frame() -> None:
    """Ten sends in one turn are one frame and one `writelines`; the next turn has its own."""
    connection = Owner().make()
    transport = RecordingTransport()
    connection.connection_made(transport)
    first, second = [Note(i, size=1) for i in range(10)], [Note(10)]

    for note in first:
        assert connection.send(note, b"x")
    assert transport.writes == []
    await turn()
    assert connection.send(second[0])
    await turn()

    assert transport.writes == [frame_bytes(first, [b"x"] * 10), frame_bytes(second)]
    assert connection.statistics().frames_out_total == 2
    assert connection.statistics().messages_out_total == 11


async def test_flush_writes_without_waiting_for_the_turn_to_end() -> None:
    """Flushing sends what is there, once; the end of the turn then has nothing left."""
    connection = Owner().make()
    transport = RecordingTransport()
    connection.connection_made(transport)

    connection.send(Mark())
    connection.flush()
    connection.flush()
    assert transport.writes == [frame_bytes([Mark()])]
    await turn()

    assert len(transport.writes) == 1


async def test_a_turn_of_megabytes_is_several_frames() -> None:
    """No frame of several messages exceeds the coalescing limit, and all arrive in order."""
    here, there = Owner(), Owner()
    client, _ = await ends(here, there)
    body = bytes(COALESCED_BYTES // 3)

    for number in range(8):
        client.send(Note(number, size=len(body)), body)
    await there.wait(lambda: len(there.messages) == 8)
    client.close()
    await there.wait_closed()
    await here.wait_closed()

    assert [len(frame) for frame in there.frames] == [2, 2, 2, 2]
    assert there.messages == [Note(number, size=len(body)) for number in range(8)]


async def test_what_is_sent_before_the_connection_is_made_goes_out_first() -> None:
    """A factory may greet with the connection that it returns."""
    here, there = Owner(), Owner()

    def greeting() -> Connection[Message]:
        connection = here.make()
        assert connection.send(Note(1))
        return connection

    one, other = socket.socketpair()
    await there.over(other)
    _, client = await asyncio.get_running_loop().create_connection(greeting, sock=one)
    await there.wait(lambda: there.messages)
    client.send(Note(2))
    await there.wait(lambda: len(there.messages) == 2)
    client.close()
    await there.wait_closed()
    await here.wait_closed()

    assert there.messages == [Note(1), Note(2)]


async def test_a_frame_that_arrives_byte_by_byte_is_one_frame() -> None:
    """Reads that end anywhere make no difference on a real socket either."""
    owner = Owner()
    ours, peer = socket_pair()
    connection = await owner.over(ours)
    data = frame_bytes([Note(1, "one", size=4)], [b"body"]) + frame_bytes([Note(2)])

    for index in range(len(data)):
        peer.send(data[index : index + 1])
        while connection.statistics().bytes_in_total <= index:
            await turn()
    await owner.wait(lambda: len(owner.frames) == 2)
    peer.close()
    await owner.wait_closed()

    assert owner.messages == [Note(1, "one", size=4), Note(2)]
    assert owner.bodies == [b"body"]


async def test_complete_frames_before_the_end_are_delivered_and_it_is_reported_once() -> None:
    """A peer that ends in the middle of a frame loses only that frame."""
    owner = Owner()
    ours, peer = socket_pair()
    await owner.over(ours)
    data = frame_bytes([Note(1)]) + frame_bytes([Note(2)]) + frame_bytes([Note(3)])[:-2]

    peer.sendall(data)
    peer.close()
    reason = await owner.wait_closed()
    await turn()

    assert owner.messages == [Note(1), Note(2)]
    assert reason == f"end of stream {len(frame_bytes([Note(3)])) - 2} bytes into a frame"
    assert owner.closed == [reason]


async def test_an_orderly_end_is_called_that() -> None:
    """A peer that closes between frames is reported as the end of the stream."""
    owner = Owner()
    ours, peer = socket_pair()
    await owner.over(ours)

    peer.close()

    assert await owner.wait_closed() == "end of stream"


async def test_a_peer_that_stops_sending_ends_the_connection_although_bytes_are_unsent() -> None:
    """The end of the peer's stream does not wait for a peer that does not read."""
    owner = Owner()
    ours, peer = socket_pair()
    connection = await owner.over(ours)
    body = bytes(1 << 19)
    connection.send(Note(1, size=len(body)), body)
    await owner.wait(lambda: "full" in owner.levels)

    peer.shutdown(socket.SHUT_WR)

    assert await owner.wait_closed() == "end of stream"
    peer.close()


async def test_the_last_words_of_a_peer_are_read_although_writing_to_it_fails() -> None:
    """A write that fails because the peer is dead does not cost the messages that the peer sent before."""
    owner = Owner()
    ours, peer = socket_pair()
    connection = await owner.over(ours)
    words = [Note(number, "last words " * 100) for number in range(20)]

    peer.sendall(b"".join(frame_bytes([word]) for word in words))
    peer.close()
    connection.send(Mark())
    connection.flush()
    await owner.wait_closed()

    assert owner.messages == words
    assert len(owner.closed) == 1


GARBAGE = [
    pytest.param(struct.pack("<II", 2 << 20, 4), "frame of 2097156 bytes", id="oversize"),
    pytest.param(b"GET / HTTP/1.1\r\n\r\n", "frame of", id="http"),
    pytest.param(
        struct.pack("<II", 9, 6) + b"x" * 5, "header of 6 bytes", id="header beyond frame"
    ),
    pytest.param(struct.pack("<II", 5, 1) + b"\xc1", "undecodable header", id="no msgpack"),
    pytest.param(
        struct.pack("<II", 8, 4) + b"\x91\x92\x63\x00", "undecodable header", id="unknown tag"
    ),
    pytest.param(
        struct.pack("<II", 9, 5) + b"\xdd\xff\xff\xff\xff", "undecodable header", id="huge list"
    ),
    pytest.param(
        struct.pack("<II", 10009, 10005) + b"\x91\x92\x02" + b"\x91" * 10001 + b"\x00",
        "undecodable header",
        id="deep nesting",
    ),
    pytest.param(
        struct.pack("<II", 16, 12) + b"\x80\x04\x95\x10cposix\nsy",
        "undecodable header",
        id="pickle",
    ),
]


@pytest.mark.parametrize(("garbage", "reason"), GARBAGE)
async def test_garbage_closes_its_own_connection_only(
    garbage: bytes, reason: str, socket_path: str
) -> None:
    """What came before garbage is delivered, the reason is named, and other connections go on."""
    owner = Owner()
    server = await serve_unix(socket_path, owner.make)
    good = await connect_unix(socket_path, Owner().make)
    bad = socket.socket(socket.AF_UNIX)
    bad.connect(socket_path)

    bad.sendall(frame_bytes([Note(1)]) + garbage + frame_bytes([Note(99)]))
    closed = await owner.wait_closed()
    good.send(Note(2))
    await owner.wait(lambda: len(owner.messages) == 2)
    good.close()
    await owner.wait(lambda: len(owner.closed) == 2)
    bad.close()
    server.close()
    await server.wait_closed()

    assert closed.startswith("protocol violation: ")
    assert reason in closed
    assert owner.messages == [Note(1), Note(2)]


async def test_full_and_drained_follow_the_unsent_bytes() -> None:
    """A peer that does not read makes the connection full; once it reads, it drains."""
    owner = Owner(high_water_bytes=1 << 16)
    ours, peer = socket_pair()
    connection = await owner.over(ours)
    body = bytes(1 << 15)
    sent = 0

    while "full" not in owner.levels:
        connection.send(Note(sent, size=len(body)), body)
        sent += 1
        await turn()
    assert owner.levels == ["full"]
    expected = connection.statistics().bytes_out_total
    received = await asyncio.to_thread(read_exactly, peer, expected)
    await owner.wait(lambda: len(owner.levels) == 2)
    connection.close()
    await owner.wait_closed()
    peer.close()

    assert owner.levels == ["full", "drained"]
    assert received.count(body) >= sent


def read_exactly(peer: socket.socket, count: int) -> bytes:
    """Read `count` bytes from a blocking socket."""
    parts: list[bytes] = []
    while count:
        parts.append(peer.recv(count))
        count -= len(parts[-1])
    return b"".join(parts)


async def test_close_writes_what_was_sent() -> None:
    """A graceful close loses nothing, also when the socket's own buffer is full; it may be repeated."""
    owner = Owner()
    ours, peer = socket_pair()
    connection = await owner.over(ours)
    body = bytes(1 << 19)
    stream = frame_bytes([Note(1, size=len(body))], [body])

    connection.send(Note(1, size=len(body)), body)
    connection.close()
    connection.close()
    received = await asyncio.to_thread(read_exactly, peer, len(stream))
    await owner.wait_closed()

    assert received == stream
    assert peer.recv(1) == b""
    assert owner.closed == ["closed by this side"]
    peer.close()


async def test_abort_ends_at_once_also_a_close_that_waits() -> None:
    """A peer that never reads can't hold back an abort; repeating it changes nothing."""
    owner = Owner()
    ours, peer = socket_pair()
    connection = await owner.over(ours)
    body = bytes(1 << 19)

    connection.send(Note(1, size=len(body)), body)
    connection.close()
    await round_trip()
    assert owner.closed == []
    connection.abort()
    connection.abort()
    await owner.wait_closed()
    connection.abort()
    connection.close()

    assert owner.closed == ["closed by this side"]
    peer.close()


async def test_abort_alone_names_itself() -> None:
    """An aborted connection reports whose doing it was, exactly once."""
    here, there = Owner(), Owner()
    client, _ = await ends(here, there)

    client.send(Mark())
    client.abort()

    assert await here.wait_closed() == "aborted by this side"
    assert await there.wait_closed() == "end of stream"
    assert there.messages == []


async def test_sends_after_the_end_are_counted_and_ignored() -> None:
    """Once closing, `send` returns False and writes nothing."""
    here, there = Owner(), Owner()
    client, other = await ends(here, there)

    assert client.send(Note(1))
    client.close()
    assert not client.send(Note(2))
    await here.wait_closed()
    await there.wait_closed()
    assert not client.send(Note(3))
    assert not other.send(Note(4))
    await turn()

    assert there.messages == [Note(1)]
    assert client.statistics().ignored_sends_total == 2
    assert other.statistics().ignored_sends_total == 1
    assert not client.is_open


@pytest.mark.parametrize("end", ["close", "abort"])
async def test_nothing_is_delivered_after_the_own_end(end: str) -> None:
    """An owner that ends the connection while handling a frame does not see the next one."""
    owner = Owner()
    owner.react = lambda connection, messages: (
        connection.close() if end == "close" else connection.abort()
    )
    ours, peer = socket_pair()
    await owner.over(ours)

    peer.sendall(frame_bytes([Note(1)]) + frame_bytes([Note(2)]))
    await owner.wait_closed()
    peer.close()

    assert owner.messages == [Note(1)]


async def test_a_paused_connection_receives_when_resumed() -> None:
    """Nothing is delivered while reading is paused and nothing is lost."""
    owner = Owner()
    ours, peer = socket_pair()
    connection = await owner.over(ours)

    connection.pause_reading()
    connection.pause_reading()
    peer.sendall(frame_bytes([Note(1)]))
    await round_trip()
    assert owner.messages == []
    connection.resume_reading()
    connection.resume_reading()
    await owner.wait(lambda: owner.messages)
    peer.close()
    await owner.wait_closed()
    connection.pause_reading()
    connection.resume_reading()

    assert owner.messages == [Note(1)]


async def test_an_owner_may_pause_while_it_handles_a_frame() -> None:
    """The bounded inbox stops the flood from within the callback; the rest comes after resuming."""
    owner = Owner()
    owner.react = lambda connection, messages: connection.pause_reading()
    ours, peer = socket_pair()
    connection = await owner.over(ours)

    peer.sendall(frame_bytes([Note(1)]))
    await owner.wait(lambda: owner.messages)
    peer.sendall(frame_bytes([Note(2)]))
    await round_trip()
    assert owner.messages == [Note(1)]
    connection.resume_reading()
    await owner.wait(lambda: len(owner.messages) == 2)
    connection.abort()
    await owner.wait_closed()
    peer.close()


async def test_a_message_too_large_is_refused_at_its_sender() -> None:
    """The sender gets the error, and the connection goes on."""
    here, there = Owner(max_frame_bytes=1000), Owner()
    client, _ = await ends(here, there)

    with pytest.raises(FrameError, match="1000 bytes"):
        client.send(Note(1, size=2000), bytes(2000))
    with pytest.raises(TypeError):
        client.send(object())
    client.send(Note(2))
    await there.wait(lambda: there.messages)
    client.close()
    await here.wait_closed()
    await there.wait_closed()

    assert there.messages == [Note(2)]


async def test_an_exception_of_the_owner_closes_the_connection_and_is_not_swallowed() -> None:
    """A bug in the callback reaches the loop's exception handler and ends this connection once."""
    owner = Owner()
    seen: list[object] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: seen.append(context.get("exception"))
    )

    def broken(connection: Connection[Message], messages: list[Message]) -> None:
        raise KeyError("a bug")

    owner.react = broken
    ours, peer = socket_pair()
    await owner.over(ours)
    peer.sendall(frame_bytes([Note(1)]) + frame_bytes([Note(2)]))
    reason = await owner.wait_closed()
    peer.close()

    assert reason == "KeyError: 'a bug'"
    assert [type(error) for error in seen] == [KeyError]
    assert owner.messages == [Note(1)]


async def test_messages_cost_no_task() -> None:
    """Hundreds of messages in both directions create no task."""
    here, there = Owner(), Owner()
    there.react = answer
    client, _ = await ends(here, there)
    created: list[object] = []
    loop = asyncio.get_running_loop()

    def counting(
        loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, Any]
    ) -> asyncio.Task[Any]:
        created.append(coro)
        return asyncio.Task(coro, loop=loop)

    done = loop.create_future()

    def count(connection: Connection[Message], messages: list[Message]) -> None:
        if len(here.messages) == 300:
            done.set_result(None)

    here.react = count
    loop.set_task_factory(counting)  # pyright: ignore[reportArgumentType] - no generators here
    for number in range(300):
        client.send(Note(number))
    await done
    loop.set_task_factory(None)
    client.close()
    await here.wait_closed()
    await there.wait_closed()

    assert created == []


async def test_statistics_add_up_at_both_ends() -> None:
    """What one end counts as sent, the other counts as received, and the snapshot does not change."""
    here, there = Owner(), Owner()
    client, server = await ends(here, there)
    before = client.statistics()

    client.send(Note(1, size=3), b"abc")
    client.send(Mark())
    await there.wait(lambda: there.messages)
    sent, received = client.statistics(), server.statistics()
    client.close()
    await here.wait_closed()
    await there.wait_closed()

    assert before.messages_out_total == 0
    assert (sent.frames_out_total, sent.messages_out_total) == (1, 2)
    assert (received.frames_in_total, received.messages_in_total) == (1, 2)
    assert (
        sent.bytes_out_total
        == received.bytes_in_total
        == len(frame_bytes([Note(1, size=3), Mark()], [b"abc"]))
    )


async def test_connecting_where_nobody_listens_says_so(socket_path: str) -> None:
    """The error is the operating system's own, for the caller to retry or report."""
    with pytest.raises(FileNotFoundError):
        await connect_unix(socket_path, Owner().make)


async def test_every_way_to_end_closes_the_descriptor() -> None:
    """Own close and abort, the peer's end, garbage and a failed write leave no descriptor open."""
    await round_trip()
    before = open_descriptors()
    for end in ("close", "abort", "peer", "garbage", "failed write"):
        owner = Owner()
        ours, peer = socket_pair()
        connection = await owner.over(ours)
        match end:
            case "close":
                connection.close()
            case "abort":
                connection.abort()
            case "garbage":
                peer.sendall(b"x" * 100)
            case "failed write":
                peer.close()
                connection.send(Mark())
                connection.flush()
            case _:
                peer.close()
        await owner.wait_closed()
        peer.close()

    async with asyncio.timeout(5):
        while open_descriptors() > before:
            await turn()
