"""What the tests of this folder know about processes."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

WAIT_S = 10.0
"""Longest wait for something that must happen."""

IMPORTS = "import os, signal, subprocess, sys, time\n"
WATCH = "from stretto.transport.parent import exit_with_parent, read_spec_line\n"


def python(code: str) -> list[str]:
    """Return the command that runs some code in a fresh interpreter."""
    return [sys.executable, "-S", "-c", IMPORTS + dedent(code)]


def watching_python(code: str) -> list[str]:
    """Return the command that runs some code which uses `stretto.transport.parent`."""
    return [sys.executable, "-c", IMPORTS + WATCH + dedent(code)]


async def wait_gone(pid: int) -> None:
    """Wait until a process, ours or not, has ended; fail if it goes on."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    loop.add_reader(fd, lambda: ended.done() or ended.set_result(None))
    try:
        async with asyncio.timeout(WAIT_S):
            await ended
    finally:
        loop.remove_reader(fd)
        os.close(fd)


class Lines:
    """Collects lines and lets a test wait for the next one."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self._news: asyncio.Queue[str] = asyncio.Queue()

    def __call__(self, line: str) -> None:
        """Take a line."""
        self.seen.append(line)
        self._news.put_nowait(line)

    async def next(self) -> str:
        """Return the next line that was not returned yet."""
        async with asyncio.timeout(WAIT_S):
            return await self._news.get()

    async def next_with(self, accepts: Callable[[str], bool]) -> str:
        """Return the next line that is accepted."""
        while not accepts(line := await self.next()):
            pass
        return line


def has_children() -> bool:
    """Say whether this process has children, running or not yet reaped."""
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return False
    return True


def open_descriptors() -> Counter[str]:
    """Return how many descriptors of each kind this process has open.

    Not counted are those on `/dev/null`, of which uvloop keeps one from its first stream on.
    """
    fds = Path("/proc/self/fd").iterdir()
    links = [str(fd.readlink()) for fd in fds if fd.is_symlink()]
    return Counter(
        link.partition("[")[0]
        for link in links
        if link not in (os.devnull, f"/proc/{os.getpid()}/fd")
    )
