"""The orchestrator's end of one link, and the two ways to put a replica at the other end."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from stretto.core.commands import UNLIMITED
from stretto.core.graph import EdgeSpec
from stretto.messages import PROTOCOL_VERSION, link
from stretto.replica.runtime import Replica
from stretto.transport import Connection, PayloadReader, PayloadWriter, decode, encode, serve_unix
from stretto.types import (
    INLINE,
    EdgeId,
    IncarnationNumber,
    InputName,
    LaunchSpec,
    Payload,
    PayloadRef,
    PipelineName,
    ReplicaId,
    RequestId,
    RunId,
    StageId,
    TaskKey,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator, Mapping

BOUND_S = 8.0
STAGE = StageId("stage")
REPLICA = ReplicaId(STAGE, 0, IncarnationNumber(1))
RUN = RunId("run")
T = TypeVar("T")
DECODER = msgspec.msgpack.Decoder(list[link.Up])


def edge(name: str = "text", adapter: str | None = None) -> EdgeSpec:
    """Return an edge from a request's input to the stage."""
    return EdgeSpec(target=STAGE, name=name, request_input=InputName(name), adapter=adapter)


TEXT = edge()


def task_key(name: str = "a") -> TaskKey:
    """Return the key of a request's task."""
    return TaskKey(RequestId(name), STAGE, 0)


class Rig:
    """Sends what a test says, and keeps what the replica answers.

    Attributes:
        frames: All frames received, each a list of messages.
        closed: The link has ended.
    """

    def __init__(self, directory: Path, shared_memory_dir: Path | None) -> None:
        self.path = str(directory / "replicas.sock")
        self.shared_memory_dir = None if shared_memory_dir is None else str(shared_memory_dir)
        self.frames: list[list[link.Up]] = []
        self.closed = False
        self.bodies: dict[int, bytes] = {}
        self._writer = PayloadWriter(self.shared_memory_dir, "rig", 1 << 30)
        self._news = asyncio.Event()
        self._connection: Connection[link.Up] | None = None
        self._seq: dict[tuple[TaskKey, EdgeId], int] = {}

    def accept(self) -> Connection[link.Up]:
        """Return the protocol for the replica's connection."""
        self._connection = Connection(DECODER, self._on_frame, self._on_closed)
        return self._connection

    @property
    def messages(self) -> list[link.Up]:
        """Return all messages received."""
        return [message for frame in self.frames for message in frame]

    def of(self, kind: type[T], task: TaskKey | None = None) -> list[T]:
        """Return the messages of one kind, of one task if it is named."""
        return [
            message
            for message in self.messages
            if isinstance(message, kind) and task in (None, getattr(message, "task", None))
        ]

    def values(self, message: link.Produced) -> Payload:
        """Return a chunk's values."""
        if message.payload.place == INLINE:
            return decode(self.bodies[id(message)])
        assert self.shared_memory_dir is not None
        return decode(PayloadReader(self.shared_memory_dir).open(message.payload).view)

    def chunks(self, task: TaskKey) -> list[Payload]:
        """Return the values of a task's chunks so far."""
        return [self.values(message) for message in self.of(link.Produced, task)]

    def audio(self, task: TaskKey) -> bytes:
        """Return the audio of a task's chunks so far."""
        pieces = [values["audio"] for values in self.chunks(task)]
        return b"".join(piece for piece in pieces if isinstance(piece, bytes))

    def end(self, task: TaskKey) -> link.Ended | None:
        """Return how a task has ended; that must be the last that was heard of it, and only once."""
        about = [m for m in self.messages if getattr(m, "task", None) == task]
        ends = [m for m in about if isinstance(m, link.Ended)]
        assert len(ends) <= 1
        assert not ends or about[-1] is ends[0]
        return ends[0] if ends else None

    async def until(self, condition: Callable[[], T | None]) -> T:
        """Wait until a condition on what was received holds, and return its value."""
        async with asyncio.timeout(BOUND_S):
            while not (found := condition()):
                self._news.clear()
                await self._news.wait()
        return found

    async def ended(self, task: TaskKey) -> link.Ended:
        """Wait for a task's end."""
        return await self.until(lambda: self.end(task))

    def send(self, message: link.Down, body: bytes | None = None) -> None:
        """Send a message; those of one turn travel in one frame."""
        assert self._connection is not None
        self._connection.send(message, body)

    def hang_up(self) -> None:
        """End the link, if there is one."""
        if self._connection is not None:
            self._connection.abort()

    def open(
        self,
        task: TaskKey,
        *edges: EdgeSpec,
        options: Mapping[str, str | int | float] | None = None,
        chunks: int = UNLIMITED,
        nbytes: int = UNLIMITED,
        skip_units: int = 0,
    ) -> None:
        """Open a task."""
        payload, body = None, None
        if options is not None:
            payload, body = self._writer.put(encode(options))
        message = link.Open(
            task, PipelineName("test"), edges or (TEXT,), payload, skip_units, chunks, nbytes
        )
        self.send(message, body)

    def feed(self, task: TaskKey, values: Payload, on: EdgeSpec = TEXT) -> PayloadRef:
        """Feed a task's next chunk on an edge."""
        payload, body = self._writer.put(encode(dict(values)))
        seq = self._seq.get((task, on.id), 0)
        self._seq[task, on.id] = seq + 1
        self.send(link.Feed(task, on.id, seq, payload), body)
        return payload

    def close_input(self, task: TaskKey, on: EdgeSpec = TEXT) -> None:
        """Say that an edge has ended."""
        self.send(link.CloseInput(task, on.id))

    def run_task(self, task: TaskKey, text: str, script: str | None = None) -> None:
        """Open a task with one text and nothing after it."""
        self.open(task, options=None if script is None else {"script": script})
        self.feed(task, {"text": text})
        self.close_input(task)

    def welcome(self) -> None:
        """Accept the replica's hello."""
        self.send(link.Welcome(PROTOCOL_VERSION, RUN))

    async def start(self) -> link.Ready:
        """See the replica from its hello to its readiness."""
        await self.until(lambda: self.of(link.Hello))
        self.welcome()
        return (await self.until(lambda: self.of(link.Ready)))[0]

    def _on_frame(self, _: Connection[link.Up], messages: list[link.Up], body: memoryview) -> None:
        at = 0
        for message in messages:
            if (payload := link.inline_payload(message)) is not None:
                self.bodies[id(message)] = bytes(body[at : at + payload.size_bytes])
                at += payload.size_bytes
        assert at == len(body)
        self.frames.append(messages)
        self._news.set()

    def _on_closed(self, _: Connection[link.Up], reason: str) -> None:
        del reason
        self.closed = True
        self._news.set()


