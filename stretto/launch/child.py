"""One child process, from its start to the moment when nothing of it is left.

A child leads a session and process group of its own. Its standard input is a pipe that carries one
line, the specification, and whose end tells the child that this process is gone
(`stretto.transport.parent`). The loop watches a pidfd and the output pipe, so nothing is polled and
no signal handler, thread or asyncio child watcher is involved.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, cast

from stretto.launch.lines import LineSplitter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import IO

LAST_LINES = 20
_READ_BYTES = 65536
_MAX_LAST_READS = 16
_SIGNAL_EXIT = 128

CLEAN_EXIT = "exit code 0"


class ChildProcess:
    """A running or ended child process.

    Attributes:
        pid: Its process id, which is also its group's.
    """

    def __init__(
        self,
        command: Sequence[str],
        spec: bytes,
        *,
        on_exit: Callable[[str], None],
        on_line: Callable[[str], None] | None = None,
        pass_fds: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start the process; needs a running loop.

        Args:
            command: The program and its arguments.
            spec: The line that the process reads first, without its newline.
            on_exit: Called once on the loop with the reason, after the last line of output.
            on_line: Called on the loop with each line of output. Without it the process writes to
                this process's own output and error output.
            pass_fds: Descriptors that it inherits under the same numbers; no others are inherited.
            environment: Variables added to this process's own.

        Raises:
            OSError: The program can't be started.
        """
        self._loop = asyncio.get_running_loop()
        self._on_exit = on_exit
        self._on_line = on_line
        self._splitter = LineSplitter(self._take_line)
        self._last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._ended: asyncio.Future[str] = self._loop.create_future()
        self._was_killed = False
        self._process = subprocess.Popen(  # noqa: S603 - the command is ours
            command,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if on_line is not None else None,
            stderr=subprocess.STDOUT if on_line is not None else None,
            pass_fds=pass_fds,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
        self.pid = self._process.pid
        self._stdin = cast("IO[bytes]", self._process.stdin)
        self._output = self._process.stdout
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except OSError:
            self._process.kill()
            self._process.wait()
            self._close_pipes()
            raise
        self._loop.add_reader(self._pidfd, self._end)
        if self._output is not None:
            os.set_blocking(self._output.fileno(), False)
            self._loop.add_reader(self._output.fileno(), self._read_output, self._output)
        os.set_blocking(self._stdin.fileno(), False)
        self._unsent = memoryview(spec + b"\n")
        self._send_spec()

    @property
    def last_lines(self) -> tuple[str, ...]:
        """Return the last lines of captured output, at most `LAST_LINES`."""
        return tuple(self._last_lines)

    @property
    def is_running(self) -> bool:
        """Say whether `on_exit` is still to be called."""
        return not self._ended.done()

    @property
    def was_killed(self) -> bool:
        """Say whether `kill` was called while it ran."""
        return self._was_killed

    def terminate(self) -> None:
        """Ask the process to end, with `SIGTERM`; what it started is its own to end."""
        if self.is_running:
            signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)

    def kill(self) -> None:
        """Kill the whole process group. An ended process is left alone."""
        if self.is_running:
            self._was_killed = True
            self._kill_group()

    async def wait(self) -> str:
        """Wait until the process has ended and `on_exit` was called; return the reason."""
        return await asyncio.shield(self._ended)

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def _send_spec(self) -> None:
        """Write what the pipe takes; the rest follows when the child has read."""
        stdin = self._stdin.fileno()
        try:
            self._unsent = self._unsent[os.write(stdin, self._unsent) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:  # it has ended, or never reads; its end is noticed elsewhere
            self._unsent = self._unsent[:0]
        if self._unsent:
            self._loop.add_writer(stdin, self._send_spec)
        else:
            self._loop.remove_writer(stdin)

    def _read_output(self, output: IO[bytes]) -> bool:
        """Read once from the output pipe; say whether it may hold more."""
        try:
            data = os.read(output.fileno(), _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._loop.remove_reader(output.fileno())
            return False
        self._splitter.feed(data)
        return True

    def _take_line(self, line: str) -> None:
        self._last_lines.append(line)
        if self._on_line is not None:
            self._on_line(line)

    def _end(self) -> None:
        """Reap the process once it has ended.

        The group is killed first: until it is reaped, the process's id, and so the group's, can't
        belong to anybody else. Then the output pipe holds all that the group ever wrote; a process
        that left the group may still hold the pipe, so reading ends when it is empty.
        """
        self._loop.remove_reader(self._pidfd)
        self._kill_group()
        code = self._process.wait()
        if self._output is not None:
            for _ in range(_MAX_LAST_READS):
                if not self._read_output(self._output):
                    break
        self._splitter.close()
        self._close_pipes()
        os.close(self._pidfd)
        is_ours = self._was_killed and code == -signal.SIGKILL
        reason = "killed on request" if is_ours else exit_reason(code)
        self._ended.set_result(reason)
        self._on_exit(reason)

    def _close_pipes(self) -> None:
        self._loop.remove_writer(self._stdin.fileno())
        self._stdin.close()
        if self._output is not None:
            self._loop.remove_reader(self._output.fileno())
            self._output.close()


def exit_reason(code: int) -> str:
    """Return a process's end in words.

    Args:
        code: The exit code, or minus the signal that killed it. A shell reports the latter as 128
            plus the signal, and so may a container's first process.
    """
    number = -code if code < 0 else code - _SIGNAL_EXIT
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"exit code {code}"
    hint = ": out of memory?" if number == signal.SIGKILL else ""
    if code < 0:
        return f"killed by {name} ({_SIGNAL_EXIT + number}){hint}"
    return f"exit code {code}, as after {name}{hint}"
