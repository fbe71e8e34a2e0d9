"""The waiting line: who may reserve slots next, and how long a refused client should wait.

A request waits for a *group* of stages whose slots it needs together. Lines of groups that share no
stage do not hold each other up; within a line the order is priority, then arrival.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TypeAlias

from stretto.types import PipelineName, RequestId, StageId

Group: TypeAlias = tuple[StageId, ...]


class WaitingLine:
    """Requests that wait for groups of stages. Leaving is immediate; nothing stale stays behind."""

    def __init__(self) -> None:
        self._lines: dict[Group, dict[int, OrderedDict[RequestId, int]]] = {}
        self._groups_of: dict[RequestId, dict[Group, int]] = {}
        self._by_stage: dict[StageId, dict[Group, None]] = {}
        self._tickets = 0

    def __len__(self) -> int:
        """Return how many requests wait."""
        return len(self._groups_of)

    def __contains__(self, request: RequestId) -> bool:
        """Say whether the request waits for any group."""
        return request in self._groups_of

    def join(self, request: RequestId, group: Group, priority: int) -> None:
        """Put a request at the end of its priority's line; it may wait for several groups."""
        self._tickets += 1
        line = self._lines.setdefault(group, {})
        line.setdefault(priority, OrderedDict())[request] = self._tickets
        self._groups_of.setdefault(request, {})[group] = priority
        for stage in group:
            self._by_stage.setdefault(stage, {})[group] = None

    def leave(self, request: RequestId, group: Group | None = None) -> None:
        """Take a request out of one line, or of all of them; one that does not wait is ignored."""
        waits = self._groups_of.get(request, {})
        for each in [group] if group is not None else list(waits):
            priority = waits.pop(each, None)
            if priority is None:
                continue
            line = self._lines[each]
            del line[priority][request]
            if not line[priority]:
                del line[priority]
        if not waits:
            self._groups_of.pop(request, None)

    def heads(self, stage: StageId) -> list[tuple[RequestId, Group]]:
        """Return the first of each line that needs the stage, in the order they should be tried."""
        found: list[tuple[int, int, RequestId, Group]] = []
        for group in self._by_stage.get(stage, ()):
            line = self._lines.get(group)
            if line:
                priority = min(line)
                request, ticket = next(iter(line[priority].items()))
                found.append((priority, ticket, request, group))
        return [(request, group) for _, _, request, group in sorted(found)]


class DrainRate:
    """How fast a pipeline's queue empties, from the times of the last starts."""

    def __init__(self) -> None:
        self._starts: dict[PipelineName, deque[float]] = {}

    def started(self, pipeline: PipelineName, now: float) -> None:
        """Record that a queued request was started."""
        self._starts.setdefault(pipeline, deque(maxlen=32)).append(now)

    def retry_after_s(self, pipeline: PipelineName, queued: int, now: float) -> float:
        """Return when a place is likely to be free: between 1 and 60 seconds."""
        starts = self._starts.get(pipeline)
        if not starts or len(starts) < 2 or now <= starts[0]:
            return 1.0
        rate = len(starts) / (now - starts[0])
        return min(max(queued / rate / 2, 1.0), 60.0)
