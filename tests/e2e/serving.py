"""Starts a real `stretto serve` and looks at its processes from outside."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

START_TIMEOUT_S = 60.0
READY = re.compile(r"URL\s+(http://\S+)/v1")


class Server:
    """A running server process with its log."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self.url = ""
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def base_url(self) -> str:
        """Return what the `openai` client calls `base_url`."""
        return f"{self.url}/v1"

    @property
    def log(self) -> str:
        """Return everything the server has written."""
        return "\n".join(self.lines)

    def wait_line(
        self, pattern: str, timeout_s: float = START_TIMEOUT_S, after: int = 0
    ) -> re.Match[str]:
        """Wait for a line that matches; fail with the log if it does not come.

        Args:
            pattern: A regular expression.
            timeout_s: How long to wait.
            after: How many lines at the beginning do not count.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                for line in self.lines[after:]:
                    if found := re.search(pattern, line):
                        return found
                left = deadline - time.monotonic()
                if left <= 0 or (self.process.poll() is not None and not self._reader.is_alive()):
                    raise AssertionError(f"no line matched {pattern!r} in:\n{self.log}")
                self._changed.wait(min(left, 0.5))

    def processes(self, name: str) -> list[psutil.Process]:
        """Return the processes by a word of their command line: `run_api`, `talker/0`."""
        found: list[psutil.Process] = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if any(name in word for word in child.cmdline()):
                    found.append(child)
            except psutil.NoSuchProcess:
                continue
        return found

    def tree(self) -> list[psutil.Process]:
        """Return the server's process and all its descendants."""
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]

    def run_directories(self) -> list[Path]:
        """Return the directories that the supervisor owns: it holds a lock in each."""
        descriptors = Path(f"/proc/{self.process.pid}/fd")
        files = [fd.readlink() for fd in descriptors.iterdir()]
        return sorted(file.parent for file in files if file.parent.name.startswith("stretto-"))

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 20.0) -> int:
        """Send a signal and return the exit code."""
        self.process.send_signal(number)
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
        with self._changed:
            self._changed.notify_all()


def launch(
    *arguments: str, cwd: Path | None = None, environment: dict[str, str] | None = None
) -> Server:
    """Start `stretto serve` on a free port; do not wait."""
    process = subprocess.Popen(
        [sys.executable, "-m", "stretto", "serve", "--port", "0", *arguments],
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        text=True,
        cwd=cwd,
        env={**os.environ, **(environment or {})},
    )
    return Server(process)


@contextmanager
def serving(
    *arguments: str, cwd: Path | None = None, environment: dict[str, str] | None = None
) -> Generator[Server]:
    """Run a server until the block ends; nothing of it may be left behind."""
    server = launch(*arguments, cwd=cwd, environment=environment)
    tree: list[psutil.Process] = []
    directories: list[Path] = []
    try:
        server.url = server.wait_line(READY.pattern).group(1)
        tree = server.tree()
        directories = server.run_directories()
        assert len(directories) == 2, "one for sockets, one for payloads"
        yield server
        if server.process.poll() is None:
            tree = server.tree()
            assert server.stop() == 0, server.log
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait(10)
    left = psutil.wait_procs(tree, timeout=5)[1]
    assert not left, f"left behind: {left}"
    assert not [path for path in directories if path.exists()]


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Wait for a fact about another process, which nothing here can be notified of."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        threading.Event().wait(0.01)
