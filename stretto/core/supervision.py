"""Keeps each stage at its number of processes: starts, watches, replaces and retires them.

    StartReplica ──► STARTING ──Joined──► LOADING ──Ready──► READY ──DrainRequested──► DRAINING
                        │                    │                 │                          │
                        └────────────────────┴──── death ──────┘                    idle, death
                                               │                                          │
    StartReplica ◄──back-off, re-arm── DEAD or PARKED                                  STOPPED

An exclusive call takes a process from READY to CALLING, and its answer back, or to ASLEEP; see `calls`.
It holds no requests: what a dead replica leaves behind is the router's to recover.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stretto.core import commands as do
from stretto.core.deadlines import DeadlineKind, Deadlines
from stretto.core.slots import LIVE, Pool, Replica, ReplicaPhase

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stretto.core.graph import Deployment
    from stretto.types import ReplicaId, StageId


class Supervision:
    """All pools, and the life of the process in each place.

    Args:
        deployment: Which stages there are, and the limits.
        deadlines: Shared with the router; this machine owns the kinds `START`, `RESTART` and `DRAIN`.
        out: Where commands are appended.
    """

    def __init__(
        self, deployment: Deployment, deadlines: Deadlines, out: list[do.AnyCommand]
    ) -> None:
        self.pools: dict[StageId, Pool] = {stage.id: Pool(stage) for stage in deployment.stages}
        self._limits = deployment.limits
        self._deadlines = deadlines
        self._out = out

    def places(self) -> Iterator[Replica]:
        """Yield every place."""
        for pool in self.pools.values():
            yield from pool.replicas

    def place_of(self, replica: ReplicaId) -> Replica:
        """Return the place that the process fills or filled."""
        return self.pools[replica.stage].replicas[replica.slot]

    def live(self, replica: ReplicaId) -> Replica | None:
        """Return the place that this very process fills; `None` for a former incarnation."""
        pool = self.pools.get(replica.stage)
        return None if pool is None else pool.find(replica)

    def start(self, place: Replica, now: float) -> None:
        """Ask for a process."""
        self._out.append(do.StartReplica(replica=self.pools[place.id.stage].start(place)))
        self._watch_start(place, now)
        self._announce(place)

    def joined(self, place: Replica, now: float) -> None:
        """The process has said hello."""
        place.phase = ReplicaPhase.LOADING
        self._watch_start(place, now)
        self._announce(place)

    def progressed(self, place: Replica, what: str, fraction: float, now: float) -> None:
        """The process goes on loading."""
        self._watch_start(place, now)
        self._announce(place, what, fraction)

    def ready(self, place: Replica, slots: int, *, may_retry: bool) -> None:
        """The process takes tasks."""
        self._deadlines.clear(DeadlineKind.START, place.id)
        self.pools[place.id.stage].become_ready(place, slots, may_retry=may_retry)
        self._announce(place, fraction=1.0)

    def hold_back(self, place: Replica, now: float) -> None:
        """Give the process nothing new: an exclusive call waits for what it has."""
        self.pools[place.id.stage].leave_ready(place, ReplicaPhase.CALLING, now)
        self._announce(place, fraction=1.0)

    def give_back(self, place: Replica, *, is_asleep: bool) -> None:
        """The last exclusive call has ended: the process takes tasks again, unless it sleeps."""
        if is_asleep:
            place.phase = ReplicaPhase.ASLEEP
        else:
            self.pools[place.id.stage].become_ready_again(place)
        self._announce(place, fraction=1.0)

    def drain(self, place: Replica, now: float) -> None:
        """Give the process nothing new, and let it leave when it has nothing left."""
        self.pools[place.id.stage].leave_ready(place, ReplicaPhase.DRAINING, now)
        self._announce(place)
        if not place.bound:
            self.stop(place, now)
            return
        self._deadlines.set(DeadlineKind.DRAIN, place.id, now + self._limits.drain_timeout_s)
        self._out.append(do.DrainReplica(replica=place.id))

    def stop(self, place: Replica, now: float, reason: str = "") -> None:
        """Want no process in this place any more."""
        was_live = place.phase in LIVE
        self.pools[place.id.stage].leave_ready(place, ReplicaPhase.STOPPED, now)
        self._clear_deadlines(place)
        if was_live:
            self._out.append(do.StopReplica(replica=place.id))
            self._announce(place, reason)

    def bury(self, place: Replica, reason: str, now: float, *, for_good: bool = False) -> None:
        """The process is gone, or must go: plan its successor, unless it was leaving anyway.

        Args:
            place: Where.
            reason: Why.
            now: Monotonic seconds.
            for_good: The process said itself that it can't serve.
        """
        if place.phase is ReplicaPhase.DRAINING:
            self.stop(place, now, reason)
            return
        self.pools[place.id.stage].leave_ready(place, ReplicaPhase.DEAD, now)
        self._clear_deadlines(place)
        self._out.append(do.StopReplica(replica=place.id))
        again_at = place.died(reason, self._limits, now, for_good=for_good)
        self._deadlines.set(DeadlineKind.RESTART, place.id, again_at)
        self._announce(place, reason)

    def _watch_start(self, place: Replica, now: float) -> None:
        timeout_s = self.pools[place.id.stage].spec.start_timeout_s
        self._deadlines.set(DeadlineKind.START, place.id, now + timeout_s)

    def _clear_deadlines(self, place: Replica) -> None:
        for kind in (DeadlineKind.START, DeadlineKind.DRAIN, DeadlineKind.RESTART):
            self._deadlines.clear(kind, place.id)

    def _announce(self, place: Replica, detail: str = "", fraction: float = 0.0) -> None:
        place.detail, place.fraction = detail, fraction
        self._out.append(do.Announce(state=place.state()))
