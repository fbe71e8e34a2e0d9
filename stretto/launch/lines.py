"""Lines of output: cut out of a child's byte stream, and written to a terminal that may be slow."""

from __future__ import annotations

import os
import queue
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_LINE_BYTES: Final = 8192
_MAX_WAITING_LINES: Final = 2000
_STDERR: Final = 2


class LineSplitter:
    """Cuts a byte stream into lines; those over `MAX_LINE_BYTES` arrive in pieces."""

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self._on_line = on_line
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """Take the stream's next bytes; complete lines are delivered at once."""
        *lines, rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._deliver(line)
        whole = len(rest) - len(rest) % MAX_LINE_BYTES
        if whole:
            self._deliver(rest[:whole])
        self._rest = rest[whole:]

    def close(self) -> None:
        """Deliver what came after the last newline."""
        if self._rest:
            self._deliver(self._rest)
            self._rest = b""

    def _deliver(self, line: bytes) -> None:
        for start in range(0, len(line) or 1, MAX_LINE_BYTES):
            piece = line[start : start + MAX_LINE_BYTES].rstrip(b"\r")
            shown = piece.rpartition(b"\r")[2]  # a terminal shows what was written over the rest
            self._on_line(shown.decode(errors="backslashreplace"))


class LineWriter:
    """Writes lines to a descriptor from a thread of its own: a stopped terminal stops no loop.

    A bounded number of lines waits; more are dropped and counted. The first line starts the thread.
    """

    def __init__(self, fd: int = _STDERR) -> None:
        self._fd = fd
        self._waiting: queue.Queue[str | None] = queue.Queue(_MAX_WAITING_LINES)
        self._dropped = 0
        self._is_closing = False
        self._thread: threading.Thread | None = None

    @property
    def is_behind(self) -> bool:
        """Say whether lines are waiting to be written."""
        return not self._waiting.empty()

    def write(self, line: str) -> None:
        """Hand over one line, without its newline; never waits."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="stretto-lines", daemon=True)
            self._thread.start()
        try:
            if self._dropped:
                self._waiting.put_nowait(
                    f"({self._dropped} lines dropped: the terminal is too slow)"
                )
                self._dropped = 0
            self._waiting.put_nowait(line)
        except queue.Full:
            self._dropped += 1

    def close(self, timeout_s: float = 1.0) -> None:
        """Write what waits, for at most `timeout_s` seconds."""
        if self._thread is None:
            return
        self._is_closing = True
        with suppress(queue.Full):  # a busy thread sees `_is_closing` after its last line
            self._waiting.put_nowait(None)
        self._thread.join(timeout_s)
        self._thread = None

    def _run(self) -> None:
        can_write = True
        while not (self._is_closing and self._waiting.empty()):
            line = self._waiting.get()
            if line is not None and can_write:
                can_write = self._write_out(f"{line}\n".encode(errors="backslashreplace"))

    def _write_out(self, data: bytes) -> bool:
        """Write all of it; say whether the descriptor still has a reader."""
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError:
            return False
        return True
