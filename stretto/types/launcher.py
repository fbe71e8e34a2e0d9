"""What the orchestrator needs of whatever starts replica processes; implemented in `stretto.launch`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from stretto.types.ids import ReplicaId, RunId


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """Everything a replica process is told when it starts.

    Attributes:
        replica: The identity that the process will have.
        run: The run it belongs to.
        address: Where the orchestrator listens for replicas, `unix:<path>`.
        shared_memory_dir: The run's directory for payload files, or `None` to send all payloads inline.
        nonce: Random text that the process repeats in its hello, so that a stranger is recognised.
        backend: `module:Class`.
        options: Keyword arguments of the backend.
        runtime: Settings of the replica runtime (`max_batch`, `max_wait_ms`, `threads`, …).
        environment: Variables added to the process's environment.
    """

    replica: ReplicaId
    run: RunId
    address: str
    shared_memory_dir: str | None
    nonce: str
    backend: str
    options: Mapping[str, object]
    runtime: Mapping[str, object]
    environment: Mapping[str, str]


class Launcher(Protocol):
    """Starts and stops replica processes. Calls return at once; outcomes arrive by `on_exit`.

    An implementation reports each started process's end exactly once.
    """

    def start(self, spec: LaunchSpec, on_exit: Callable[[ReplicaId, str], None]) -> None:
        """Start one process; `on_exit(replica, reason)` is called once, on the loop, when it has ended.

        A process that can't be started at all is reported the same way, in a later turn of the loop.
        """
        ...

    def stop(self, replica: ReplicaId) -> None:
        """Kill the replica's whole process group at once. Unknown or ended replicas are ignored."""
        ...

    async def close(self) -> None:
        """Kill what still runs, wait for it, and release every descriptor. May be called twice."""
        ...
