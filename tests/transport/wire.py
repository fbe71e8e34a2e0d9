"""What the connection tests share: a small message set, an owner that records, and raw peers."""

from __future__ import annotations

import asyncio
import gc
import socket
import struct
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from stretto.transport import Connection

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Note(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A message with a number, a text and the size of its bytes in the body."""

    number: int
    text: str = ""
    size: int = 0


class Mark(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A message without content."""


Message: TypeAlias = Note | Mark
DECODER = msgspec.msgpack.Decoder(list[Message])


class Owner:
    """Owns connections and records what they report, as the link and channel code does."""

    def __init__(self, **settings: int) -> None:
        self.settings = settings
        self.frames: list[list[Message]] = []
        self.bodies: list[bytes] = []
        self.closed: list[str] = []
        self.levels: list[str] = []
        self.connections: list[Connection[Message]] = []
        self.react: Callable[[Connection[Message], list[Message]], None] = (
            lambda connection, messages: None
        )
        self._changed = asyncio.Event()

    @property
    def messages(self) -> list[Message]:
        """All messages in the order of their arrival."""
        return [message for frame in self.frames for message in frame]

    def make(self) -> Connection[Message]:
        """Return a new connection; the factory for servers and clients."""
        connection = Connection(
            DECODER,
            self._on_frame,
            self._on_closed,
            on_full=lambda _: self._level("full"),
            on_drained=lambda _: self._level("drained"),
            max_frame_bytes=self.settings.get("max_frame_bytes", 1 << 20),
            high_water_bytes=self.settings.get("high_water_bytes", 1 << 16),
        )
        self.connections.append(connection)
        return connection

    async def over(self, sock: socket.socket) -> Connection[Message]:
        """Return a connection over one end of a socket pair."""
        _, connection = await asyncio.get_running_loop().create_connection(self.make, sock=sock)
        return connection

    async def wait(self, condition: Callable[[], object]) -> None:
        """Wait until the condition holds; it is looked at after each report."""
        async with asyncio.timeout(5):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def wait_closed(self) -> str:
        """Wait for the end of the only connection and return its reason."""
        await self.wait(lambda: self.closed)
        return self.closed[0]

    def _on_frame(
        self, connection: Connection[Message], messages: list[Message], body: memoryview
    ) -> None:
        self.frames.append(messages)
        at = 0
        for message in messages:
            if isinstance(message, Note) and message.size:
                self.bodies.append(bytes(body[at : at + message.size]))
                at += message.size
        assert at == len(body)
        self._changed.set()
        self.react(connection, messages)

    def _on_closed(self, connection: Connection[Message], reason: str) -> None:
        assert connection in self.connections
        self.closed.append(reason)
        self._changed.set()

    def _level(self, level: str) -> None:
        self.levels.append(level)
        self._changed.set()


def frame_bytes(messages: Sequence[Message], bodies: Sequence[bytes] = ()) -> bytes:
    """Return one frame as it lies on the wire."""
    encoded = [msgspec.msgpack.encode(message) for message in messages]
    header = struct.pack(">BI", 0xDD, len(encoded)) + b"".join(encoded)
    content = b"".join(bodies)
    return struct.pack("<II", 4 + len(header) + len(content), len(header)) + header + content


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return a non-blocking end for a connection and a blocking one for a raw peer."""
    ours, peer = socket.socketpair()
    ours.setblocking(False)
    peer.settimeout(5)
    return ours, peer


def open_descriptors() -> int:
    """Return how many descriptors this process has open, without those of dropped objects."""
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))
