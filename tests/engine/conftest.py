"""A channel between a client and a fake orchestrator, over real connections."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
import uvloop

from stretto.core.graph import Limits
from stretto.engine.channel import Address, Channel
from stretto.transport.local import LocalListener
from stretto.types import RunId
from tests.support.fake_orchestrator import FakeOrchestrator, FakePeer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

RUN = RunId("run")
WINDOW = Limits(client_window_chunks=8, client_window_bytes=1024 * 1024)


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run on both loops: an application brings its own, our processes use uvloop."""
    if item.get_closest_marker("slow") is not None:
        return {"asyncio": asyncio.new_event_loop}
    return {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Where the orchestrator listens."""
    return str(tmp_path / "channel.sock")


@pytest.fixture
async def orchestrator(path: str) -> AsyncIterator[FakeOrchestrator]:
    """A fake orchestrator that accepts clients on a socket."""
    fake = FakeOrchestrator()
    await fake.start(path)
    yield fake
    await fake.stop()


@pytest.fixture(params=["process", "thread"])
async def pair(
    request: pytest.FixtureRequest, path: str
) -> AsyncIterator[tuple[Channel, FakePeer]]:
    """A connected channel and its other end, over each kind of connection."""
    fake = FakeOrchestrator()
    address: Address = path if request.param == "process" else LocalListener()
    await fake.start(address)
    connecting = asyncio.ensure_future(
        Channel.connect(address, run=RUN, name="test", limits=WINDOW)
    )
    peer = await fake.accept()
    channel = await connecting
    yield channel, peer
    await channel.aclose()
    await fake.stop()
