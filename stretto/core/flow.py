"""Cursors and windows: how far a producer is ahead of each of its consumers.

    0 ............ consumed ............ fed ............ produced
                   |<------- window (chunks, bytes) ------>|
          |<- base: chunks from here on are kept for feeding and for a retry

A producer may send while the smallest window over its sinks has room. A full edge, or one that must
buffer (`graph.Plan.buffered`), gives its producer no bound; there the window bounds what is fed.
"""

from __future__ import annotations

from collections import deque

from stretto.core.commands import UNLIMITED
from stretto.core.graph import EdgeMode, EdgeSpec
from stretto.types import OutputName, PayloadRef


class Sink:
    """One consumer of a task's chunks: an edge or the client.

    Attributes:
        window_chunks: Chunks that may be produced beyond `consumed`.
        window_bytes: Bytes that may be produced beyond `bytes_consumed`, one chunk more.
        is_limiting: Whether the window binds the producer.
        is_closed: The consumer wants no more; chunks for it are dropped.
        produced: Chunks so far.
        consumed: Chunks that the consumer has absorbed.
        bytes_produced: Bytes so far.
        bytes_consumed: Bytes that the consumer has absorbed.
    """

    __slots__ = (
        "bytes_consumed",
        "bytes_produced",
        "consumed",
        "is_closed",
        "is_limiting",
        "produced",
        "sizes",
        "window_bytes",
        "window_chunks",
    )

    def __init__(self, window_chunks: int, window_bytes: int, *, is_limiting: bool) -> None:
        self.window_chunks = window_chunks
        self.window_bytes = window_bytes
        self.is_limiting = is_limiting
        self.is_closed = False
        self.produced = 0
        self.consumed = 0
        self.bytes_produced = 0
        self.bytes_consumed = 0
        self.sizes: deque[int] = deque()
        """Sizes of the chunks from `consumed` to `produced`."""

    def produce(self, size_bytes: int) -> None:
        """Count one more chunk."""
        self.produced += 1
        self.bytes_produced += size_bytes
        self.sizes.append(size_bytes)

    def consume(self, up_to: int) -> None:
        """Move the consumed cursor forward to `up_to`."""
        while self.consumed < up_to:
            self.consumed += 1
            self.bytes_consumed += self.sizes.popleft()

    @property
    def chunk_limit(self) -> int:
        """Return the chunk number that the producer must not reach."""
        if self.is_closed or not self.is_limiting:
            return UNLIMITED
        return self.consumed + self.window_chunks

    @property
    def byte_limit(self) -> int:
        """Return the byte count at which the producer must stop."""
        if self.is_closed or not self.is_limiting:
            return UNLIMITED
        return self.bytes_consumed + self.window_bytes


class EdgeFlow(Sink):
    """One edge of one request.

    Attributes:
        spec: The edge.
        chunks: Payloads of the chunks from `base` to `produced`; each is held.
        base: Number of the first chunk in `chunks`.
        fed: Chunks given to the consumer.
        fed_bytes: Their bytes.
        has_ended: The source has finished: `produced` is final.
        close_sent: The consumer was told so.
    """

    __slots__ = ("base", "chunks", "close_sent", "fed", "fed_bytes", "has_ended", "spec")

    def __init__(self, spec: EdgeSpec, *, is_limiting: bool) -> None:
        super().__init__(spec.window_chunks, spec.window_bytes, is_limiting=is_limiting)
        self.spec = spec
        self.chunks: deque[PayloadRef] = deque()
        self.base = 0
        self.fed = 0
        self.fed_bytes = 0
        self.has_ended = False
        self.close_sent = False

    @property
    def may_start(self) -> bool:
        """Say whether this edge has what its consumer can start with."""
        if self.spec.mode is EdgeMode.FULL:
            return self.has_ended
        return self.produced > 0

    @property
    def may_feed(self) -> bool:
        """Say whether there is a chunk to feed and room in the window for it."""
        if self.fed == self.produced or (self.spec.mode is EdgeMode.FULL and not self.has_ended):
            return False
        ahead = self.fed - self.consumed
        return ahead == 0 or (
            ahead < self.window_chunks and self.fed_bytes - self.bytes_consumed < self.window_bytes
        )

    @property
    def is_starved(self) -> bool:
        """Say whether the consumer has absorbed all that it was given and more may come."""
        return self.consumed == self.fed and not self.close_sent

    def rewind(self) -> None:
        """Start feeding from the beginning again; every chunk must still be kept."""
        self.fed = self.fed_bytes = self.consumed = self.bytes_consumed = 0
        self.close_sent = False
        self.sizes = deque(chunk.size_bytes for chunk in self.chunks)


class OutputFlow(Sink):
    """One output of one request, on its way to the client."""

    __slots__ = ("name",)

    def __init__(self, name: OutputName, window_chunks: int, window_bytes: int) -> None:
        super().__init__(window_chunks, window_bytes, is_limiting=True)
        self.name = name
