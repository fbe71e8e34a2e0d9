"""What a test may not leave behind: processes, descriptors, threads, tasks and shared memory."""

from __future__ import annotations

import asyncio
import fcntl
import os
import threading
from dataclasses import dataclass
from pathlib import Path

import psutil

MARK = "LEAK_CHECK_MARK"
"""Set while a check runs: every process started meanwhile carries it, also one that lost its parent."""

SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """What this test process and its descendants hold at one moment, each as a line of text."""

    processes: frozenset[str]
    descriptors: frozenset[str]
    threads: frozenset[str]
    tasks: frozenset[str]
    shared_memory: frozenset[str]

    @classmethod
    def now(cls, mark: str) -> Holdings:
        """Look at everything; `mark` is the value of `MARK` in the processes concerned."""
        return cls(
            processes=frozenset(_processes(mark)),
            descriptors=frozenset(_descriptors()),
            threads=frozenset(_threads()),
            tasks=frozenset(_tasks()),
            shared_memory=frozenset(_ownerless_shared_memory()),
        )

    def beyond(self, before: Holdings) -> list[str]:
        """Return what is here and was not there before, sorted by kind."""
        return [
            *sorted(self.processes - before.processes),
            *sorted(self.descriptors - before.descriptors),
            *sorted(self.threads - before.threads),
            *sorted(self.tasks - before.tasks),
            *sorted(self.shared_memory - before.shared_memory),
        ]


def _processes(mark: str) -> list[str]:
    """Name children, dead ones nobody waited for included, and orphans that carry the mark."""
    children = {process.pid for process in psutil.Process().children(recursive=True)}
    found: list[str] = []
    for process in psutil.process_iter():
        try:
            if process.pid in children or _carries(process, mark):
                found.append(f"process {process.pid} ({process.status()}): {_command(process)}")
        except psutil.NoSuchProcess:
            continue
    return found


def _carries(process: psutil.Process, mark: str) -> bool:
    if process.pid == os.getpid():
        return False
    try:
        return process.environ().get(MARK) == mark
    except (psutil.AccessDenied, psutil.ZombieProcess):
        return False


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.ZombieProcess:
        return process.name()


def _descriptors() -> list[str]:
    found: list[str] = []
    for number in os.listdir("/proc/self/fd"):  # noqa: PTH208 - a Path would be made for each
        try:
            found.append(f"descriptor {number}: {os.readlink(f'/proc/self/fd/{number}')}")  # noqa: PTH115
        except FileNotFoundError:
            continue  # the listing's own descriptor
    return found


def _threads() -> list[str]:
    """Name the threads, except those of a loop's default executor, which end with the loop."""
    return [
        f"thread {thread.name}"
        for thread in threading.enumerate()
        if not thread.name.startswith("asyncio_")
    ]


def _tasks() -> list[str]:
    current = asyncio.current_task()
    return [f"task {task!r}" for task in asyncio.all_tasks() if task is not current]


def _ownerless_shared_memory() -> list[str]:
    """Name entries that nobody owns any more; those of servers that run beside the tests are locked."""
    return [
        f"shared memory {path}" for path in SHARED_MEMORY.glob("stretto-*") if not _is_owned(path)
    ]


def _is_owned(path: Path) -> bool:
    try:
        with (path / "owner").open("rb") as owner:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
