"""Keeps each stage at its number of processes: starts, watches, replaces and retires them.

    StartReplica ──► STARTING ──Joined──► LOADING ──Ready──► READY ──DrainRequested──► DRAINING
                        │                    │               │ ▲ │                        │
                        │                    │         silent▼ │ │                        │
                        │                    │              SUSPECT                       │
                        └────────────────────┴──── death ──────┘                    idle, death
                                               │                                          │
    StartReplica ◄──back-off, re-arm── DEAD or PARKED                                  STOPPED

A process that joins from elsewhere begins with LOADING, and ends with STOPPED: it comes back by itself.
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
    from stretto.types import Recovery, ReplicaId, StageId


class Supervision:
    """All pools, and the life of the process in each place.

    Args:
        deployment: Which stages there are, and the limits.
        deadlines: Shared with the router; this machine owns the kinds `START`, `PROGRESS`,
            `RESTART` and `DRAIN`.
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

    def has_place(self, replica: ReplicaId) -> bool:
        """Say whether there is, or was, a place for such a process."""
        pool = self.pools.get(replica.stage)
        return pool is not None and 0 <= replica.slot < len(pool.replicas)

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

    def admit(self, stage: StageId, nonce: str, connection: int, now: float) -> None:
        """A process from elsewhere joins, or comes back under its nonce."""
        pool = self.pools[stage]
        place = pool.place_for(nonce)
        place.nonce, place.connection, place.is_wanted = nonce, connection, False
        self._out.append(
            do.AdmitReplica(replica=pool.start(place), nonce=nonce, connection=connection)
        )
        self.joined(place, now)

    def progressed(self, place: Replica, what: str, fraction: float, now: float) -> None:
        """The process goes on loading."""
        self._watch_start(place, now)
        self._announce(place, what, fraction)

    def ready(self, place: Replica, slots: int, recovery: Recovery) -> None:
        """The process takes tasks."""
        self._deadlines.clear(DeadlineKind.START, place.id)
        self.pools[place.id.stage].become_ready(place, slots, recovery)
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
            self.pools[place.id.stage].enter_ready(place)
        self._announce(place, fraction=1.0)

    def watch(self, place: Replica, now: float) -> None:
        """The process has got a task: it must show that it goes on."""
        if len(place.bound) == 1:
            place.alive_at = now
            self._deadlines.set(DeadlineKind.PROGRESS, place.id, now + self._suspect_s(place))

    def alive(self, place: Replica, now: float) -> bool:
        """The process goes on; return whether it may be given work again."""
        place.alive_at = now
        if place.phase is not ReplicaPhase.SUSPECT:
            return False
        self.pools[place.id.stage].enter_ready(place)
        self._deadlines.set(DeadlineKind.PROGRESS, place.id, now + self._suspect_s(place))
        self._announce(place, fraction=1.0)
        return True

    def is_overdue(
        self, place: Replica, silent_since: float, now: float, *, has_work: bool
    ) -> bool:
        """Say whether a process has been silent for too long; suspect it in good time before."""
        timeout_s = self.pools[place.id.stage].spec.progress_timeout_s
        if has_work and now >= silent_since + timeout_s:
            return True
        look_at = silent_since + self._suspect_s(place)
        if has_work and now >= look_at:
            look_at = silent_since + timeout_s
            if place.phase is ReplicaPhase.READY:
                self.pools[place.id.stage].leave_ready(place, ReplicaPhase.SUSPECT, now)
                self._announce(place, f"silent for {now - silent_since:.1f} s")
        elif place.phase is ReplicaPhase.SUSPECT:
            self.alive(place, place.alive_at)
        if look_at <= now:
            look_at = now + self._suspect_s(place)
        self._deadlines.set(DeadlineKind.PROGRESS, place.id, look_at)
        return False

    def rest(self, place: Replica, now: float) -> None:
        """The process has no task any more; one that drains may go."""
        self._deadlines.clear(DeadlineKind.PROGRESS, place.id)
        if place.phase is ReplicaPhase.DRAINING:
            self.stop(place, now)
        elif place.phase is ReplicaPhase.SUSPECT:
            self.alive(place, now)
            self._deadlines.clear(DeadlineKind.PROGRESS, place.id)

    def _suspect_s(self, place: Replica) -> float:
        return self.pools[place.id.stage].spec.progress_timeout_s / 3

    def scale(self, stage: StageId, replicas: int, now: float) -> None:
        """Start or drain processes until the stage has its new number."""
        pool = self.pools[stage]
        while pool.target < replicas:
            self._grow(pool, now)
        while pool.target > replicas:
            self.drain(pool.surplus(), now)

    def replace(self, place: Replica, now: float) -> None:
        """Drain a process whose successor starts at once, in another place."""
        self._grow(self.pools[place.id.stage], now)
        self.drain(place, now)

    def _grow(self, pool: Pool, now: float) -> None:
        self.start(pool.vacancy(), now)
        self._out.append(do.AnnounceTarget(stage=pool.spec.id, replicas=pool.target))

    def drain(self, place: Replica, now: float) -> None:
        """Give the process nothing new, and let it leave when it has nothing left."""
        place.is_wanted = False
        pool = self.pools[place.id.stage]
        self._out.append(do.AnnounceTarget(stage=place.id.stage, replicas=pool.target))
        if place.phase not in LIVE:
            place.phase = ReplicaPhase.STOPPED
            self._clear_deadlines(place)
            self._announce(place)
            return
        pool.leave_ready(place, ReplicaPhase.DRAINING, now)
        if not place.bound:
            if place.is_joined:  # else it would take the end of its link for a broken one
                self._out.append(do.DrainReplica(replica=place.id))
            self.stop(place, now)
            return
        self._announce(place)
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
        if place.phase is ReplicaPhase.DRAINING or place.is_joined:
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
        for kind in (
            DeadlineKind.START,
            DeadlineKind.PROGRESS,
            DeadlineKind.DRAIN,
            DeadlineKind.RESTART,
        ):
            self._deadlines.clear(kind, place.id)

    def _announce(self, place: Replica, detail: str = "", fraction: float = 0.0) -> None:
        place.detail, place.fraction = detail, fraction
        self._out.append(do.Announce(state=place.state()))
