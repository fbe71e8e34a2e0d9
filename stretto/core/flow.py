"""Cursors and windows: how far a producer is ahead of each of its consumers.

    0 ............ consumed ............ fed ............ produced
                   |<------- window (chunks, bytes) ------>|
          |<- base: chunks from here on are kept for feeding and for a retry

A producer may send while the smallest window over its sinks has room. A full edge, or one that must
buffer (`graph.Plan.buffered`), gives its producer no bound; there the window bounds what is fed.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from stretto.core.graph import EdgeMode, EdgeSpec

if TYPE_CHECKING:
    from stretto.types import OutputName, PayloadRef, StageId


class Sink:
    """One consumer of a task's chunks: an edge or the client.

    Attributes:
        window_chunks: Chunks that may be produced beyond `consumed`.
        window_bytes: Bytes that may be produced beyond `bytes_consumed`, one chunk more.
        is_limiting: Whether the window binds the producer.
        produced: Chunks so far.
        consumed: Chunks that the consumer has absorbed.
        bytes_produced: Bytes so far.
        bytes_consumed: Bytes that the consumer has absorbed.
        sizes: Sizes of the chunks from `consumed` to `produced`.
    """

    __slots__ = (
        "bytes_consumed",
        "bytes_produced",
        "consumed",
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
        self.produced = 0
        self.consumed = 0
        self.bytes_produced = 0
        self.bytes_consumed = 0
        self.sizes: deque[int] = deque()

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
    def is_full(self) -> bool:
        """Say whether the producer must wait for this consumer."""
        return self.is_limiting and (
            self.produced >= self.consumed + self.window_chunks
            or self.bytes_produced >= self.bytes_consumed + self.window_bytes
        )


class EdgeFlow(Sink):
    """One edge of one request.

    Attributes:
        spec: The edge.
        id: Its identity.
        chunks: Payloads of the chunks from `base` to `produced`; each is held.
        base: Number of the first chunk in `chunks`.
        base_bytes: Bytes of the chunks before it.
        fed: Chunks given to the consumer.
        fed_bytes: Their bytes.
        has_ended: The source has finished: `produced` is final.
        close_sent: The consumer was told so.
        is_closed: The consumer wants no more; chunks for it are dropped.
    """

    __slots__ = (
        "base",
        "base_bytes",
        "chunks",
        "close_sent",
        "fed",
        "fed_bytes",
        "has_ended",
        "id",
        "is_closed",
        "spec",
    )

    def __init__(self, spec: EdgeSpec, *, is_limiting: bool) -> None:
        super().__init__(spec.window_chunks, spec.window_bytes, is_limiting=is_limiting)
        self.spec = spec
        self.id = spec.id
        self.chunks: deque[PayloadRef] = deque()
        self.base = self.base_bytes = 0
        self.fed = 0
        self.fed_bytes = 0
        self.has_ended = False
        self.close_sent = False
        self.is_closed = False

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

    def close(self) -> None:
        """Take no more chunks; the producer needs no credit of this consumer any more."""
        self.is_closed = True
        self.is_limiting = False

    @property
    def fed_kept_bytes(self) -> int:
        """Return how many bytes are kept only for another attempt of the consumer."""
        return self.fed_bytes - self.base_bytes

    def drop_first(self) -> PayloadRef:
        """Keep the first chunk no longer, and return it."""
        payload = self.chunks.popleft()
        self.base += 1
        self.base_bytes += payload.size_bytes
        return payload

    def rewind(self) -> None:
        """Feed what is kept again, to the consumer's next attempt, which needs nothing before it."""
        self.fed = self.consumed = self.base
        self.fed_bytes = self.bytes_consumed = self.base_bytes
        self.close_sent = False
        self.sizes = deque(chunk.size_bytes for chunk in self.chunks)

    def restart(self) -> None:
        """Count from the beginning again, for the producer's next attempt; nothing may have been fed."""
        self.base = self.produced = self.consumed = 0
        self.base_bytes = self.bytes_produced = self.bytes_consumed = 0
        self.sizes.clear()


class OutputFlow(Sink):
    """One output of one request, on its way to the client; `stage` makes it."""

    __slots__ = ("name", "stage")

    def __init__(
        self, name: OutputName, stage: StageId, window_chunks: int, window_bytes: int
    ) -> None:
        super().__init__(window_chunks, window_bytes, is_limiting=True)
        self.name = name
        self.stage = stage
