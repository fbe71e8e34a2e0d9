"""An orchestrator's end of the channel, played by a test: a real server on a real connection.

It speaks the messages of `stretto.messages.channel` and decides nothing; the test says what it sends.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

import msgspec

from stretto.core.commands import ReplicaState, StageTiming, Timings
from stretto.messages import PROTOCOL_VERSION
from stretto.messages import channel as wire
from stretto.messages.link import StageFacts
from stretto.transport import codec
from stretto.transport.connection import Connection, serve_unix
from stretto.transport.local import ChannelEnd, LocalConnection, LocalListener
from stretto.types import (
    INLINE,
    ChannelId,
    IncarnationNumber,
    InputName,
    OutputName,
    PayloadRef,
    PipelineName,
    ReplicaId,
    StageId,
)

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable, Mapping

    from stretto.errors import Failure

MessageT = TypeVar("MessageT")
ResultT = TypeVar("ResultT")

TALKER = StageId("talker")
VOCODER = StageId("vocoder")
AUDIO = OutputName("audio")
SPEECH = wire.PipelineInfo(PipelineName("speech"), (InputName("text"),), ((AUDIO, VOCODER),))
TIMINGS = Timings(
    queued_s=0.001,
    stages=(
        StageTiming(stage=TALKER, first_chunk_s=0.020),
        StageTiming(stage=VOCODER, first_chunk_s=0.005),
    ),
)
WAIT_S = 5.0
"""Longest wait of a test for something that must happen."""


def replica(
    stage: StageId, state: str = "ready", *, slot: int = 0, incarnation: int = 1, **more: object
) -> ReplicaState:
    """Return a replica's state."""
    identity = ReplicaId(stage, slot, IncarnationNumber(incarnation))
    return msgspec.convert({"replica": identity, "state": state, **more}, ReplicaState)


def facts(*, voices: tuple[str, ...] = (), **media: float | str) -> StageFacts:
    """Return what a stage declares; it speaks 24 kHz unless said otherwise."""
    return StageFacts(
        kind="generation",
        unit="samples",
        media=media or {"rate_hz": 24000, "channels": 1, "format": "s16le"},
        voices=voices,
        recovery="retry",
        max_step_s=30.0,
    )


