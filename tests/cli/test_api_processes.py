"""API processes are replaced when they die, but not while the server stops."""

from __future__ import annotations

import asyncio
import socket
import sys
from typing import TYPE_CHECKING

from stretto.cli.api_processes import ApiProcesses
from stretto.config.settings import Settings
from stretto.types import RunId

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

DIES = "import sys; open(sys.argv[1], 'a').write('started\\n'); sys.exit(9)"


class Said:
    """What was told, and when something new is."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.news = asyncio.Event()

    def __call__(self, line: str) -> None:
        """Take a line."""
        self.lines.append(line)
        self.news.set()

    async def until(self, condition: Callable[[list[str]], bool]) -> None:
        """Wait until what was told is as it shall be."""
        async with asyncio.timeout(20):
            while not condition(self.lines):
                self.news.clear()
                await self.news.wait()


async def test_no_successor_is_started_while_the_server_stops(tmp_path: Path) -> None:
    """One that has just died has a successor due; stopping cancels that."""
    starts = tmp_path / "starts"
    said = Said()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        command = (sys.executable, "-c", DIES, str(starts))
        api = ApiProcesses(
            [listener], Settings(stages=(), pipelines=()), said, said.news.set, command
        )
        api.start(RunId("run"), str(tmp_path / "channel.sock"))
        await said.until(lambda lines: len(lines) == 1)
        assert said.lines == ["the API process has ended: exit code 9"]
        await api.stop(0.0)
        later = asyncio.Event()
        asyncio.get_running_loop().call_later(0.3, later.set)  # its successor was due after 0.1 s
        await later.wait()
        assert starts.read_text() == "started\n"
        api.kill()


async def test_one_that_keeps_dying_is_given_up_once(tmp_path: Path) -> None:
    """The operator is told each death, and the end."""
    said, given_up = Said(), list[bool]()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        command = (sys.executable, "-c", DIES, str(tmp_path / "starts"))
        settings = Settings(stages=(), pipelines=())
        api = ApiProcesses([listener], settings, said, lambda: given_up.append(True), command)
        api.start(RunId("run"), str(tmp_path / "channel.sock"))
        await said.until(lambda lines: lines[-1:] == ["the API process kept ending; giving up"])
        assert given_up == [True]
        api.kill()
