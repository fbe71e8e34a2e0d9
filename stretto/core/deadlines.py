"""When must something happen next? A heap of deadlines that can be moved and cleared cheaply."""

from __future__ import annotations

import heapq
from enum import Enum
from typing import TypeAlias

from stretto.types import CallId, ReplicaId, RequestId, TaskKey


class DeadlineKind(Enum):
    """What is being waited for."""

    REQUEST = "request"  # some wait of a request; the router works out which
    CANCEL = "cancel"  # the end of a cancelled task
    START = "start"  # a sign of life from a replica that starts or loads
    PROGRESS = "progress"  # a sign of life from a replica that has work
    RESTART = "restart"  # the back-off of a slot
    DRAIN = "drain"  # a draining replica's last task
    SHUTDOWN = "shutdown"  # the engine's last request
    CALL = "call"  # the answers to a collective call
    EXCLUSIVE = "exclusive"  # the end of an exclusive call that nobody waits for any more


DeadlineSubject: TypeAlias = RequestId | TaskKey | ReplicaId | CallId | None
DeadlineKey: TypeAlias = tuple[DeadlineKind, DeadlineSubject]


class Deadlines:
    """At most one time per key. Entries that were moved or cleared stay in the heap until they surface."""

    def __init__(self) -> None:
        self._armed: dict[DeadlineKey, float] = {}
        self._heap: list[tuple[float, int, DeadlineKey]] = []
        self._counter = 0

    def __len__(self) -> int:
        """Return how many keys are armed."""
        return len(self._armed)

    def set(self, kind: DeadlineKind, what: DeadlineSubject, when: float) -> None:
        """Arm or move a key's deadline."""
        key = (kind, what)
        if self._armed.get(key) == when:
            return
        self._armed[key] = when
        self._counter += 1
        heapq.heappush(self._heap, (when, self._counter, key))
        if len(self._heap) > 64 + 4 * len(self._armed):
            self._compact()

    def clear(self, kind: DeadlineKind, what: DeadlineSubject) -> None:
        """Disarm a key; unknown ones are ignored."""
        self._armed.pop((kind, what), None)

    def has(self, kind: DeadlineKind, what: DeadlineSubject) -> bool:
        """Say whether a key is armed."""
        return (kind, what) in self._armed

    def next(self) -> float | None:
        """Return the earliest deadline, or `None`: then nothing needs a timer."""
        while self._heap:
            when, _, key = self._heap[0]
            if self._armed.get(key) == when:
                return when
            heapq.heappop(self._heap)
        return None

    def pop_due(self, now: float) -> DeadlineKey | None:
        """Disarm and return the earliest key whose time has come; `None` if there is none.

        One at a time, since what one expiry does may clear the next.
        """
        when = self.next()
        if when is None or when > now:
            return None
        key = heapq.heappop(self._heap)[2]
        del self._armed[key]
        return key

    def _compact(self) -> None:
        self._heap = [entry for entry in self._heap if self._armed.get(entry[2]) == entry[0]]
        heapq.heapify(self._heap)
