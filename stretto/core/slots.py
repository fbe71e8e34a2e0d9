"""Stage pools: which replicas exist, what they hold, and when a dead one is tried again.

A *place* is where a process of a stage's pool stands; a *slot* of a replica is room for one task.
This machine holds no requests; it counts.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict, deque
from enum import Enum
from typing import TYPE_CHECKING

from stretto.core.commands import ReplicaState
from stretto.types import IncarnationNumber, Recovery, ReplicaId, StageId, TaskKey, weakest

if TYPE_CHECKING:
    from stretto.core.events import Affinity, StatsReported
    from stretto.core.graph import Limits, StageSpec


class ReplicaPhase(Enum):
    """Where a place in the pool stands."""

    STARTING = "starting"  # a process was asked for; no hello yet
    LOADING = "loading"  # it has said hello
    READY = "ready"  # it takes tasks: readable and assignable
    SUSPECT = "suspect"  # it has work and does not go on: readable, not assignable
    CALLING = "calling"  # an exclusive call waits for its tasks, or runs: readable, not assignable
    ASLEEP = "asleep"  # a call has put it to sleep: not assignable until another call wakes it
    DRAINING = "draining"  # it finishes what it has: readable, not assignable
    DEAD = "dead"  # no process; a restart is due
    PARKED = "parked"  # no process; it failed too often and is tried again much later
    STOPPED = "stopped"  # no process, and none wanted


REMEMBERED_KEYS = 4096
"""Affinity keys whose replica a stage remembers."""

LIVE = frozenset(
    {
        ReplicaPhase.STARTING,
        ReplicaPhase.LOADING,
        ReplicaPhase.READY,
        ReplicaPhase.SUSPECT,
        ReplicaPhase.CALLING,
        ReplicaPhase.ASLEEP,
        ReplicaPhase.DRAINING,
    }
)


_WORTH = {
    phase: rank
    for rank, phase in enumerate(
        (
            ReplicaPhase.STOPPED,
            ReplicaPhase.PARKED,
            ReplicaPhase.DEAD,
            ReplicaPhase.STARTING,
            ReplicaPhase.LOADING,
            ReplicaPhase.ASLEEP,
            ReplicaPhase.SUSPECT,
            ReplicaPhase.CALLING,
            ReplicaPhase.DRAINING,
            ReplicaPhase.READY,
        )
    )
}
"""Of two places, which one a shrinking stage would rather keep."""


class Replica:
    """A place in a stage's pool and the process that fills it now.

    Attributes:
        id: The present or last process; the incarnation grows with each start.
        phase: See `ReplicaPhase`.
        slots: How many tasks the process holds at a time, from its `Ready`.
        bound: The tasks it holds, until their end or its death.
        has_worked: The present process has finished a task.
        alive_at: When the present process last told that it goes on; monotonic seconds.
        max_step_s: How long one step of its backend may take.
        deaths: Times of deaths of processes that finished no task, for the breaker.
        deaths_in_row: Deaths since the last finished task, for the back-off.
        reason: Why the last process died.
        detail: What it is doing or why it is not there, for people.
        fraction: How far loading is.
        reported: What its backend told last; `None` if it tells nothing.
        is_wanted: It counts towards the stage's target; else it leaves, has left, or has joined by itself.
        nonce: The name of the process that has joined from elsewhere; empty if it was started here.
        connection: The connection on which it did so.
    """

    __slots__ = (
        "alive_at",
        "bound",
        "connection",
        "deaths",
        "deaths_in_row",
        "detail",
        "fraction",
        "has_worked",
        "id",
        "is_wanted",
        "max_step_s",
        "nonce",
        "phase",
        "reason",
        "reported",
        "slots",
    )

    def __init__(self, stage: StageId, index: int) -> None:
        self.id = ReplicaId(stage, index, IncarnationNumber(0))
        self.phase = ReplicaPhase.STOPPED
        self.slots = 0
        self.bound: dict[TaskKey, None] = {}
        self.has_worked = False
        self.alive_at = 0.0
        self.max_step_s = 0.0
        self.deaths: deque[float] = deque()
        self.deaths_in_row = 0
        self.reason = ""
        self.detail = ""
        self.fraction = 0.0
        self.is_wanted = True
        self.nonce = ""
        self.connection = 0
        self.reported: StatsReported | None = None

    @property
    def is_joined(self) -> bool:
        """Say whether its process was started elsewhere: nobody here starts a successor."""
        return bool(self.nonce)

    @property
    def has_room(self) -> bool:
        """Say whether it can hold one more task."""
        return len(self.bound) < self.slots

    def state(self) -> ReplicaState:
        """Return what people and health checks may know."""
        return ReplicaState(
            replica=self.id, state=self.phase.value, detail=self.detail, fraction=self.fraction
        )

    def did_work(self) -> None:
        """Record a finished task: the place is sound."""
        self.has_worked = True
        self.forget_deaths()

    def forget_deaths(self) -> None:
        """Start counting deaths anew."""
        self.deaths.clear()
        self.deaths_in_row = 0

    def died(self, reason: str, limits: Limits, now: float, *, for_good: bool) -> float:
        """Become `DEAD` or `PARKED`; return when to try again (contract row F7).

        Args:
            reason: Why the process died.
            limits: The back-off and the breaker.
            now: Monotonic seconds.
            for_good: The process said itself that it can't serve: park the place at once.
        """
        self.reason = reason
        self.deaths_in_row += 1
        if not self.has_worked:
            self.deaths.append(now)
        while self.deaths and self.deaths[0] <= now - limits.breaker_window_s:
            self.deaths.popleft()
        if for_good or len(self.deaths) >= limits.breaker_deaths:
            self.phase = ReplicaPhase.PARKED
            self.deaths.clear()
            return now + limits.breaker_rearm_s
        self.phase = ReplicaPhase.DEAD
        backoff_s = limits.respawn_min_s * 2 ** min(self.deaths_in_row - 1, 32)
        return now + min(backoff_s, limits.respawn_max_s)


class Openings:
    """Ready places with room, ordered by load: who has the least work is found without a look at all."""

    def __init__(self) -> None:
        self._slots: dict[int, list[int]] = {}

    def add(self, place: Replica) -> None:
        """Offer a place, under the work that it has now; one without room is ignored."""
        if place.has_room:
            insort(self._slots.setdefault(len(place.bound), []), place.id.slot)

    def remove(self, place: Replica) -> None:
        """Take a place back before its work changes; one without room was not offered."""
        if not place.has_room:
            return
        load = len(place.bound)
        slots = self._slots[load]
        del slots[bisect_left(slots, place.id.slot)]
        if not slots:
            del self._slots[load]

    def least(self, start: int) -> int | None:
        """Return the slot index with the least work; of several the first from `start` on, in a circle."""
        if not self._slots:
            return None
        slots = self._slots[min(self._slots)]
        return slots[bisect_left(slots, start) % len(slots)]

    def loads(self) -> dict[int, int]:
        """Return the work of each place that is offered, by slot index."""
        return {slot: load for load, slots in self._slots.items() for slot in slots}


class Pool:
    """The replicas of one stage.

    Attributes:
        spec: The stage.
        replicas: By slot index.
        capacity: Slots of all ready replicas.
        free: Those of them that hold no task.
        reserved: Slots promised to running requests that are not bound here yet.
        was_ready: Some replica has been ready in this life of the engine.
        recovery: The most that may be done with tasks of this stage after a death.
        empty_since: When the last ready replica was lost, if there is none; monotonic seconds.
        openings: The ready replicas with a free slot.
    """

    def __init__(self, spec: StageSpec) -> None:
        self.spec = spec
        self.replicas = [Replica(spec.id, index) for index in range(spec.replicas)]
        self.capacity = 0
        self.free = 0
        self.reserved = 0
        self.was_ready = False
        self.recovery: Recovery = spec.recovery
        self.empty_since = 0.0
        self.openings = Openings()
        self._turn = 0
        self._homes: OrderedDict[str, ReplicaId] = OrderedDict()

    def find(self, replica: ReplicaId) -> Replica | None:
        """Return the place that this very process fills; `None` for a former incarnation."""
        if not 0 <= replica.slot < len(self.replicas):
            return None
        place = self.replicas[replica.slot]
        return place if place.id == replica and place.phase in LIVE else None

    @property
    def target(self) -> int:
        """Return how many replicas the stage is meant to have."""
        return sum(place.is_wanted for place in self.replicas)

    def vacancy(self) -> Replica:
        """Return a wanted place without a process: one that was left, or a new one."""
        for place in self.replicas:
            if not place.is_wanted and place.phase is ReplicaPhase.STOPPED:
                place.is_wanted = True
                place.nonce = ""
                place.forget_deaths()
                return place
        return self._extended()

    def place_for(self, nonce: str) -> Replica:
        """Return the place of a process that joins: its former one, one that another left, or a new one."""
        left = [p for p in self.replicas if p.is_joined and p.phase is ReplicaPhase.STOPPED]
        own = self.joined_as(nonce)
        return own or (left[0] if left else self._extended())

    def joined_as(self, nonce: str) -> Replica | None:
        """Return the place that this process has joined, or had before it left."""
        return next((place for place in self.replicas if place.nonce == nonce), None)

    def _extended(self) -> Replica:
        self.replicas.append(Replica(self.spec.id, len(self.replicas)))
        return self.replicas[-1]

    def surplus(self) -> Replica:
        """Return the wanted place that is missed least: without a process, loading, with the least work."""
        wanted = [place for place in self.replicas if place.is_wanted]
        return min(wanted, key=lambda p: (_WORTH[p.phase], len(p.bound), -p.id.slot))

    @property
    def room(self) -> int:
        """Return how many more slots may be promised; negative if a death broke promises."""
        return self.free - self.reserved

    def has_lost(self, affinity: Affinity | None) -> bool:
        """Say whether the replica that a request requires is gone or leaves."""
        if affinity is None or affinity.mode == "prefer" or affinity.key not in self._homes:
            return False
        home = self.find(self._homes[affinity.key])
        return home is None or home.phase is ReplicaPhase.DRAINING

    def remember(self, affinity: Affinity | None, place: Replica) -> None:
        """Note who serves a key; the keys that were not used for longest are forgotten."""
        if affinity is None:
            return
        self._homes[affinity.key] = place.id
        self._homes.move_to_end(affinity.key)
        if len(self._homes) > REMEMBERED_KEYS:
            self._homes.popitem(last=False)

    def pick(self, affinity: Affinity | None = None) -> Replica | None:
        """Return the ready replica with a free slot and the least work; ties rotate.

        With an affinity it is the key's own replica while that has a free slot; `None` if it is
        required and has none.
        """
        if affinity is not None and affinity.key in self._homes:
            home = self.find(self._homes[affinity.key])
            if home is not None and home.phase is ReplicaPhase.READY and home.has_room:
                return home
            if affinity.mode == "require":
                return None
        self._turn += 1
        slot = self.openings.least(self._turn % max(len(self.replicas), 1))
        return None if slot is None else self.replicas[slot]

    def start(self, place: Replica) -> ReplicaId:
        """Mint the identity of the place's next process."""
        place.id = ReplicaId(
            place.id.stage, place.id.slot, IncarnationNumber(place.id.incarnation + 1)
        )
        place.phase = ReplicaPhase.STARTING
        place.slots = 0
        place.has_worked = False
        place.reported = None
        return place.id

    def become_ready(self, place: Replica, slots: int, recovery: Recovery) -> None:
        """Take a place that has loaded; `recovery` is what its backend allows."""
        place.slots = slots
        self.was_ready = True
        self.recovery = weakest(self.recovery, recovery)
        self.enter_ready(place)

    def enter_ready(self, place: Replica) -> None:
        """Count the place's slots in."""
        place.phase = ReplicaPhase.READY
        self.capacity += place.slots
        self.free += place.slots - len(place.bound)
        self.openings.add(place)

    def leave_ready(self, place: Replica, phase: ReplicaPhase, now: float) -> None:
        """Move a place to a phase without new work; count its slots out if they were in."""
        if place.phase is ReplicaPhase.READY:
            self.capacity -= place.slots
            self.free -= place.slots - len(place.bound)
            self.openings.remove(place)
            if not self.capacity:
                self.empty_since = now
        place.phase = phase

    def bind(self, place: Replica, task: TaskKey) -> None:
        """Give a reserved slot of a ready place to a task."""
        self.openings.remove(place)
        place.bound[task] = None
        self.openings.add(place)
        self.free -= 1
        self.reserved -= 1

    def unbind(self, place: Replica, task: TaskKey) -> None:
        """Free a task's slot."""
        if place.phase is not ReplicaPhase.READY:
            del place.bound[task]
            return
        self.openings.remove(place)
        del place.bound[task]
        self.openings.add(place)
        self.free += 1