class FakePeer:
    """One client's connection, seen from the orchestrator.

    Attributes:
        received: Everything that the client has sent, the hello included.
        bodies: The bytes of each submission.
        is_gone: Set when the client has hung up.
    """

    def __init__(self) -> None:
        self.received: list[wire.Up] = []
        self.bodies: dict[int, bytes] = {}
        self.is_gone = asyncio.Event()
        self.connection: ChannelEnd
        self._news = asyncio.Event()
        self._read = 0

    def send(self, *messages: wire.Down) -> None:
        """Send messages without inline payloads."""
        for message in messages:
            self.connection.send(message)

    def welcome(self, **changes: object) -> None:
        """Let the client in; both stages have a ready replica unless said otherwise."""
        fields: dict[str, object] = {
            "protocol": PROTOCOL_VERSION,
            "epoch": 1,
            "channel": ChannelId("1.1"),
            "shared_memory_dir": None,
            "pipelines": (SPEECH,),
            "replicas": (replica(TALKER), replica(VOCODER)),
            "targets": {TALKER: 1, VOCODER: 1},
        } | changes
        self.send(wire.Welcome(**fields))  # pyright: ignore[reportArgumentType] - fields by name
        if replica(VOCODER) in fields["replicas"]:  # pyright: ignore[reportOperatorIssue]
            self.send(wire.StageNotice(VOCODER, facts()))

    def output(
        self, number: int, seq: int, values: Mapping[str, object] | None = None, **changes: object
    ) -> None:
        """Send a chunk of the audio output; without values it is the bare end."""
        payload: PayloadRef | None = None
        data: bytes | None = None
        if values is not None:
            data = codec.encode(values).join()
            payload = PayloadRef(INLINE, "", len(data))
        fields: dict[str, object] = {
            "number": number,
            "output": AUDIO,
            "seq": seq,
            "payload": payload,
            "offset": 0,
            "length": 1,
            "kind": "data",
            "media_s": 0.02,
            "final": values is None,
            "timings": TIMINGS if seq == 0 else None,
        } | changes
        self.connection.send(wire.Output(**fields), data)  # pyright: ignore[reportArgumentType]

    def finish(self, number: int) -> None:
        """End a request well."""
        self.send(wire.Finished(number, TIMINGS))

    def fail(self, number: int, failure: Failure) -> None:
        """End a request badly."""
        self.send(wire.Failed(number, failure))

    def crash(self) -> None:
        """Vanish as after SIGKILL: what was handed to the kernel arrives, nothing else."""
        self.connection.flush()
        self.connection.abort()

    async def next(self, kind: type[MessageT]) -> MessageT:
        """Return the next message of a kind that no earlier call has returned; skip others."""
        async with asyncio.timeout(WAIT_S):
            while True:
                while self._read < len(self.received):
                    message = self.received[self._read]
                    self._read += 1
                    if isinstance(message, kind):
                        return message
                self._news.clear()
                await self._news.wait()

    def over_socket(self) -> Connection[wire.Up]:
        """Return the protocol of its connection to a socket."""
        self.connection = connection = Connection(
            msgspec.msgpack.Decoder(list[wire.Up]), self._on_frame, self._on_closed
        )
        return connection

    def over_hand_offs(self) -> LocalConnection[wire.Up]:
        """Return its end of a connection within this process."""
        self.connection = connection = LocalConnection(self._on_frame, self._on_closed)
        return connection

    def _on_frame(self, connection: ChannelEnd, messages: list[wire.Up], body: memoryview) -> None:
        del connection
        start = 0
        for message in messages:
            end = start + sum(ref.size_bytes for ref in wire.inline_payloads(message))
            if isinstance(message, wire.Submit):
                self.bodies[message.number] = bytes(body[start:end])
            start = end
            self.received.append(message)
        self._news.set()

    def _on_closed(self, connection: ChannelEnd, reason: str) -> None:
        del connection, reason
        self.is_gone.set()


class FakeOrchestrator:
    """Accepts clients on a listening socket or in this process; each is a `FakePeer`."""

    def __init__(self) -> None:
        self.peers: list[FakePeer] = []
        self._server: asyncio.AbstractServer | LocalListener[wire.Up, wire.Down] | None = None
        self._accepted = 0
        self._news = asyncio.Event()

    async def start(
        self, listener: str | socket.socket | LocalListener[wire.Up, wire.Down]
    ) -> None:
        """Accept on a path, on a socket that already listens, or in this process."""
        if isinstance(listener, LocalListener):
            listener.serve(lambda: self._new_peer().over_hand_offs())
            self._server = listener
        else:
            self._server = await serve_unix(listener, lambda: self._new_peer().over_socket())

    async def accept(self, *, welcome: bool = True) -> FakePeer:
        """Return the next client once it has said hello."""
        async with asyncio.timeout(WAIT_S):
            while len(self.peers) <= self._accepted:
                self._news.clear()
                await self._news.wait()
        peer = self.peers[self._accepted]
        self._accepted += 1
        await peer.next(wire.Hello)
        if welcome:
            peer.welcome()
        return peer

    async def stop(self) -> None:
        """Drop everyone and stop listening."""
        for peer in self.peers:
            peer.connection.abort()
        if self._server is not None:
            self._server.close()

    def _new_peer(self) -> FakePeer:
        peer = FakePeer()
        self.peers.append(peer)
        self._news.set()
        return peer


async def in_time(awaitable: Awaitable[ResultT]) -> ResultT:
    """Return the result.

    Raises:
        TimeoutError: It did not come within `WAIT_S`.
    """
    async with asyncio.timeout(WAIT_S):
        return await awaitable


async def wait_until(condition: Callable[[], bool]) -> None:
    """Let the loop run until the condition holds.

    Raises:
        TimeoutError: It does not within `WAIT_S`.
    """
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - it may depend on anything; bounded
            await asyncio.sleep(0)
