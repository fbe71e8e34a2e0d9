"""Starts real `stretto replica join` processes, and engines that they may join."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator, Sequence

    from stretto.config.settings import Settings

TOKEN = "a token for tests only"  # noqa: S105 - it is one
VARIABLE = "STRETTO_ORCHESTRATOR__JOIN_TOKEN"


def joinable(settings: Settings) -> Settings:
    """Return settings with a door on a free port of this host."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    orchestrator = msgspec.structs.replace(
        settings.orchestrator, join_address=address, join_token=TOKEN
    )
    return msgspec.structs.replace(settings, orchestrator=orchestrator)


class Joined:
    """A process that joins, with what it writes."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_line(self, text: str, count: int = 1, timeout_s: float = 20.0) -> None:
        """Wait until so many of its lines have had this text."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while sum(text in line for line in self.lines) < count:
                left = deadline - time.monotonic()
                assert left > 0, f"{text!r} did not come {count} times in:\n" + "\n".join(
                    self.lines
                )
                self._changed.wait(left)

    def stop(self, number: int, timeout_s: float = 10.0) -> int:
        """Send a signal and return the exit code."""
        self.process.send_signal(number)
        return self.ended(timeout_s)

    def ended(self, timeout_s: float = 10.0) -> int:
        """Wait for its end and return the exit code."""
        code = self.process.wait(timeout_s)
        self._reader.join(5)
        return code

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stream:
            for line in stream:
                with self._changed:
                    self.lines.append(line.rstrip("\n"))
                    self._changed.notify_all()


@contextlib.contextmanager
def joining(
    address: object,
    stage: str,
    *arguments: str,
    token: str = TOKEN,
    inside: Sequence[str] = (),
) -> Generator[Joined]:
    """Run a process that joins a stage until the block ends.

    Args:
        address: Where.
        stage: Which stage.
        arguments: Further arguments of the verb.
        token: What it knows.
        inside: A command that runs it, for example in a network namespace.
    """
    verb = [sys.executable, "-m", "stretto", "replica", "join", "--stage", stage]
    joined = Joined([*inside, *verb, "--connect", str(address), *arguments], {VARIABLE: token})
    try:
        yield joined
    finally:
        if joined.process.poll() is None:
            joined.process.kill()
        joined.ended()


class Proxy:
    """A TCP relay between a joiner and its server whose connections a test can cut."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.address = ""

    async def open(self, port: int = 0) -> None:
        """Accept connections."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", port)
        host, port = self._server.sockets[0].getsockname()[:2]
        self.address = f"{host}:{port}"

    def cut(self) -> None:
        """End every connection, and accept none."""
        if self._server is not None:
            self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def restore(self) -> None:
        """Accept connections again, at the same address."""
        await self.open(int(self.address.rpartition(":")[2]))

    async def aclose(self) -> None:
        """Cut everything and wait for what ran."""
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self._target.rpartition(":")
        there, back = await asyncio.open_connection(host, int(port))
        self._writers += [writer, back]
        for source, sink in ((reader, back), (there, writer)):
            task = asyncio.create_task(self._pump(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                sink.write(data)
                await sink.drain()
        sink.close()


@contextlib.asynccontextmanager
async def proxy_to(target: object) -> AsyncGenerator[Proxy]:
    """Run a relay until the block ends."""
    proxy = Proxy(str(target))
    await proxy.open()
    try:
        yield proxy
    finally:
        await proxy.aclose()
