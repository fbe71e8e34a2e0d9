"""The waiting line: who may reserve slots next, and how long a refused client should wait.

A request waits for a *group* of stages whose slots it needs together; each group has a line. Running
requests go before queued ones, since they already hold slots that others wait for; then the order is
priority, then arrival. The heads of all lines are tried in this order too.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING, TypeAlias

from stretto.types import PipelineName, RequestId, StageId

if TYPE_CHECKING:
    from collections.abc import Callable

Group: TypeAlias = tuple[StageId, ...]

Rank: TypeAlias = tuple[bool, int]
"""Whether the request is still queued, and its priority; the smallest goes first."""


class WaitingLine:
    """Requests that wait for groups of stages. Leaving is immediate; nothing stale stays behind."""

    def __init__(self) -> None:
        self._lines: dict[Group, dict[Rank, OrderedDict[RequestId, int]]] = {}
        self._groups_of: dict[RequestId, dict[Group, Rank]] = {}
        self._needs: dict[RequestId, int] = {}
        self._tickets = 0

    def __len__(self) -> int:
        """Return how many requests wait."""
        return len(self._groups_of)

    def __contains__(self, request: RequestId) -> bool:
        """Say whether the request waits for any group."""
        return request in self._groups_of

    def join(self, request: RequestId, group: Group, rank: Rank, need: int = 1) -> None:
        """Put a request behind all of its rank; it may wait for several groups, once for each.

        Args:
            request: Who.
            group: The stages whose slots it needs together.
            rank: Its rank.
            need: How many slots of each of them.
        """
        if need > 1:
            self._needs[request] = need
        groups = self._groups_of.setdefault(request, {})
        if group in groups:
            return
        groups[group] = rank
        self._tickets += 1
        line = self._lines.setdefault(group, {})
        line.setdefault(rank, OrderedDict())[request] = self._tickets

    def leave(self, request: RequestId, group: Group) -> None:
        """Take a request out of a group's line; one that does not wait there is ignored."""
        groups = self._groups_of.get(request, {})
        rank = groups.pop(group, None)
        if rank is None:
            return
        if not groups:
            del self._groups_of[request]
            self._needs.pop(request, None)
        line = self._lines[group]
        del line[rank][request]
        if not line[rank]:
            del line[rank]
        if not line:
            del self._lines[group]

    def promote(self, request: RequestId, rank: Rank) -> None:
        """Give a request another rank in each of its lines."""
        for group in list(self._groups_of.get(request, ())):
            self.leave(request, group)
            self.join(request, group, rank)  # a running request needs a slot for itself only

    def first_admissible(
        self, capacity: Callable[[StageId], int], room: Callable[[StageId], int]
    ) -> tuple[RequestId, Group] | None:
        """Return who is next, or `None` if nobody can be admitted now.

        A queued head that can't be admitted claims a slot at each of its stages against those behind
        it, so that a request which needs several stages is not starved by requests which need one.
        Who needs more of a stage than there is claims nothing, and those behind it go before it.

        Args:
            capacity: Says how many slots the usable replicas of a stage have.
            room: Says how many slots of a stage are free and not promised.
        """
        claimed: dict[StageId, int] = {}
        for (is_queued, _), _, request, group in self._heads(capacity):
            need = self._needs.get(request, 1)
            if all(room(stage) - claimed.get(stage, 0) >= need for stage in group):
                return request, group
            if is_queued:
                for stage in group:
                    claimed[stage] = claimed.get(stage, 0) + need
        return None

    def _heads(
        self, capacity: Callable[[StageId], int]
    ) -> list[tuple[Rank, int, RequestId, Group]]:
        """Return the first that fits of each line, with rank and ticket, in the order to be tried."""
        heads: list[tuple[Rank, int, RequestId, Group]] = []
        for group in self._lines:
            most = min(capacity(stage) for stage in group)
            head = self._first_that_fits(group, most) if most else None
            if head is not None:
                heads.append((*head, group))
        return sorted(heads)

    def _first_that_fits(self, group: Group, most: int) -> tuple[Rank, int, RequestId] | None:
        """Return the first of a line that needs at most so many slots of each stage."""
        for rank, waiting in sorted(self._lines[group].items(), key=lambda item: item[0]):
            for request, ticket in waiting.items():
                if self._needs.get(request, 1) <= most:
                    return rank, ticket, request
        return None


class DrainRate:
    """How fast a pipeline's queue empties, from the times of the last starts."""

    def __init__(self) -> None:
        self._starts: dict[PipelineName, deque[float]] = {}

    def started(self, pipeline: PipelineName, now: float) -> None:
        """Record that a queued request was started."""
        self._starts.setdefault(pipeline, deque(maxlen=32)).append(now)

    def retry_after_s(self, pipeline: PipelineName, queued: int, now: float) -> float:
        """Return when a place is likely to be free: between 1 and 60 seconds."""
        starts = self._starts.get(pipeline, ())
        if len(starts) <= 1 or now <= starts[0]:
            return 1.0
        rate = len(starts) / (now - starts[0])
        return min(max(queued / rate / 2, 1.0), 60.0)
