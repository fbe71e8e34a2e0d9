"""The application on the real server, on a loopback socket, over a fake engine."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import httpx2
import pytest
import uvloop

from stretto.config.settings import ServerSettings
from stretto.server.app import create_app
from stretto.server.http import HttpServer
from stretto.server.in_flight import InFlight
from tests.support.fake_engine import FakeEngine
from tests.support.fake_orchestrator import WAIT_S, in_time

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable

    from stretto.core.graph import Limits

SETTINGS = ServerSettings(
    max_body_bytes=64 * 1024,
    max_input_chars=1000,
    first_chunk_timeout_s=WAIT_S,
    drain_timeout_s=WAIT_S,
)


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run on the loop that production runs on."""
    return {"uvloop": uvloop.new_event_loop}


@dataclass(frozen=True)
class Server:
    """A running server.

    Attributes:
        url: Where it listens.
        engine: What it serves.
        http: The server.
        in_flight: Its running requests.
        task: Runs it.
        writers: Connections made by hand; none outlives the server, also when a test fails.
    """

    url: str
    engine: FakeEngine
    http: HttpServer
    in_flight: InFlight
    task: asyncio.Task[None]
    writers: list[asyncio.StreamWriter] = field(default_factory=list[asyncio.StreamWriter])

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a connection."""
        host, _, port = self.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        self.writers.append(writer)
        return reader, writer

    async def stop(self) -> None:
        """End everything."""
        for writer in self.writers:
            writer.transport.abort()
        for job in self.engine.jobs:
            job.finish()
        self.http.stop()
        async with asyncio.timeout(2 * WAIT_S):
            await self.task


@contextlib.asynccontextmanager
async def running_server(
    settings: ServerSettings = SETTINGS, limits: Limits | None = None
) -> AsyncGenerator[Server]:
    """Run a server for as long as the block runs."""
    engine = FakeEngine()
    in_flight = InFlight()
    listener = socket.create_server(("127.0.0.1", 0))
    ready = asyncio.Event()
    app = create_app(engine, settings, limits=limits, in_flight=in_flight)
    http = HttpServer(
        app, in_flight, settings.drain_timeout_s, ready.set, settings.receive_timeout_s
    )
    host, port = listener.getsockname()
    task = asyncio.get_running_loop().create_task(http.serve([listener]))
    server = Server(f"http://{host}:{port}", engine, http, in_flight, task)
    try:
        await in_time(ready.wait())
        yield server
    finally:
        await server.stop()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    """A server with small limits."""
    async with running_server() as running:
        yield running


@pytest.fixture
async def client(server: Server) -> AsyncIterator[httpx2.AsyncClient]:
    """A client of the server."""
    # `verify` would load certificates, for which plain HTTP has no use, in 40 ms.
    async with httpx2.AsyncClient(base_url=server.url, timeout=WAIT_S, verify=False) as client:
        yield client
