"""Leaving in order: drain, abort what takes too long, close, and nothing in the log."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import httpx2
import pytest

from stretto.config.settings import ServerSettings
from tests.server.conftest import Server, running_server
from tests.server.test_speech import PIECES, SAMPLES, SPEECH, raw_request, stop_reading
from tests.support.fake_orchestrator import WAIT_S, in_time, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def no_errors(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No shutdown logs an error or a traceback."""
    yield
    assert not [r for r in caplog.records if r.levelname in ("ERROR", "CRITICAL") or r.exc_info]


async def finished(server: Server) -> None:
    """Wait until the server has ended."""
    async with asyncio.timeout(WAIT_S):
        await asyncio.shield(server.task)


async def test_an_idle_server_stops_at_once() -> None:
    """Idle connections are closed, and nothing is waited for."""
    async with running_server() as server:
        reader, _ = await server.connect()
        await wait_until(lambda: len(server.http.server_state.connections) == 1)
        server.http.stop()
        server.http.stop()
        await finished(server)
        assert await in_time(reader.read()) == b""


async def test_situation_A13_running_streams_end_well_while_new_work_is_refused(
    server: Server, client: httpx2.AsyncClient
) -> None:
    """While draining the socket still listens: probes answer, new work gets 503, and the stream completes."""
    reader, _ = await raw_request(server, b'{"input":"Hello","response_format":"pcm"}')
    job = await server.engine.next_job()
    job.audio(PIECES[0])
    await in_time(reader.readuntil(PIECES[0]))
    server.http.stop()
    await wait_until(lambda: server.in_flight.is_draining)

    assert (await client.get("/health")).status_code == 200
    ready = await client.get("/ready")
    assert (ready.status_code, ready.json()["status"]) == (503, "shutting_down")
    refused = await client.post(SPEECH, json={"input": "Hello"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_shutting_down")
    assert refused.headers["connection"] == "close"
    assert refused.headers["retry-after"] == "2"
    assert not server.task.done()

    job.audio(*PIECES[1:]).finish()
    async with asyncio.timeout(WAIT_S):
        rest = await reader.read()
    assert rest.endswith(b"0\r\n\r\n")
    assert rest.count(PIECES[2]) >= 1
    await finished(server)


async def test_situation_A10_what_outlives_the_drain_time_is_aborted() -> None:
    """A started stream is cut visibly, a waiting request gets 503, and the server ends."""
    async with running_server(ServerSettings(drain_timeout_s=0.1)) as server:
        reader, _ = await raw_request(server, b'{"input":"Hello","response_format":"pcm"}')
        job = await server.engine.next_job()
        job.audio(PIECES[0])
        await in_time(reader.readuntil(PIECES[0]))
        waiting_reader, _ = await raw_request(server, b'{"input":"Hello"}')
        waiting = await server.engine.next_job()
        server.http.stop()
        async with asyncio.timeout(WAIT_S):
            assert not (await reader.read()).endswith(b"0\r\n\r\n")
            assert (await waiting_reader.read()).startswith(b"HTTP/1.1 503")
            await job.is_aborted.wait()
            await waiting.is_aborted.wait()
        await finished(server)


async def test_clients_that_take_nothing_do_not_hold_up_the_end() -> None:
    """A connection that does not read, and one in the middle of its request, are cut."""
    async with running_server(ServerSettings(drain_timeout_s=0.1)) as server:
        _, stalled = await raw_request(server, b'{"input":"Hello","response_format":"pcm"}')
        stop_reading(stalled)
        (await server.engine.next_job()).audio(*[bytes(1024 * 1024)] * 16)
        _, half = await server.connect()
        half.write(f"POST {SPEECH} HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{{".encode())
        await wait_until(lambda: len(server.http.server_state.tasks) == 2)
        server.http.stop()
        await finished(server)
        assert not server.http.server_state.tasks


async def test_thirty_two_streams_survive_the_signal(server: Server) -> None:
    """All streams that run when the stop comes end with every byte."""
    async with httpx2.AsyncClient(
        base_url=server.url, timeout=WAIT_S, limits=httpx2.Limits(max_connections=None)
    ) as client:
        body = {"input": "Hello", "response_format": "pcm"}
        calls = [asyncio.ensure_future(client.post(SPEECH, json=body)) for _ in range(32)]
        await wait_until(lambda: len(server.engine.jobs) == 32)
        for job in server.engine.jobs:
            job.audio(PIECES[0])
        server.http.stop()
        for job in server.engine.jobs:
            job.audio(*PIECES[1:]).finish()
        replies = await asyncio.gather(*calls)
    assert [reply.content for reply in replies] == [SAMPLES] * 32
    await finished(server)
