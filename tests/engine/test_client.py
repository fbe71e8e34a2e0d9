"""A client that outlives its engine, on one listening socket as a supervisor holds it."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

import pytest

from stretto.engine.client import EngineClient, EngineState
from stretto.errors import EngineDead, StartFailed
from stretto.messages import channel as wire
from stretto.transport.listening import listen_unix
from stretto.types import ChannelId
from tests.engine.conftest import RUN
from tests.support.fake_orchestrator import (
    TALKER,
    VOCODER,
    WAIT_S,
    FakeOrchestrator,
    replica,
    wait_until,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from stretto.core.commands import ReplicaState


@pytest.fixture
async def client(path: str) -> AsyncIterator[EngineClient]:
    """A client that is not started yet."""
    client = EngineClient(path, run=RUN, name="test")
    yield client
    await client.aclose()


async def test_the_next_life_of_the_engine_is_joined_without_retries(
    path: str, client: EngineClient
) -> None:
    """Between two lives requests fail at once; the welcome of the next one ends that."""
    listener = listen_unix(path)
    client.start()
    with pytest.raises(EngineDead, match="not answered"):
        _ = client.channel
    assert client.state is EngineState.STARTING

    first = FakeOrchestrator()
    await first.start(listener.dup())
    peer = await first.accept()
    await wait_until(lambda: client.state is EngineState.ALIVE)
    stream = client.channel.submit(pipeline="speech", inputs={})
    await first.stop()
    with pytest.raises(EngineDead):
        await anext(stream)
    assert client.state is EngineState.LOST
    with pytest.raises(EngineDead, match="without notice"):
        _ = client.channel
    assert len(first.peers) <= 2

    second = FakeOrchestrator()
    await second.start(listener.dup())
    peer = await second.accept(welcome=False)
    peer.welcome(epoch=2, channel=ChannelId("2.1"))
    await wait_until(lambda: client.state is EngineState.ALIVE)
    assert client.channel.submit(pipeline="speech", inputs={}).request == "2.1-1"
    await second.stop()
    listener.close()


async def test_readiness_is_awaited_across_lives(path: str, client: EngineClient) -> None:
    """A life that dies before it is ready does not end the wait."""
    listener = listen_unix(path)
    client.start()
    waiting = asyncio.ensure_future(client.wait_ready())
    first = FakeOrchestrator()
    await first.start(listener.dup())
    peer = await first.accept(welcome=False)
    peer.welcome(replicas=())
    await wait_until(lambda: client.state is EngineState.ALIVE)
    await first.stop()
    second = FakeOrchestrator()
    await second.start(listener.dup())
    await second.accept()
    async with asyncio.timeout(WAIT_S):
        await waiting
    assert client.readiness.is_ready
    await second.stop()
    listener.close()


async def test_a_stage_that_does_not_start_is_told(
    path: str, orchestrator: FakeOrchestrator, client: EngineClient
) -> None:
    """The wait ends with the reason of the stage."""
    client.start()
    (await orchestrator.accept(welcome=False)).welcome(
        replicas=(replica(VOCODER, "parked", detail="no file"),)
    )
    with pytest.raises(StartFailed, match="no file"):
        await client.wait_ready()


async def test_an_engine_without_a_socket_is_gone_for_good(client: EngineClient) -> None:
    """A refused connection is not tried again; who waits is told."""
    client.start()
    with pytest.raises(EngineDead, match="No engine listens"):
        await client.wait_ready()
    assert client.state is EngineState.GONE


async def test_a_supervisor_that_closes_the_socket_ends_the_wait(
    path: str, client: EngineClient
) -> None:
    """A client in the backlog is refused when the listening socket goes, and gives up."""
    listener = listen_unix(path)
    client.start()
    waiting = asyncio.ensure_future(client.wait_ready())
    await asyncio.sleep(0)
    await asyncio.to_thread(listener.close)
    with pytest.raises(EngineDead):
        async with asyncio.timeout(WAIT_S):
            await waiting
    assert client.state is EngineState.GONE


async def test_an_engine_that_always_hangs_up_is_given_up(path: str, client: EngineClient) -> None:
    """Connections that end before the welcome are not repeated for ever."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    listener.setblocking(False)
    client.start()
    accepted = 0
    while client.state is not EngineState.GONE:
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            await asyncio.sleep(0)
            continue
        accepted += 1
        connection.close()
    assert accepted == 16
    listener.close()


async def test_subscribers_see_present_states_and_those_of_the_next_life(
    path: str, client: EngineClient
) -> None:
    """A callback is told what is there, what changes, and what a new life begins with."""
    listener = listen_unix(path)
    first = FakeOrchestrator()
    await first.start(listener.dup())
    client.start()
    peer = await first.accept()
    await wait_until(lambda: client.state is EngineState.ALIVE)
    seen: list[ReplicaState] = []
    stop = client.subscribe(seen.append)
    assert [state.state for state in seen] == ["ready", "ready"]
    peer.send(wire.ReplicaNotice(replica(TALKER, "dead")))
    await wait_until(lambda: len(seen) == 3)
    await first.stop()
    second = FakeOrchestrator()
    await second.start(listener.dup())
    await second.accept()
    await wait_until(lambda: len(seen) == 5)
    stop()
    stop()
    await second.stop()
    listener.close()


async def test_closing_while_connecting_leaves_nothing(path: str) -> None:
    """A client that waits in the backlog closes at once, twice if need be."""
    listener = listen_unix(path)
    client = EngineClient(path, run=RUN, name="test")
    client.start()
    client.start()
    await asyncio.sleep(0)
    async with asyncio.timeout(WAIT_S):
        await client.aclose()
        await client.aclose()
    assert client.state is EngineState.GONE
    listener.close()
