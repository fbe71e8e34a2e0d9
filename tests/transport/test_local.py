"""Connections within a process: what the channel relies on, between two threads and on one loop."""

from __future__ import annotations

import asyncio
import threading

import pytest

from stretto.transport.frames import FrameError
from stretto.transport.local import ChannelEnd, LocalConnection, LocalListener

WAIT_S = 5.0

Listener = LocalListener[str, str]


class End:
    """One end and what it has heard."""

    def __init__(self, **options: object) -> None:
        self.heard: list[object] = []
        self.messages: list[str] = []
        self.closed = asyncio.Event()
        self.news = asyncio.Event()
        self.breaks_on: str | None = None
        self.connection: LocalConnection[str] = LocalConnection(
            self._on_frame,
            self._on_closed,
            **options,  # pyright: ignore[reportArgumentType] - options by name
        )

    def _on_frame(self, connection: ChannelEnd, messages: list[str], body: memoryview) -> None:
        if self.breaks_on in messages:
            raise RuntimeError("broken")
        self.heard.append((messages, bytes(body)))
        self.messages.extend(messages)
        self.news.set()

    def _on_closed(self, connection: ChannelEnd, reason: str) -> None:
        self.heard.append(reason)
        self.closed.set()


async def pair(**options: object) -> tuple[End, End]:
    """Return a connected client and server, both on this loop."""
    listener: Listener = LocalListener()
    client, servers = End(), list[End]()
    accepted = asyncio.Event()

    def accept() -> LocalConnection[str]:
        servers.append(End(**options))
        accepted.set()
        return servers[0].connection

    listener.serve(accept)
    listener.connect(client.connection)
    async with asyncio.timeout(WAIT_S):
        await accepted.wait()
    listener.close()
    return client, servers[0]


async def closed(*ends: End) -> None:
    """Wait until the ends have heard of the end."""
    async with asyncio.timeout(WAIT_S):
        for end in ends:
            await end.closed.wait()


async def test_what_is_sent_in_one_turn_arrives_together() -> None:
    """One frame per turn, with the bytes of its messages in order."""
    client, server = await pair()
    client.connection.send("a", b"1")
    client.connection.send("b")
    client.connection.send("c", b"23")
    client.connection.close()
    await closed(client, server)
    assert server.heard == [(["a", "b", "c"], b"123"), "end of stream"]
    assert client.heard == ["closed by this side"]


async def test_what_was_sent_before_the_end_is_delivered_and_what_comes_after_is_not() -> None:
    """After its own end a side hears nothing more, and `send` says so."""
    client, server = await pair()
    server.connection.send("last")
    server.connection.close()
    assert not server.connection.send("late")
    client.connection.send("to nobody")
    await closed(client, server)
    assert client.heard == [(["last"], b""), "end of stream"]
    assert server.heard == ["closed by this side"]
    assert not client.connection.send("late")


async def test_an_aborted_end_drops_what_it_had_not_handed_over() -> None:
    """The other side hears of the end only."""
    client, server = await pair()
    client.connection.send("unsent")
    client.connection.abort()
    await closed(client, server)
    assert server.heard == ["end of stream"]


async def test_a_side_that_fails_on_a_message_closes_the_connection() -> None:
    """The exception goes to the loop's handler, and both sides hear of the end."""
    client, server = await pair()
    reports: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, report: reports.append(report))
    server.breaks_on = "bad"
    client.connection.send("bad")
    await closed(client, server)
    assert server.heard == ["this side failed on a message"]
    assert str(reports[0]["exception"]) == "broken"


async def test_a_peer_that_does_not_read_is_reported() -> None:
    """Unread inline bytes above the mark are noticed when more is sent."""
    full: list[object] = []
    client, server = await pair(high_water_bytes=10, on_full=full.append)
    client.connection.pause_reading()
    server.connection.send("a", b"12345678")
    server.connection.flush()
    assert full == []
    server.connection.send("b", b"12345678")
    server.connection.flush()
    assert full == [server.connection]
    client.connection.resume_reading()
    server.connection.close()
    await closed(client, server)
    assert client.heard[-1] == "end of stream"


