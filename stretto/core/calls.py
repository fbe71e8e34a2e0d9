"""Collective calls: a method run at replicas, beside their tasks, and one answer for all of them.

Rules
  * Each `RpcRequested` gets exactly one `AnswerRpc`, also if its channel is gone or the engine ends.
  * A call waits for nobody's task but an exclusive one for those that its replica already has. While it
    waits and while it runs, its replica gets no new task.
  * The answers have a deadline. Later ones are dropped; but they tell when the replica is free again.
  * Nothing here grows without bound: calls per channel, and calls that one replica owes answers to.

Theory of operation
  A *desk* is what one replica has to do with calls. A control call is sent at once. An exclusive call
  joins the desk's queue, and its replica leaves READY for CALLING; when the last bound task has ended it
  is sent, and when the queue is empty the replica is given back. `settle`, run at the end of each event
  while there are desks, sees both, and sees deaths; so no other part of the router must tell this one.

  An exclusive call that runs when its deadline passes still keeps its replica. If it does not end
  within the drain time-out either, the replica is evicted.

      requested ─► control ───────────────────────► sent ─► answered
               └─► exclusive ─► queued ─► drained ─► sent ─► answered ─► given back, or asleep
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from stretto.core import commands as do
from stretto.core.deadlines import DeadlineKind, Deadlines
from stretto.core.slots import Replica, ReplicaPhase
from stretto.errors import Failure, FailureKind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stretto.core import events as on
    from stretto.core.supervision import Supervision
    from stretto.types import CallClass, CallId, ChannelId, ReplicaId, StageId

MAX_OPEN_CALLS = 64
"""Calls that one channel may wait for."""

MAX_UNANSWERED_CALLS = 64
"""Calls that one replica may owe answers to, those that nobody waits for any more included."""

_CALLABLE = frozenset(
    {
        ReplicaPhase.READY,
        ReplicaPhase.SUSPECT,
        ReplicaPhase.CALLING,
        ReplicaPhase.ASLEEP,
        ReplicaPhase.DRAINING,
    }
)


class Call:
    """An open call.

    Attributes:
        waiting: The replicas that have not answered.
        outcomes: What came of it at each replica; `None` while that is open.
    """

    __slots__ = ("channel", "id", "method", "outcomes", "timeout_s", "waiting")

    def __init__(self, event: on.RpcRequested) -> None:
        self.id = event.call
        self.channel = event.channel
        self.method = event.method
        self.timeout_s = event.timeout_s
        self.waiting: dict[ReplicaId, None] = {}
        self.outcomes: dict[ReplicaId, do.CallOutcome | None] = {}


class _Desk:
    """What one replica has to do with calls.

    Attributes:
        queue: Exclusive calls that wait for its tasks.
        running: The exclusive call that was sent.
        unanswered: Every call that was sent.
        is_asleep: What it said last about taking tasks.
    """

    __slots__ = ("is_asleep", "queue", "running", "unanswered")

    def __init__(self, *, is_asleep: bool) -> None:
        self.queue: dict[CallId, None] = {}
        self.running: CallId | None = None
        self.unanswered: dict[CallId, None] = {}
        self.is_asleep = is_asleep

    @property
    def is_idle(self) -> bool:
        """Say whether nothing is left to do."""
        return not self.queue and not self.unanswered


class Calls:
    """All open calls.

    Args:
        supervision: Where replicas stand, and what holds them back.
        deadlines: Shared with the router; this machine owns the kinds `CALL` and `EXCLUSIVE`.
        out: Where commands are appended.
        linger_s: How long an exclusive call may keep its replica after its deadline.
    """

    def __init__(
        self,
        supervision: Supervision,
        deadlines: Deadlines,
        out: list[do.AnyCommand],
        linger_s: float,
    ) -> None:
        self._supervision = supervision
        self._deadlines = deadlines
        self._out = out
        self._linger_s = linger_s
        self._calls: dict[CallId, Call] = {}
        self._desks: dict[ReplicaId, _Desk] = {}
        self._methods: dict[
            tuple[StageId, int], tuple[ReplicaId, tuple[tuple[str, CallClass], ...]]
        ] = {}

    def __len__(self) -> int:
        """Return how many calls are open."""
        return len(self._calls)

    def __contains__(self, call: CallId) -> bool:
        """Say whether a call is open."""
        return call in self._calls

    @property
    def is_busy(self) -> bool:
        """Say whether `settle` may find something."""
        return bool(self._desks)

    def learn(self, replica: ReplicaId, methods: tuple[tuple[str, CallClass], ...]) -> None:
        """Note what can be called at a replica."""
        self._methods[replica.stage, replica.slot] = (replica, methods)

    # ------------------------------------------------------------------ what happens to a call

    def requested(self, event: on.RpcRequested, now: float) -> None:
        """Begin a call, or refuse it."""
        targets = self._targets(event)
        if isinstance(targets, Failure):
            self.refuse(event, targets)
            return
        call = self._calls[event.call] = Call(event)
        self._deadlines.set(DeadlineKind.CALL, call.id, now + call.timeout_s)
        for place, _ in targets:
            call.outcomes[place.id] = None
            call.waiting[place.id] = None
        for place, call_class in targets:
            self._begin(call, place, call_class, now)
        self._end_if_complete(call)

    def refuse(self, event: on.RpcRequested, failure: Failure) -> None:
        """Answer a call that was not begun."""
        self._out.append(do.AnswerRpc(channel=event.channel, call=event.call, failure=failure))

    def answered(self, event: on.RpcAnswered) -> bool:
        """Take a replica's answer; return whether somebody has waited for it."""
        desk = self._desks.get(event.replica)
        if desk is None or event.call not in desk.unanswered:
            return False
        del desk.unanswered[event.call]
        if desk.running == event.call:
            desk.running = None
            desk.is_asleep = event.is_asleep
            self._deadlines.clear(DeadlineKind.EXCLUSIVE, event.replica)
        call = self._calls.get(event.call)
        if call is None:
            return False
        self._note(call, event.replica, "ok" if event.failure is None else "error", event.failure)
        self._end_if_complete(call)
        return True

    def expire(self, call_id: CallId, now: float) -> None:
        """End a call whose time is over."""
        call = self._calls[call_id]
        silent = list(call.waiting)
        failure = Failure(
            kind=FailureKind.DEADLINE_EXCEEDED,
            detail=f"{call.method!r} was not answered within {call.timeout_s:g} s by "
            f"{', '.join(str(replica) for replica in silent)}",
            where=str(silent[0]),
        )
        for replica in silent:
            self._note(call, replica, "error", failure)
            self._leave(call, replica, now)
        self._end(call, failure)

    def channel_closed(self, channel: ChannelId, now: float) -> None:
        """Nobody waits for a channel's calls any more."""
        failure = Failure(kind=FailureKind.CANCELLED, detail="its API process is gone")
        for call in [each for each in self._calls.values() if each.channel == channel]:
            for replica in call.waiting:
                self._leave(call, replica, now)
            self._end(call, failure)

    def close(self) -> None:
        """The engine ends, and with it every wait."""
        failure = Failure(
            kind=FailureKind.ENGINE_DEAD,
            detail="the server shut down before it was answered",
            code="server_shutting_down",
        )
        for call in list(self._calls.values()):
            self._end(call, failure)
        for replica in self._desks:
            self._deadlines.clear(DeadlineKind.EXCLUSIVE, replica)
        self._desks.clear()

    def settle(self) -> bool:
        """Go on wherever an event has made that possible; return whether a replica takes tasks again."""
        has_freed = False
        for replica, desk in list(self._desks.items()):
            place = self._supervision.live(replica)
            if place is None:
                self._died(replica, desk)
                continue
            if place.phase is ReplicaPhase.DRAINING:
                self._turn_away(replica, desk)
            elif desk.running is None and desk.queue and not place.bound:
                self._send_next(place, desk)
            elif desk.running is None and not desk.queue and place.phase is ReplicaPhase.CALLING:
                self._supervision.give_back(place, is_asleep=desk.is_asleep)
                has_freed |= not desk.is_asleep
            if desk.is_idle:
                del self._desks[replica]
        return has_freed

    # ------------------------------------------------------------------ where a call goes

    def _targets(self, event: on.RpcRequested) -> list[tuple[Replica, CallClass]] | Failure:
        """Return the places that a call goes to, or why it goes nowhere."""
        mine = sum(call.channel == event.channel for call in self._calls.values())
        if mine >= MAX_OPEN_CALLS:
            return Failure(
                kind=FailureKind.OVERLOADED,
                detail=f"{mine} calls wait for their answers, which is the limit; try again later",
                code="queue_full",
                retry_after_s=1.0,
            )
        pools = self._supervision.pools
        for stage in event.stages:
            if stage not in pools:
                return Failure(
                    kind=FailureKind.INVALID_REQUEST,
                    detail=f"there is no stage {stage!r}; this engine has: {', '.join(pools)}",
                    param="stages",
                    code="unsupported_value",
                )
        offers = {
            place.id: (place, dict(self._methods_of(place)))
            for stage in dict.fromkeys(event.stages or pools)
            for place in pools[stage].replicas
            if place.phase in _CALLABLE
        }
        return _chosen(event, offers)

    def _methods_of(self, place: Replica) -> tuple[tuple[str, CallClass], ...]:
        replica, methods = self._methods[place.id.stage, place.id.slot]
        assert replica == place.id, f"{place.id}: its methods are not known"
        return methods

    def _begin(self, call: Call, place: Replica, call_class: CallClass, now: float) -> None:
        desk = self._desks.get(place.id)
        if desk is None:
            desk = _Desk(is_asleep=place.phase is ReplicaPhase.ASLEEP)
            self._desks[place.id] = desk
        owed = len(desk.unanswered) + len(desk.queue)
        if owed >= MAX_UNANSWERED_CALLS:
            failure = Failure(
                kind=FailureKind.OVERLOADED,
                detail=f"{place.id} has not answered {owed} calls; try again later",
                where=str(place.id),
                code="queue_full",
                retry_after_s=1.0,
            )
            self._note(call, place.id, "error", failure)
        elif call_class == "control":
            self._send(call.id, call.method, place, desk, call_class)
        else:
            desk.queue[call.id] = None
            if place.phase not in (ReplicaPhase.CALLING, ReplicaPhase.DRAINING):
                self._supervision.hold_back(place, now)

    def _send_next(self, place: Replica, desk: _Desk) -> None:
        """Send the first of the exclusive calls: the replica holds no task."""
        call_id = next(iter(desk.queue))
        del desk.queue[call_id]
        desk.running = call_id
        self._send(call_id, self._calls[call_id].method, place, desk, "exclusive")

    def _send(
        self, call_id: CallId, method: str, place: Replica, desk: _Desk, call_class: CallClass
    ) -> None:
        desk.unanswered[call_id] = None
        self._out.append(
            do.CallReplica(replica=place.id, call=call_id, method=method, call_class=call_class)
        )

    # ------------------------------------------------------------------ how a call ends

    def _note(
        self,
        call: Call,
        replica: ReplicaId,
        status: Literal["ok", "error", "died"],
        failure: Failure | None = None,
    ) -> None:
        """Note what came of a call at a replica."""
        call.outcomes[replica] = do.CallOutcome(replica=replica, status=status, failure=failure)
        call.waiting.pop(replica, None)

    def _leave(self, call: Call, replica: ReplicaId, now: float) -> None:
        """Wait no more for a replica: forget a call that was not sent, and bound one that runs alone."""
        desk = self._desks[replica]
        desk.queue.pop(call.id, None)
        if desk.running == call.id:
            self._deadlines.set(DeadlineKind.EXCLUSIVE, replica, now + self._linger_s)

    def _died(self, replica: ReplicaId, desk: _Desk) -> None:
        """A replica is no more: whoever waits for it hears so."""
        del self._desks[replica]
        self._deadlines.clear(DeadlineKind.EXCLUSIVE, replica)
        place = self._supervision.place_of(replica)
        has_died = place.phase in (ReplicaPhase.DEAD, ReplicaPhase.PARKED)
        reason = place.reason if has_died else "it was stopped"
        failure = Failure(
            kind=FailureKind.REPLICA_LOST,
            detail=f"replica {replica} is gone: {reason}",
            where=str(replica),
            retry_after_s=1.0,
        )
        self._note_all((*desk.unanswered, *desk.queue), replica, "died", failure)

    def _turn_away(self, replica: ReplicaId, desk: _Desk) -> None:
        """A replica leaves when its last task has ended: no exclusive call gets its turn any more."""
        queue, desk.queue = desk.queue, {}
        failure = Failure(
            kind=FailureKind.NO_REPLICA,
            detail=f"replica {replica} drains and will leave",
            where=str(replica),
            retry_after_s=1.0,
        )
        self._note_all(tuple(queue), replica, "error", failure)

    def _note_all(
        self,
        call_ids: tuple[CallId, ...],
        replica: ReplicaId,
        status: Literal["error", "died"],
        failure: Failure,
    ) -> None:
        for call_id in call_ids:
            call = self._calls.get(call_id)
            if call is not None:
                self._note(call, replica, status, failure)
                self._end_if_complete(call)

    def _end_if_complete(self, call: Call) -> None:
        if not call.waiting:
            self._end(call)

    def _end(self, call: Call, failure: Failure | None = None) -> None:
        """Answer a call: the only way out."""
        del self._calls[call.id]
        self._deadlines.clear(DeadlineKind.CALL, call.id)
        outcomes = tuple(each for each in call.outcomes.values() if each is not None)
        self._out.append(
            do.AnswerRpc(channel=call.channel, call=call.id, outcomes=outcomes, failure=failure)
        )

    # ------------------------------------------------------------------ what is always true

    def check_invariants(self) -> None:
        """Raise `AssertionError` if the state contradicts itself."""
        for call in self._calls.values():
            assert call.waiting, f"{call.id}: waits for nobody"
            assert self._deadlines.has(DeadlineKind.CALL, call.id), f"{call.id}: deadline"
            for replica in call.waiting:
                desk = self._desks[replica]
                assert (call.id in desk.queue) != (call.id in desk.unanswered), f"{call.id}: lost"
        for replica, desk in self._desks.items():
            self._check_desk(replica, desk)
        for place in self._supervision.places():
            desk = self._desks.get(place.id)
            is_held = desk is not None and (desk.running is not None or bool(desk.queue))
            if place.phase is ReplicaPhase.CALLING:
                assert is_held, f"{place.id}: held back for nothing"
            else:
                assert not is_held or place.phase is ReplicaPhase.DRAINING, f"{place.id}: not held"
            assert place.phase is not ReplicaPhase.ASLEEP or not place.bound, f"{place.id}: sleeps"

    def _check_desk(self, replica: ReplicaId, desk: _Desk) -> None:
        place = self._supervision.live(replica)
        assert place is not None, f"{replica}: a desk of one that is gone"
        assert not desk.is_idle, f"{replica}: an idle desk"
        assert len(desk.unanswered) + len(desk.queue) <= MAX_UNANSWERED_CALLS, f"{replica}: bound"
        assert all(call_id in self._calls for call_id in desk.queue), f"{replica}: queue"
        if desk.running is not None:
            assert desk.running in desk.unanswered, f"{replica}: running"
            assert not place.bound, f"{replica}: an exclusive call runs beside tasks"
        else:
            assert place.bound or not desk.queue, f"{replica}: an exclusive call waits for nothing"
        is_unwanted = desk.running is not None and desk.running not in self._calls
        has_deadline = self._deadlines.has(DeadlineKind.EXCLUSIVE, replica)
        assert has_deadline == is_unwanted, f"{replica}: exclusive deadline"


def _chosen(
    event: on.RpcRequested,
    offers: Mapping[ReplicaId, tuple[Replica, Mapping[str, CallClass]]],
) -> list[tuple[Replica, CallClass]] | Failure:
    """Return the places that have the method, if all do that must."""
    for stage in event.stages or (None,):
        here = [
            methods for replica, (_, methods) in offers.items() if stage in (None, replica.stage)
        ]
        if not here:
            where = "this engine" if stage is None else f"stage {stage}"
            return Failure(
                kind=FailureKind.NO_REPLICA,
                detail=f"{where} has no replica that can be called now",
                where=stage or "",
                retry_after_s=1.0,
            )
        is_offered = any if stage is None else all
        if not is_offered(event.method in methods for methods in here):
            where = "there is" if stage is None else f"stage {stage!r} has"
            allowed = dict.fromkeys(name for methods in here for name in methods)
            return Failure(
                kind=FailureKind.INVALID_REQUEST,
                detail=f"{where} no method {event.method!r}; methods are {', '.join(allowed)}",
                param="method",
                code="unsupported_value",
            )
    return [
        (place, methods[event.method])
        for place, methods in offers.values()
        if event.method in methods
    ]
