"""Where payload bytes are while the router only knows references.

Inline bytes are kept here. Shared-memory files belong to the run's directory and are only named here,
so that what a dead producer had not announced can be told from what is still needed.
"""

from __future__ import annotations

from stretto.transport.payload_store import unannounced, unlink
from stretto.types import INLINE, SHARED_MEMORY, PayloadRef


class PayloadTable:
    """Inline bytes by key, and the announced files of each producer.

    Args:
        shared_memory_dir: The run's directory, or `None` if all payloads are inline.
    """

    def __init__(self, shared_memory_dir: str | None) -> None:
        self._directory = shared_memory_dir
        self._inline: dict[str, bytes] = {}
        self._announced: dict[str, set[str]] = {}
        self._counter = 0

    def __len__(self) -> int:
        """Return how many payloads are known."""
        return len(self._inline) + sum(len(keys) for keys in self._announced.values())

    def keep(self, data: bytes) -> PayloadRef:
        """Keep inline bytes and return the reference by which the router knows them."""
        self._counter += 1
        key = str(self._counter)
        self._inline[key] = data
        return PayloadRef(INLINE, key, len(data))

    def announce(self, payload: PayloadRef) -> None:
        """Note a shared-memory payload that its producer told of."""
        self._announced.setdefault(owner_of(payload), set()).add(payload.key)

    def announced(self, owner: str) -> tuple[str, ...]:
        """Return the keys of a producer's payloads that somebody may still read."""
        return tuple(sorted(self._announced.get(owner, ())))

    def on_wire(self, payload: PayloadRef) -> tuple[PayloadRef, bytes | None]:
        """Return the reference as it travels, and the bytes that go with it if it is inline."""
        if payload.place != INLINE:
            return payload, None
        return PayloadRef(INLINE, "", payload.size_bytes), self._inline[payload.key]

    def forget(self, payload: PayloadRef) -> None:
        """Drop a payload that nobody holds."""
        if payload.place == INLINE:
            del self._inline[payload.key]
            return
        owner = owner_of(payload)
        keys = self._announced[owner]
        keys.discard(payload.key)
        if not keys:
            del self._announced[owner]

    def unlink(self, payload: PayloadRef) -> None:
        """Remove the file of a producer that is gone."""
        if self._directory is not None and payload.place == SHARED_MEMORY:
            unlink(self._directory, payload.key)

    def reclaim(self, owner: str) -> None:
        """A producer is gone: remove the files that nobody was told of."""
        if self._directory is not None:
            for key in unannounced(self._directory, owner, self._announced.get(owner, ())):
                unlink(self._directory, key)


def owner_of(payload: PayloadRef) -> str:
    """Return the name under which a shared-memory payload's producer writes its files."""
    return payload.key.rpartition(".")[0]