async def test_what_a_socket_could_not_carry_is_refused_where_it_is_sent() -> None:
    """The process topology refuses the same, and replicas behind the orchestrator could not take it."""
    end = End(is_checked=True)
    with pytest.raises(UnicodeEncodeError):
        end.connection.send("\ud800")
    with pytest.raises(FrameError):
        end.connection.send("a", bytes(2**27))


async def test_a_connection_made_between_two_servers_waits_for_the_next() -> None:
    """The listener outlives who serves; what a dead one had accepted is cut."""
    listener: Listener = LocalListener()
    early = End()
    listener.connect(early.connection)
    early.connection.send("hello")

    def serve_once() -> list[object]:
        async def serve() -> list[object]:
            end = End()
            listener.serve(lambda: end.connection)
            async with asyncio.timeout(WAIT_S):
                await end.news.wait()
            return end.heard

        heard = asyncio.run(serve())
        listener.hang_up()
        return heard

    assert await asyncio.to_thread(serve_once) == [(["hello"], b"")]
    await closed(early)
    late = End()
    listener.connect(late.connection)
    late.connection.send("again")
    assert await asyncio.to_thread(serve_once) == [(["again"], b"")]
    await closed(late)


async def test_a_closed_listener_refuses_who_waits_and_who_comes() -> None:
    """The first hear the end of the stream, the others an error as from a socket."""
    listener: Listener = LocalListener()
    waiting = End()
    listener.connect(waiting.connection)
    listener.close()
    listener.close()
    await closed(waiting)
    with pytest.raises(ConnectionRefusedError):
        listener.connect(End().connection)


@pytest.mark.slow
async def test_messages_cross_between_threads_in_order() -> None:
    """Both directions at once, each on the loop of its own thread."""
    listener: Listener = LocalListener()
    total = 2_000
    server_heard: list[str] = []

    def serve() -> None:
        async def run() -> None:
            done = asyncio.Event()

            def on_frame(connection: ChannelEnd, messages: list[str], body: memoryview) -> None:
                server_heard.extend(messages)
                for message in messages:
                    connection.send(message)
                if len(server_heard) == total:
                    done.set()

            def on_closed(connection: ChannelEnd, reason: str) -> None:
                pass

            connection: LocalConnection[str] = LocalConnection(on_frame, on_closed)
            listener.serve(lambda: connection)
            async with asyncio.timeout(WAIT_S):
                await done.wait()
            connection.close()

        asyncio.run(run())

    thread = threading.Thread(target=serve)
    thread.start()
    client = End()
    listener.connect(client.connection)
    for number in range(total):
        client.connection.send(str(number))
        if number % 50 == 0:
            client.connection.flush()
    await closed(client)
    thread.join(WAIT_S)
    expected = [str(number) for number in range(total)]
    assert server_heard == expected
    assert client.messages == expected


async def test_one_who_was_left_behind_cuts_and_steals_nothing() -> None:
    """Its successor was named: what it does after that concerns nobody."""
    listener: Listener = LocalListener()
    servers = [End(), End()]
    first = listener.new_life()
    listener.serve(lambda: servers[0].connection, first)
    second = listener.new_life()
    listener.serve(lambda: servers[1].connection, second)
    listener.hang_up(first)
    listener.serve(lambda: servers[0].connection, first)
    client = End()
    listener.connect(client.connection)
    listener.hang_up(first)
    client.connection.send("hello")
    async with asyncio.timeout(WAIT_S):
        while not servers[1].messages:
            servers[1].news.clear()
            await servers[1].news.wait()
    assert (servers[0].messages, servers[1].messages) == ([], ["hello"])
    assert client.connection.is_open
    listener.hang_up(second)
    async with asyncio.timeout(WAIT_S):
        await client.closed.wait()
    listener.close()
