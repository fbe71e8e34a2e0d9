"""Replica processes on this host."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Sequence

import msgspec

from stretto.launch.child import CLEAN_EXIT, ChildProcess
from stretto.launch.lines import LineWriter
from stretto.types import LaunchSpec, ReplicaId

REPLICA_COMMAND = (sys.executable, "-m", "stretto.replica")

OnExit = Callable[[ReplicaId, str], None]


class LocalLauncher:
    """Starts replicas by command line; implements `stretto.types.Launcher`.

    Each line that a replica writes appears on our error output behind `[stage/slot]`. When one dies
    unasked, its reason and its last lines follow in one block.
    """

    def __init__(
        self,
        *,
        command: Sequence[str] = REPLICA_COMMAND,
        write_line: Callable[[str], None] | None = None,
    ) -> None:
        """Prepare; nothing is started.

        Args:
            command: The replica program.
            write_line: Takes each line of output and never waits; error output by default.
        """
        self._command = command
        self._writer = LineWriter()
        self._write_line = write_line if write_line is not None else self._writer.write
        self._children: dict[ReplicaId, ChildProcess] = {}
        self._is_closed = False

    def start(self, spec: LaunchSpec, on_exit: OnExit) -> None:
        """Start one replica; `on_exit` is called once, when nothing of it is left."""
        loop = asyncio.get_running_loop()
        if self._is_closed:
            loop.call_soon(on_exit, spec.replica, "not started: the launcher is closed")
            return
        label = f"[{spec.replica.stage}/{spec.replica.slot}]"
        started_at = time.monotonic()

        def report(reason: str) -> None:
            child = self._children.pop(spec.replica)
            if not child.was_killed and reason != CLEAN_EXIT:
                self._write_death(label, reason, time.monotonic() - started_at, child.last_lines)
            on_exit(spec.replica, reason)

        try:
            self._children[spec.replica] = ChildProcess(
                # The last word is for people who look at a list of processes; the program ignores it.
                (*self._command, f"{spec.replica.stage}/{spec.replica.slot}"),
                msgspec.json.encode(spec),
                on_exit=report,
                on_line=lambda line: self._write_line(f"{label} {line}"),
                environment={"PYTHONUNBUFFERED": "1", **spec.environment},
            )
        except (OSError, ValueError) as error:
            loop.call_soon(on_exit, spec.replica, f"could not be started: {error}")

    def stop(self, replica: ReplicaId) -> None:
        """Kill the replica's whole process group at once. Unknown or ended replicas are ignored."""
        child = self._children.get(replica)
        if child is not None:
            child.kill()

    async def close(self) -> None:
        """Kill what still runs, wait for it, and release every descriptor. May be called twice."""
        self._is_closed = True
        children = list(self._children.values())
        for child in children:
            child.kill()
        for child in children:
            await child.wait()
        self._writer.close()

    def _write_death(self, label: str, reason: str, age_s: float, lines: Sequence[str]) -> None:
        """Show why a replica died; between the lines of others its last words are easily missed."""
        last = f"its last {len(lines)} lines:" if lines else "it had written nothing"
        self._write_line(f"{label} died {age_s:.1f} s after its start: {reason}; {last}")
        for line in lines:
            self._write_line(f"{label}   | {line}")
