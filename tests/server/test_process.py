"""A real API process under a fake orchestrator: start, speech, idleness, memory, signals, orphanhood."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import httpx2
import msgspec
import psutil
import pytest

from stretto.config.process_specs import ApiSpec
from stretto.config.settings import ServerSettings, Settings
from stretto.messages import channel as wire
from stretto.transport.listening import listen_unix
from stretto.types import ChannelId, RunId
from tests.server.test_speech import PIECES, SAMPLES, SPEECH
from tests.support.fake_orchestrator import SPEECH as PIPELINE
from tests.support.fake_orchestrator import FakeOrchestrator, FakePeer, wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

START_S = 20.0
IDLE_S = 2.0


@dataclass
class Api:
    """A running API process.

    Attributes:
        url: Where it listens.
        process: The process; its standard input is the parent's pipe.
        orchestrator: What it is connected to.
        listener: The channel socket.
        peer: The connection to it.
        log: Where its error output goes.
    """

    url: str
    process: subprocess.Popen[bytes]
    orchestrator: FakeOrchestrator
    listener: socket.socket
    peer: FakePeer
    log: Path

    async def exit_code(self) -> int:
        """Wait until the process has ended."""
        return await asyncio.to_thread(self.process.wait, 10)


async def wait_readable(fd: int) -> None:
    """Wait until a byte can be read."""
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()
    loop.add_reader(fd, readable.set_result, None)
    try:
        async with asyncio.timeout(START_S):
            await readable
    finally:
        loop.remove_reader(fd)


@contextlib.asynccontextmanager
async def running_api(folder: Path) -> AsyncGenerator[Api]:
    """Run an API process for as long as the block runs."""
    path = str(folder / "channel.sock")
    channel_listener = listen_unix(path)
    http_listener = socket.create_server(("127.0.0.1", 0))
    ready_read, ready_write = os.pipe()
    log = folder / "api.log"
    spec = ApiSpec(
        run=RunId("run"),
        channel_path=path,
        http_fd=http_listener.fileno(),
        ready_fd=ready_write,
        settings=Settings(stages=(), pipelines=(), server=ServerSettings(drain_timeout_s=5.0)),
    )
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: ASYNC220 - takes a millisecond, and no pipes to read
            [sys.executable, "-m", "stretto.cli.run_api"],
            stdin=subprocess.PIPE,
            stderr=output,
            pass_fds=[http_listener.fileno(), ready_write],
            start_new_session=True,
        )
    os.close(ready_write)
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(spec) + b"\n")
    process.stdin.flush()
    orchestrator = FakeOrchestrator()
    try:
        await orchestrator.start(channel_listener.dup())
        peer = await orchestrator.accept()
        await wait_readable(ready_read)
        host, port = http_listener.getsockname()
        yield Api(f"http://{host}:{port}", process, orchestrator, channel_listener, peer, log)
    finally:
        if process.poll() is None:
            process.kill()
        await asyncio.to_thread(process.wait)
        process.stdin.close()
        os.close(ready_read)
        http_listener.close()
        await orchestrator.stop()
        channel_listener.close()


def connected(api: Api) -> httpx2.AsyncClient:
    """Return a client of the process."""
    return httpx2.AsyncClient(base_url=api.url, timeout=START_S)


async def until_ready(client: httpx2.AsyncClient) -> None:
    """Ask until the server has heard of its stages."""
    await until_status(client, "/ready", 200)


async def until_status(client: httpx2.AsyncClient, path: str, status: int) -> None:
    """Ask until the answer has the status."""
    async with asyncio.timeout(START_S):
        while (await client.get(path)).status_code != status:
            pass


async def speak(api: Api, client: httpx2.AsyncClient) -> bytes:
    """Ask for speech and play the orchestrator's part."""
    asking = asyncio.ensure_future(
        client.post(SPEECH, json={"input": "Hello", "response_format": "pcm"})
    )
    number = (await api.peer.next(wire.Submit)).number
    for seq, piece in enumerate(PIECES):
        api.peer.output(number, seq, {"audio": piece})
    api.peer.output(number, len(PIECES))
    api.peer.finish(number)
    return (await asking).content


def context_switches(pid: int) -> int:
    """Return how often the threads of a process have gone to sleep."""
    total = 0
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        for line in status.read_text().splitlines():
            if line.startswith("voluntary_ctxt_switches:"):
                total += int(line.split()[1])
    return total


@pytest.mark.slow
async def test_an_api_process_from_its_start_to_its_end(tmp_path: Path) -> None:
    """It serves, sleeps when idle, stays small, joins the engine's next life, drains, and exits with 0."""
    async with running_api(tmp_path) as api:
        async with connected(api) as client:
            await until_ready(client)
            assert await speak(api, client) == SAMPLES
            process = psutil.Process(api.process.pid)
            assert process.memory_info().rss < 130 * 1024 * 1024
            assert not [area for area in process.memory_maps() if "numpy" in area.path]

            before = context_switches(api.process.pid)
            await asyncio.sleep(IDLE_S)  # what is measured is a span of time
            assert context_switches(api.process.pid) - before <= 2

            await api.orchestrator.stop()
            await until_status(client, "/health", 503)
            dead = await client.post(SPEECH, json={"input": "Hello"})
            assert (dead.status_code, dead.json()["error"]["code"]) == (503, "engine_dead")
            successor = FakeOrchestrator()
            await successor.start(api.listener.dup())
            api.peer = await successor.accept(welcome=False)
            api.peer.welcome(epoch=2, channel=ChannelId("2.1"), pipelines=(PIPELINE,))
            await until_ready(client)
            assert await speak(api, client) == SAMPLES

            asked = {"input": "Hello", "response_format": "pcm"}
            asking = asyncio.ensure_future(client.post(SPEECH, json=asked))
            number = (await api.peer.next(wire.Submit)).number
            api.process.send_signal(signal.SIGTERM)
            await until_status(client, "/ready", 503)
            api.peer.output(number, 0, {"audio": PIECES[0]})
            api.peer.output(number, 1)
            api.peer.finish(number)
            assert (await asking).content == PIECES[0]
        assert await api.exit_code() == 0
        await wait_until(api.peer.is_gone.is_set)
        await successor.stop()
    log = api.log.read_text()
    assert "Traceback" not in log
    assert "ERROR" not in log
    assert "POST /v1/audio/speech 200" in log


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
async def test_a_second_signal_ends_the_process_at_once(
    tmp_path: Path, number: int, code: int
) -> None:
    """The first one drains, the second one does not wait."""
    async with running_api(tmp_path) as api, connected(api) as client:
        await until_ready(client)
        asking = asyncio.ensure_future(client.post(SPEECH, json={"input": "Hello"}))
        await api.peer.next(wire.Submit)
        api.process.send_signal(signal.SIGTERM)
        await until_status(client, "/ready", 503)
        api.process.send_signal(number)
        assert await api.exit_code() == code
        with pytest.raises(httpx2.TransportError):
            await asking


@pytest.mark.slow
async def test_an_orphan_ends(tmp_path: Path) -> None:
    """When the parent's pipe closes, the process is gone."""
    async with running_api(tmp_path) as api:
        assert api.process.stdin is not None
        api.process.stdin.close()
        assert await api.exit_code() == -signal.SIGKILL
        await wait_until(api.peer.is_gone.is_set)
