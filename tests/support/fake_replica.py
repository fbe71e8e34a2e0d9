"""A launcher whose replicas live in the test's own loop and do what the test tells them.

The replicas speak the real link protocol over the real socket; only their backend is the test.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, TypeVar

import msgspec

from stretto.messages import PROTOCOL_VERSION, link
from stretto.transport.connection import Connection, connect_unix
from stretto.types import INLINE, CallClass, LaunchSpec, PayloadRef, ReplicaId, StageId, TaskKey

if TYPE_CHECKING:
    from collections.abc import Callable

MessageT = TypeVar("MessageT")

METHODS: dict[str, CallClass] = {"look": "control", "tidy": "exclusive"}
FACTS = link.StageFacts("function", "items", {}, (), "retry", 30.0)


class FakeReplica:
    """One replica under the test's control."""

    def __init__(self, spec: LaunchSpec) -> None:
        self.spec = spec
        self.replica = spec.replica
        self.received: list[link.Down] = []
        self.bodies: dict[tuple[TaskKey, int], bytes] = {}
        self.has_closed = False
        self.connection: Connection[link.Down] | None = None
        self._changed = asyncio.Event()

    async def connect(self) -> None:
        """Connect without a word."""
        decoder = msgspec.msgpack.Decoder(list[link.Down])
        path = self.spec.address.removeprefix("unix:")
        self.connection = await connect_unix(
            path, lambda: Connection(decoder, self._on_frame, self._on_closed)
        )

    def hello(self, nonce: str | None = None) -> None:
        """Say hello."""
        self.send(
            link.Hello(
                PROTOCOL_VERSION,
                self.spec.run,
                self.replica,
                self.spec.nonce if nonce is None else nonce,
                os.getpid(),
                "test",
            )
        )

    def ready(self, slots: int = 4) -> None:
        """Say that the backend is loaded."""
        self.send(link.Ready(slots, FACTS, METHODS))

    def produce(self, task: TaskKey, seq: int, data: bytes = b"data", length: int = 1) -> None:
        """Send one chunk inline."""
        ref = PayloadRef(INLINE, "", len(data))
        self.send(link.Produced(task, seq, ref, seq, length, "data", 0.0), data)

    def end(self, task: TaskKey) -> None:
        """Say that a task has finished."""
        self.send(link.Ended(task, "finished"))

    def send(self, message: link.Up, body: bytes | None = None) -> None:
        """Send any message."""
        assert self.connection is not None
        self.connection.send(message, body)

    def die(self) -> None:
        """Close the link as a dead process would."""
        assert self.connection is not None
        self.connection.abort()

    def of_kind(self, kind: type[MessageT]) -> list[MessageT]:
        """Return what was received of one kind."""
        return [message for message in self.received if isinstance(message, kind)]

    async def wait_for(self, kind: type[MessageT], count: int = 1) -> list[MessageT]:
        """Wait until so many messages of a kind were received."""
        async with asyncio.timeout(5):
            while len(found := self.of_kind(kind)) < count:
                self._changed.clear()
                await self._changed.wait()
        return found

    async def wait_closed(self) -> None:
        """Wait until the orchestrator has closed the link."""
        async with asyncio.timeout(5):
            while not self.has_closed:
                self._changed.clear()
                await self._changed.wait()

    def _on_frame(
        self, _: Connection[link.Down], messages: list[link.Down], body: memoryview
    ) -> None:
        offset = 0
        for message in messages:
            inline = link.inline_payload(message)
            size = 0 if inline is None else inline.size_bytes
            if isinstance(message, link.Feed):
                self.bodies[message.task, message.seq] = bytes(body[offset : offset + size])
            offset += size
        self.received += messages
        self._changed.set()

    def _on_closed(self, _: Connection[link.Down], reason: str) -> None:
        self.has_closed = True
        self._changed.set()


class FakeLauncher:
    """A `stretto.types.Launcher` whose replicas connect and, unless told not to, are ready at once."""

    def __init__(self, *, slots: int = 4, autoready: bool = True) -> None:
        self.slots = slots
        self.autoready = autoready
        self.replicas: dict[ReplicaId, FakeReplica] = {}
        self.stopped: list[ReplicaId] = []
        self.exits: dict[ReplicaId, Callable[[ReplicaId, str], None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    def start(self, spec: LaunchSpec, on_exit: Callable[[ReplicaId, str], None]) -> None:
        """Begin to connect one replica."""
        self.exits[spec.replica] = on_exit
        task = asyncio.get_running_loop().create_task(self._connect(FakeReplica(spec)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def stop(self, replica: ReplicaId) -> None:
        """Note that the process was to be killed."""
        self.stopped.append(replica)

    def exit(self, replica: ReplicaId, reason: str) -> None:
        """Report the end of a process."""
        self.exits[replica](replica, reason)

    async def close(self) -> None:
        """Wait for what was begun."""
        await asyncio.gather(*self._tasks)

    async def get(self, stage: str, slot: int = 0, incarnation: int = 1) -> FakeReplica:
        """Wait until a replica is connected and return it."""
        async with asyncio.timeout(5):
            while True:
                for found in self.replicas.values():
                    if found.replica == (StageId(stage), slot, incarnation):
                        return found
                self._changed.clear()
                await self._changed.wait()

    async def _connect(self, replica: FakeReplica) -> None:
        await replica.connect()
        if self.autoready:
            replica.hello()
            replica.ready(self.slots)
        self.replicas[replica.replica] = replica
        self._changed.set()