def launch_spec(
    rig: Rig,
    backend: str = "scripted",
    options: Mapping[str, object] | None = None,
    **runtime: object,
) -> LaunchSpec:
    """Return what a replica at the other end of the rig is told."""
    return LaunchSpec(
        replica=REPLICA,
        run=RUN,
        address=f"unix:{rig.path}",
        shared_memory_dir=rig.shared_memory_dir,
        nonce="nonce",
        backend=backend,
        options=options or {},
        runtime=runtime,
        environment={},
    )


@contextlib.asynccontextmanager
async def listening(directory: Path, shared_memory_dir: Path | None = None) -> AsyncGenerator[Rig]:
    """Listen for one replica."""
    rig = Rig(directory, shared_memory_dir)
    server = await serve_unix(rig.path, rig.accept)
    try:
        yield rig
    finally:
        server.close()
        rig.hang_up()


@contextlib.asynccontextmanager
async def replica_here(
    rig: Rig, backend: str, options: Mapping[str, object] | None = None, **runtime: object
) -> AsyncGenerator[asyncio.Task[int]]:
    """Run a replica on this loop, from its hello to its readiness and on; the task has its exit code."""
    living = asyncio.create_task(Replica(launch_spec(rig, backend, options, **runtime)).live())
    try:
        await rig.start()
        yield living
    finally:
        rig.hang_up()
        async with asyncio.timeout(BOUND_S):
            await living


@contextlib.asynccontextmanager
async def replica_process(
    rig: Rig,
    backend: str = "scripted",
    options: Mapping[str, object] | None = None,
    **runtime: object,
) -> AsyncGenerator[asyncio.subprocess.Process]:
    """Run a replica as its launcher does: its own session, the specification on standard input."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "stretto.replica",
        stdin=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        start_new_session=True,
    )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(launch_spec(rig, backend, options, **runtime)) + b"\n")
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.stdin.close()
        await process.wait()


def numbered(count: int) -> Iterator[TaskKey]:
    """Return the keys of so many tasks."""
    return (task_key(f"r{number}") for number in range(count))
