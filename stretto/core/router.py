"""The router answers one question: *this happened; what must be done?* Nothing else decides.

Rules
  * `handle` is the only door. It validates first and mutates then: an impossible event raises
    `InvalidTransition`, and nothing has changed.
  * A late event (output of a cancelled request, message of a former incarnation) is not impossible:
    it is counted, its payload is released, and nothing else happens.
  * Each accepted request ends in exactly one of `Finish`, `Fail`, `Cancelled`; no `Emit` follows it.
  * One function, `_end`, cleans up after every kind of end.
  * What has become free is given away at the end of the event, so that no slot goes to a request that
    the same event ends; a request that can't be bound any more ends there too, never in mid-event.

Theory of operation
  A request runs the subgraph (`graph.Plan`) between the inputs it brings and the outputs it wants.
  Its stages fall into groups that stream concurrently. When a stage has what it can start with, a slot
  is reserved at every stage of its group, all or nothing; requests that find no room wait in line.
  Tasks are bound to replicas one by one, each when it can start, by least outstanding work.

  Chunks are payload references. A chunk of a stream edge is fed at once; a full edge keeps its chunks
  until the source has ended. Windows over edges and outputs give the producer its send right: credit
  comes back as `InputConsumed` and `ConsumerDrained`, and goes on as `Grant`.

  What a task was fed is kept as long as another attempt may need it (`stretto.types.Recovery`): under
  `retry` until its first chunk was forwarded, since after that the client would hear a seam; under
  `replay` to its end, or up to the last boundary that it named, behind which another attempt goes on.
  A replaying attempt is told how much was forwarded and leaves that out. Until then a death of its
  replica costs nothing: the task is dispatched again under the next attempt number.

  A replica that has work shows that it goes on (`ReplicaAlive`, or anything about its tasks). One that
  is silent becomes suspect and gets nothing new, then it is evicted like a dead one.

  Companions are requests that go together: their leader, which is submitted first, waits until all are
  there, stands in line for all of them, and finishes last; what fails one of them ends all.

  A task that has ended wants no more input: its sources are told to stop if nobody else wants what
  they make. Such a task is *abandoned*; however it ends, that is no failure.

  Time is in the events. Whatever waits has a deadline; `next_deadline` is `None` when nothing waits,
  so an idle engine sets no timer.

Table
  `LEGAL` says for each event about a request in which states it is legal and what may come of it; the
  code looks there first. It is drawn in `docs/reference/router-table.md`.

Other machines: `supervision` (processes), `admission` (who is next), `flow` (windows), `waits` (what
takes too long), `holds` (payloads), `calls` (methods of replicas), `deadlines`.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, assert_never

import msgspec

from stretto.core import commands as do
from stretto.core import events as on
from stretto.core.admission import DrainRate, Group, WaitingLine
from stretto.core.calls import Calls
from stretto.core.deadlines import DeadlineKey, DeadlineKind, Deadlines
from stretto.core.graph import Deployment, PipelineSpec, Plan, induce, validated
from stretto.core.holds import Holds
from stretto.core.requests import Request, RequestState, Task, TaskState
from stretto.core.slots import LIVE, Pool, Replica, ReplicaPhase
from stretto.core.supervision import Supervision
from stretto.core.waiting import OpenRequest, open_request
from stretto.core.waits import shortest_s, waits_of
from stretto.errors import Failure, FailureKind, InvalidTransition
from stretto.types import (
    INLINE,
    Boundary,
    CallId,
    ChannelId,
    InputName,
    OutputName,
    PayloadRef,
    PipelineName,
    Recovery,
    ReplicaId,
    RequestId,
    StageId,
    TaskKey,
    weakest,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from stretto.core.flow import EdgeFlow
    from stretto.core.story import Story

_QUEUED, _RUNNING = RequestState.QUEUED, RequestState.RUNNING
_DRAINING, _DONE = RequestState.DRAINING, RequestState.DONE

LATE: tuple[RequestState, ...] = ()
"""No state may come of it: the event is counted, its payload is released, and nothing else happens."""

LEGAL: Mapping[type[on.Event], Mapping[RequestState, tuple[RequestState, ...]]] = {
    on.RequestSubmitted: {_DONE: (_QUEUED, _RUNNING, _DONE)},
    on.InputAppended: {
        _QUEUED: (_QUEUED, _RUNNING, _DONE),
        _RUNNING: (_RUNNING, _DRAINING, _DONE),
        _DRAINING: LATE,
        _DONE: LATE,
    },
    on.InputClosed: {
        _QUEUED: (_QUEUED, _RUNNING, _DONE),
        _RUNNING: (_RUNNING, _DRAINING, _DONE),
        _DRAINING: LATE,
        _DONE: LATE,
    },
    on.RequestAborted: {
        _QUEUED: (_DONE,),
        _RUNNING: (_DRAINING, _DONE),
        _DRAINING: LATE,
        _DONE: LATE,
    },
    on.RequestBroken: {
        _QUEUED: (_DONE,),
        _RUNNING: (_DRAINING, _DONE),
        _DRAINING: LATE,
        _DONE: LATE,
    },
    on.ConsumerDrained: {_RUNNING: (_RUNNING,), _DRAINING: LATE, _DONE: LATE},
    on.ChunkProduced: {_RUNNING: (_RUNNING, _DRAINING), _DRAINING: LATE, _DONE: LATE},
    on.InputConsumed: {_RUNNING: (_RUNNING,), _DRAINING: LATE, _DONE: LATE},
    on.TaskFinished: {_RUNNING: (_RUNNING, _DONE), _DRAINING: (_DRAINING, _DONE), _DONE: LATE},
    on.TaskFailed: {
        _RUNNING: (_RUNNING, _DRAINING, _DONE),
        _DRAINING: (_DRAINING, _DONE),
        _DONE: LATE,
    },
    on.TaskCancelled: {_RUNNING: (_RUNNING, _DONE), _DRAINING: (_DRAINING, _DONE), _DONE: LATE},
}
"""Event and state of its request (`DONE`: not known, or not any more) to the states that may come of it.

An absent pair is impossible and raises. An event of a former attempt is late in every state.
"""

ARCHIVED_STORIES = 256
"""Stories of ended requests that are kept for `story()`."""

MAX_REPLICAS = 256
"""Most replicas that a stage may have."""

MAX_KEPT_CHUNKS = 65_536
"""Most chunks and pieces of input that one request may keep, however small they are."""

MAX_COMPANIONS = 15
"""Most requests that may go with one."""

_TERMINALS = {do.Finish: "finished", do.Fail: "failed", do.Cancelled: "cancelled"}


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """Totals since the start.

    received = rejected + accepted; accepted = finished + failed + cancelled + what is open.
    """

    received: int = 0
    rejected: int = 0
    accepted: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    retried: int = 0
    late: int = 0
    replica_deaths: int = 0


class Reported(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica's backend told last; see `stretto.core.events.StatsReported`."""

    replica: ReplicaId
    running: int
    waiting: int
    values: dict[str, float]


class StageStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges of one stage."""

    stage: StageId
    capacity: int
    bound: int
    reserved: int
    target: int
    replicas: tuple[tuple[ReplicaId, str], ...]
    reported: tuple[Reported, ...] = ()


class Statistics(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot; every gauge is zero when nothing is in flight."""

    counters: Counters
    queued: int
    running: int
    draining: int
    held_payloads: int
    deadlines: int
    channels: int
    stages: tuple[StageStatistics, ...]
    calls: int = 0


class _Channel:
    """What belongs to one API process."""

    __slots__ = ("held", "requests")

    def __init__(self) -> None:
        self.requests: dict[RequestId, None] = {}
        self.held: dict[PayloadRef, int] = {}


class Router:
    """Decides everything, does nothing. Deterministic: the same events give the same commands.

    Args:
        deployment: What is served; checked here.

    Raises:
        ConfigError: The deployment is unsound.
    """

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = validated(deployment)
        self._limits = deployment.limits
        self._pipelines: dict[PipelineName, PipelineSpec] = {
            p.name: p for p in deployment.pipelines
        }
        self._plans: dict[
            tuple[PipelineName, tuple[InputName, ...], tuple[OutputName, ...]], Plan | None
        ] = {}
        self._channels: dict[ChannelId, _Channel] = {}
        self._requests: dict[RequestId, Request] = {}
        self._queued: dict[PipelineName, dict[RequestId, None]] = {p: {} for p in self._pipelines}
        self._line = WaitingLine()
        self._unbound: dict[StageId, dict[RequestId, None]] = {s.id: {} for s in deployment.stages}
        self._drain_rate = DrainRate()
        self._holds = Holds()
        self._deadlines = Deadlines()
        self._archive: OrderedDict[RequestId, Story] = OrderedDict()
        self._counts: dict[str, int] = dict.fromkeys(Counters.__struct_fields__, 0)
        self._out: list[do.AnyCommand] = []
        self._supervision = Supervision(deployment, self._deadlines, self._out)
        self._pools: dict[StageId, Pool] = self._supervision.pools
        self._calls = Calls(
            self._supervision, self._deadlines, self._out, self._limits.drain_timeout_s
        )
        self._must_admit = False
        self._has_started = False
        self._is_stopping = False
        self._has_exited = False
        self._now = 0.0

    # ------------------------------------------------------------------ the door

    def handle(self, event: on.AnyEvent) -> tuple[do.AnyCommand, ...]:
        """Take one event and return what must be done, in order.

        Raises:
            InvalidTransition: The event is impossible in this state; nothing but the time has changed.
        """
        self._now = max(self._now, event.now)
        self._transition(event)
        if self._calls.is_busy:
            self._must_admit |= self._calls.settle()
        while self._must_admit:
            self._admit()
        if self._is_stopping and not self._requests:
            self._exit()
        commands = tuple(self._out)
        self._out.clear()
        return commands

    def next_deadline(self) -> float | None:
        """Return when `DeadlinePassed` is due, in monotonic seconds; `None` if nothing waits."""
        return self._deadlines.next()

    def _transition(  # noqa: C901, PLR0912, PLR0915 - one arm per event
        self, event: on.AnyEvent
    ) -> None:
        match event:
            case on.ChunkProduced():
                self._on_chunk_produced(event)
            case on.InputConsumed():
                self._on_input_consumed(event)
            case on.ConsumerDrained():
                self._on_consumer_drained(event)
            case on.PayloadDone():
                self._on_payload_done(event)
            case on.TaskFinished():
                self._on_task_finished(event)
            case on.TaskFailed():
                self._on_task_failed(event)
            case on.TaskCancelled():
                self._on_task_cancelled(event)
            case on.RequestSubmitted():
                self._on_request_submitted(event)
            case on.InputAppended():
                self._on_input_appended(event)
            case on.InputClosed():
                self._on_input_closed(event)
            case on.RequestAborted():
                self._on_request_aborted(event)
            case on.RequestBroken():
                self._on_request_broken(event)
            case on.EngineStarted():
                self._on_engine_started()
            case on.ChannelOpened():
                self._on_channel_opened(event)
            case on.ChannelClosed():
                self._on_channel_closed(event)
            case on.ReplicaOffered():
                self._on_replica_offered(event)
            case on.ReplicaJoined():
                self._on_replica_joined(event)
            case on.ReplicaProgressed():
                self._on_replica_progressed(event)
            case on.ReplicaReady():
                self._on_replica_ready(event)
            case on.StatsReported():
                self._on_stats_reported(event)
            case on.ReplicaAlive():
                self._on_replica_alive(event)
            case on.ReplicaStartFailed():
                self._on_replica_start_failed(event)
            case on.ReplicaDied():
                self._on_replica_died(event)
            case on.DrainRequested():
                self._on_drain_requested(event)
            case on.PollerFailed():
                self._on_poller_failed(event)
            case on.ScaleRequested():
                self._on_scale_requested(event)
            case on.RpcRequested():
                self._on_rpc_requested(event)
            case on.RpcAnswered():
                self._on_rpc_answered(event)
            case on.DeadlinePassed():
                self._on_deadline_passed()
            case on.ShutdownRequested():
                self._on_shutdown_requested(event)
            case _:
                assert_never(event)

    # ------------------------------------------------------------------ what can be asked

    def story(self, request: RequestId) -> Story | None:
        """Return what happened to a live or recently ended request; `None` if it is not known."""
        live = self._requests.get(request)
        return live.story if live is not None else self._archive.get(request)

    def named(self, name: str) -> tuple[RequestId, ...]:
        """Return the requests, live or recently ended, that have this name or this label."""
        live = [(request.id, request.story.label) for request in self._requests.values()]
        ended = [(request, story.label) for request, story in self._archive.items()]
        return tuple(request for request, label in (*ended, *live) if name in (request, label))

    def names(self) -> tuple[str, ...]:
        """Return the names and labels by which `named` finds something: ended requests, then live ones."""
        live = ((request.id, request.story) for request in self._requests.values())
        stories = (*self._archive.items(), *live)
        names = (name for request, story in stories for name in (request, story.label) if name)
        return tuple(dict.fromkeys(names))

    def waiting(self, now: float) -> tuple[OpenRequest, ...]:
        """Return every open request with what it waits for, oldest first."""
        return tuple(open_request(request, self._pools, now) for request in self._requests.values())

    def state_of(self, request: RequestId) -> RequestState:
        """Return where a request stands; `DONE` if it is not known, or not any more."""
        live = self._requests.get(request)
        return RequestState.DONE if live is None else live.state

    def statistics(self) -> Statistics:
        """Return a snapshot of all counters and gauges."""
        states = [request.state for request in self._requests.values()]
        return Statistics(
            counters=Counters(**self._counts),
            queued=states.count(RequestState.QUEUED),
            running=states.count(RequestState.RUNNING),
            draining=states.count(RequestState.DRAINING),
            held_payloads=len(self._holds),
            deadlines=len(self._deadlines),
            channels=len(self._channels),
            stages=tuple(
                StageStatistics(
                    stage=pool.spec.id,
                    capacity=pool.capacity,
                    bound=sum(len(place.bound) for place in pool.replicas),
                    reserved=pool.reserved,
                    target=pool.target,
                    replicas=tuple(
                        (place.id, place.phase.value)
                        for place in pool.replicas
                        if place.is_wanted or place.phase in LIVE
                    ),
                    reported=tuple(
                        Reported(
                            replica=place.id,
                            running=place.reported.running,
                            waiting=place.reported.waiting,
                            values=place.reported.values,
                        )
                        for place in pool.replicas
                        if place.reported is not None and place.phase in LIVE
                    ),
                )
                for pool in self._pools.values()
            ),
            calls=len(self._calls),
        )

    def replica_states(self) -> tuple[do.ReplicaState, ...]:
        """Return where every replica stands, for a channel that has just opened."""
        places = self._supervision.places()
        return tuple(p.state() for p in places if p.is_wanted or p.phase in LIVE)

    def targets(self) -> dict[StageId, int]:
        """Return how many replicas each stage is meant to have."""
        return {stage: pool.target for stage, pool in self._pools.items()}

    # ------------------------------------------------------------------ engine and channels

    def _on_engine_started(self) -> None:
        if self._has_started:
            raise self._impossible("the engine was started twice")
        self._has_started = True
        if self._is_stopping:
            return
        for place in self._supervision.places():
            self._supervision.start(place, self._now)

    def _on_channel_opened(self, event: on.ChannelOpened) -> None:
        if event.channel in self._channels:
            raise self._impossible(f"channel {event.channel} was opened twice")
        self._channels[event.channel] = _Channel()

    def _on_channel_closed(self, event: on.ChannelClosed) -> None:
        channel = self._channels.get(event.channel)
        if channel is None:
            self._late()
            return
        for request_id in list(channel.requests):
            if request_id not in channel.requests:
                continue  # it has ended with a companion
            self._cancel(self._requests[request_id], "its API process is gone")
        self._calls.channel_closed(event.channel, self._now)
        del self._channels[event.channel]
        for payload, count in channel.held.items():
            for _ in range(count):
                self._drop(payload)

    def _on_shutdown_requested(self, event: on.ShutdownRequested) -> None:
        if not self._is_stopping:
            self._is_stopping = True
            self._deadlines.set(DeadlineKind.SHUTDOWN, None, self._now + event.drain_s)

    def _exit(self) -> None:
        """Stop every process; called when no request is left or the drain deadline has passed."""
        if self._has_exited:
            return
        self._has_exited = True
        self._deadlines.clear(DeadlineKind.SHUTDOWN, None)
        self._calls.close()
        for place in self._supervision.places():
            self._supervision.stop(place, self._now)
            for request, _ in self._strand(place):
                self._forget_if_drained(request)
        self._out.append(do.Exit())

    # ------------------------------------------------------------------ requests: begin

    def _on_request_submitted(self, event: on.RequestSubmitted) -> None:
        if event.request in self._requests:
            raise self._impossible(f"request {event.request} was submitted twice")
        channel = self._channels.get(event.channel)
        if channel is None:
            self._late(*on.payloads_of(event))
            return
        self._count("received")
        plan = self._plan(event)
        if isinstance(plan, Failure):
            self._count("rejected")
            self._out.append(do.Reject(channel=event.channel, request=event.request, failure=plan))
            self._discard(on.payloads_of(event))
            leader = self._leader(event)
            if leader is not None:
                self._fail(leader, _companion_refused(event.request, plan))
            return
        self._count("accepted")
        request = self._accept(event, plan)
        channel.requests[request.id] = None
        if event.companion_of is not None:
            self._requests[event.companion_of].welcome(request)
        if request.is_complete:
            for member in request.party:
                for task in member.tasks.values():
                    self._consider(member, task)

    def _plan(self, event: on.RequestSubmitted) -> Plan | Failure:
        """Return the request's plan, or why it is refused."""
        if self._is_stopping:
            return _shutting_down()
        pipeline = self._pipelines.get(event.pipeline)
        if pipeline is None:
            return Failure(
                kind=FailureKind.INVALID_REQUEST,
                detail=f"there is no pipeline {event.pipeline!r}; "
                f"this server has: {', '.join(self._pipelines)}",
                param="model",
                code="model_not_found",
            )
        plan = self._induced(pipeline, event)
        if plan is None:
            return _not_served(pipeline, event)
        if (failure := self._bad_company(event, plan)) is not None:
            return failure
        queued = len(self._queued[pipeline.name])
        if queued >= self._limits.max_queued:
            return Failure(
                kind=FailureKind.OVERLOADED,
                detail=f"{queued} requests are waiting, which is the limit; try again later",
                code="queue_full",
                retry_after_s=self._drain_rate.retry_after_s(pipeline.name, queued, self._now),
            )
        return plan

    def _bad_company(self, event: on.RequestSubmitted, plan: Plan) -> Failure | None:
        """Return why a request can't go with others: its leader must wait for just such a companion."""
        if not 0 <= event.companions <= MAX_COMPANIONS:
            return _too_many_companions(event.companions)
        if event.companion_of is None:
            return None
        leader = self._leader(event)
        if leader is None or event.companions or leader.plan is not plan:
            return _no_leader(event.companion_of)
        return None

    def _leader(self, event: on.RequestSubmitted) -> Request | None:
        """Return the request that waits for this one to come with it, if there is one."""
        leader = None if event.companion_of is None else self._requests.get(event.companion_of)
        if (
            leader is not None
            and leader.state is _QUEUED
            and leader.is_leader
            and not leader.is_complete
            and leader.channel == event.channel
        ):
            return leader
        return None

    def _induced(self, pipeline: PipelineSpec, event: on.RequestSubmitted) -> Plan | None:
        outputs = event.outputs or tuple(output.name for output in pipeline.outputs)
        given = tuple(name for name, _ in event.inputs)
        inputs = tuple(dict.fromkeys((*given, *event.open_inputs)))
        if set(inputs) - set(pipeline.inputs) or set(outputs) - {o.name for o in pipeline.outputs}:
            return None
        if len(set(given)) < len(given):
            return None
        key = (pipeline.name, tuple(sorted(inputs)), tuple(sorted(set(outputs))))
        if key not in self._plans:
            self._plans[key] = induce(pipeline, inputs, outputs)
        return self._plans[key]

    def _accept(self, event: on.RequestSubmitted, plan: Plan) -> Request:
        recovery: dict[StageId, Recovery] = {s: self._pools[s].recovery for s in plan.stages}
        request = Request(event, plan, self._limits, recovery)
        request.submitted_at = request.input_at = self._now
        longest_s = self._limits.request_timeout_s
        timeout_s = longest_s if event.timeout_s is None else min(event.timeout_s, longest_s)
        request.expires_at = self._now + timeout_s
        request.check_s = shortest_s(request, self._pools, self._limits)
        for payload in _present(event.options):
            self._holds.hold(payload)
        for name, payload in event.inputs:
            self._supply(request, name, payload)
        for name in dict.fromkeys(name for name, _ in event.inputs):
            if name not in event.open_inputs:
                self._end_input(request, name)
        self._discard(on.payloads_of(event))
        self._requests[request.id] = request
        self._queued[plan.pipeline][request.id] = None
        self._deadlines.set(
            DeadlineKind.REQUEST, request.id, min(request.expires_at, self._now + request.check_s)
        )
        label = f" as {event.label}" if event.label else ""
        request.story.add(self._now, f"submitted to {plan.pipeline}{label}")
        return request

    def _supply(self, request: Request, name: InputName, payload: PayloadRef) -> list[EdgeFlow]:
        """Put a piece of a request's own input on its open edges, and return those."""
        edges = [
            edge for edge in request.edges_of(name) if not edge.has_ended and not edge.is_closed
        ]
        for edge in edges:
            self._append(request, edge, payload)
        return edges

    def _end_input(self, request: Request, name: InputName) -> list[EdgeFlow]:
        """Let nothing more in on an input's edges, and return those that were open."""
        edges = [edge for edge in request.edges_of(name) if not edge.has_ended]
        for edge in edges:
            edge.has_ended = True
        return edges

    def _on_input_appended(self, event: on.InputAppended) -> None:
        request = self._concerned(event, event.request)
        edges = [] if request is None else self._supply(request, event.input, event.payload)
        if request is None or not edges:
            self._late(event.payload)
            return
        request.input_at = self._now
        for edge in edges:
            self._pass_on(request, edge)
        if self._keeps_too_much(request):
            self._relieve(request)

    def _on_input_closed(self, event: on.InputClosed) -> None:
        request = self._concerned(event, event.request)
        edges = [] if request is None else self._end_input(request, event.input)
        if request is None or not edges:
            self._late()
            return
        request.input_at = self._now
        for edge in edges:
            if not edge.is_closed:
                self._pass_on(request, edge)

    # ------------------------------------------------------------------ slots: reserve and bind

    def _consider(self, request: Request, task: Task) -> None:
        """Make a task ready if it can start now, and find it a place."""
        if task.state is not TaskState.WAITING_INPUT or not task.may_start:
            return
        if request.state is _QUEUED and not (request.is_leader and request.is_complete):
            return  # its leader stands in line for it, once all are there
        task.state = TaskState.READY
        task.ready_at = self._now
        if task.has_reserved:
            self._bind(request, task)
            return
        rank = (request.state is _QUEUED, request.priority)
        need = len(request.party) if request.state is _QUEUED else 1
        self._line.join(request.id, request.plan.groups[task.key.stage], rank, need)
        self._must_admit = True

    def _admit(self) -> None:
        """Use what has become free: for reserved tasks without a replica first, then for the waiting line."""
        self._must_admit = False
        for stage, waiting in self._unbound.items():
            pool = self._pools[stage]
            for request_id in tuple(waiting):
                if request_id not in waiting:
                    continue  # it has ended with a companion
                request = self._requests[request_id]
                if pool.has_lost(request.affinity):
                    self._fail(request, _affinity_lost(stage))
                elif pool.free:
                    self._bind(request, request.tasks[stage])
        while (head := self._line.first_admissible(self._capacity, self._room)) is not None:
            request_id, group = head
            self._line.leave(request_id, group)
            self._reserve(self._requests[request_id], group)

    def _capacity(self, stage: StageId) -> int:
        return self._pools[stage].capacity

    def _room(self, stage: StageId) -> int:
        return self._pools[stage].room

    def _reserve(self, request: Request, group: Group) -> None:
        """Promise the request a slot at each stage of a group, and bind what is ready."""
        companions = request.party[1:] if request.state is _QUEUED and request.is_leader else ()
        if request.state is _QUEUED:
            request.state = _RUNNING
            request.started_at = self._now
            del self._queued[request.plan.pipeline][request.id]
            self._line.promote(request.id, (False, request.priority))
            self._drain_rate.started(request.plan.pipeline, self._now)
        tasks = [request.tasks[stage] for stage in group]
        for task in tasks:
            if task.state is not TaskState.FINISHED:
                self._pools[task.key.stage].reserved += 1
                task.has_reserved = True
        for task in tasks:
            if task.state is TaskState.READY:
                self._bind(request, task)
        for companion in companions:
            self._reserve(companion, group)
            for task in companion.tasks.values():
                self._consider(companion, task)

    def _unreserve(self, request: Request, task: Task) -> None:
        """End a task that is not bound: give its promised slot back, or its place in line."""
        stage = task.key.stage
        task.state = TaskState.FINISHED
        self._unbound[stage].pop(request.id, None)
        if task.has_reserved:
            task.has_reserved = False
            self._pools[stage].reserved -= 1
        group = request.plan.groups[stage]
        tasks = [request.tasks[each] for each in group]
        if not any(each.state is TaskState.READY and not each.has_reserved for each in tasks):
            self._line.leave(request.id, group)
        self._must_admit = True

    def _bind(self, request: Request, task: Task) -> None:
        """Dispatch a ready task to the replica with the least work, or let it wait for one."""
        stage = task.key.stage
        pool = self._pools[stage]
        place = None if pool.has_lost(request.affinity) else pool.pick(request.affinity)
        if place is None:
            self._unbound[stage][request.id] = None
            self._must_admit |= pool.has_lost(request.affinity)
            request.story.add(self._now, f"{stage}: waits for a replica")
            return
        self._unbound[stage].pop(request.id, None)
        pool.bind(place, task.key)
        pool.remember(request.affinity, place)
        task.has_reserved = False
        task.state = TaskState.BOUND
        task.replica = place.id
        task.recovery = weakest(task.recovery, pool.recovery)
        task.dispatched_at = task.progress_at = self._now
        task.granted_chunks, task.granted_bytes = task.limits()
        request.story.add(self._now, f"{stage}: dispatched to {place.id}")
        self._out.append(
            do.Dispatch(
                replica=place.id,
                task=task.key,
                pipeline=request.plan.pipeline,
                edges=request.plan.edges_in[stage],
                options=request.options,
                skip_units=task.units,
                resume=task.resume,
                resume_units=task.resume_units,
                chunks=task.granted_chunks,
                bytes=task.granted_bytes,
            )
        )
        self._supervision.watch(place, self._now)
        for edge in task.edges_in:
            self._feed(request, task, edge)

    def _unbind(self, task: Task) -> None:
        """Free the slot of a task that has ended or whose replica has, and the payloads it viewed."""
        place = self._place_of(task)
        self._pools[task.key.stage].unbind(place, task.key)
        self._deadlines.clear(DeadlineKind.CANCEL, task.key)
        task.state = TaskState.FINISHED
        task.ended_at = self._now
        held, task.held = task.held, {}
        for payload, count in held.items():
            for _ in range(count):
                self._drop(payload)
        self._must_admit = True
        if not place.bound:
            self._supervision.rest(place, self._now)

    def _place_of(self, task: Task) -> Replica:
        assert task.replica is not None
        return self._supervision.place_of(task.replica)

    # ------------------------------------------------------------------ chunks and credits

    def _on_chunk_produced(self, event: on.ChunkProduced) -> None:
        found = self._task(event)
        if found is None or found[1].is_abandoned:
            self._late(event.payload)
            return
        request, task = found
        self._check_chunk(request, task, event)
        task.progress_at = self._now
        self._holds.hold(event.payload)
        if event.kind == "preview":
            for output in task.outputs:
                self._emit(request, output.name, event, event.seq)
        else:
            self._forward(request, task, event)
        self._drop(event.payload)
        if self._keeps_too_much(request):
            self._relieve(request)

    def _forward(self, request: Request, task: Task, event: on.ChunkProduced) -> None:
        """Count a data chunk and give it to everybody who takes the task's chunks."""
        if task.first_chunk_at is None:
            task.first_chunk_at = self._now
            request.story.add(self._now, f"{task.key.stage}: first chunk")
        task.count(event.payload.size_bytes, event.length, event.media_s)
        if event.finish_reason:
            task.finish_reason = event.finish_reason
        for output in task.outputs:
            self._emit(request, output.name, event, output.produced)
            output.produce(event.payload.size_bytes)
            self._forwarded(request, task)
        for edge in task.edges_out:
            if not edge.is_closed:
                self._append(request, edge, event.payload)
                self._pass_on(request, edge)
        if event.boundary is not None:
            self._resume_behind(request, task, event.boundary)
        elif not event.length and task.recovery == "replay":
            task.recovery = "retry"  # what has no length can't be left out by length
            self._trim_unneeded(request, task)

    def _resume_behind(self, request: Request, task: Task, boundary: Boundary) -> None:
        """Let another attempt go on here; the inputs before it need not be kept."""
        task.resume, task.resume_units = boundary, task.units
        for edge in task.edges_in:
            chunks, _ = boundary.edges.get(edge.id, (0, 0))
            while edge.base < chunks:
                self._drop_kept(request, edge)

    def _check_chunk(self, request: Request, task: Task, event: on.ChunkProduced) -> None:
        is_next = event.kind == "preview" or (event.seq == task.produced and task.has_credit)
        if event.boundary is not None:
            reached = event.boundary.edges
            is_next &= all(reached.get(e.id, (0, 0))[0] <= e.fed for e in task.edges_in)
        if task.state is not TaskState.BOUND or not is_next:
            raise self._impossible(
                f"{event.task} produced chunk {event.seq} while {task.state.value}; its next is "
                f"{task.produced}, and its send right ends at chunk {task.granted_chunks} and byte "
                f"{task.granted_bytes}",
                request,
            )

    def _emit(
        self, request: Request, output: OutputName, event: on.ChunkProduced, seq: int
    ) -> None:
        if event.payload.place != INLINE:
            held = self._channels[request.channel].held
            held[event.payload] = held.get(event.payload, 0) + 1
            self._holds.hold(event.payload)
        is_first = event.kind == "data" and not seq
        self._out.append(
            do.Emit(
                channel=request.channel,
                request=request.id,
                output=output,
                seq=seq,
                payload=event.payload,
                offset=event.offset,
                length=event.length,
                kind=event.kind,
                media_s=event.media_s,
                timings=request.timings(self._now) if is_first else None,
            )
        )

    def _append(self, request: Request, edge: EdgeFlow, payload: PayloadRef) -> None:
        """Put a chunk on an edge and keep it for feeding and for a retry of the consumer."""
        edge.produce(payload.size_bytes)
        edge.chunks.append(payload)
        request.kept_bytes += payload.size_bytes
        request.kept_chunks += 1
        self._holds.hold(payload)

    def _pass_on(self, request: Request, edge: EdgeFlow) -> None:
        """Let an edge's consumer have what is new there."""
        consumer = request.tasks[edge.spec.target]
        if consumer.state is TaskState.BOUND:
            self._feed(request, consumer, edge)
        else:
            self._consider(request, consumer)

    def _feed(self, request: Request, task: Task, edge: EdgeFlow) -> None:
        """Give a bound task what is on its edge, as far as the window allows, and the edge's end."""
        if edge.is_closed:
            return
        assert task.replica is not None
        if edge.consumed == edge.fed:
            task.progress_at = self._now
        while edge.may_feed:
            payload = edge.chunks[edge.fed - edge.base]
            self._out.append(
                do.Feed(
                    replica=task.replica, task=task.key, edge=edge.id, seq=edge.fed, payload=payload
                )
            )
            if payload.place != INLINE:
                task.held[payload] = task.held.get(payload, 0) + 1
                self._holds.hold(payload)
            edge.fed += 1
            edge.fed_bytes += payload.size_bytes
            if edge.spec.source is not None:
                self._forwarded(request, request.tasks[edge.spec.source])
        if edge.has_ended and edge.fed == edge.produced and not edge.close_sent:
            edge.close_sent = True
            self._out.append(do.CloseInput(replica=task.replica, task=task.key, edge=edge.id))
        if not task.may_repeat:
            self._trim(request, edge)

    def _forwarded(self, request: Request, task: Task) -> None:
        """Note that a chunk of the task has left; if it can't be repeated now, its inputs go."""
        if not task.has_forwarded:
            task.has_forwarded = True
            self._trim_unneeded(request, task)

    def _trim_unneeded(self, request: Request, task: Task) -> None:
        """Drop the inputs of a task that can't be repeated."""
        if task.may_repeat:
            return
        task.keeps_inputs = False
        for edge in task.edges_in:
            self._trim(request, edge)

    def _trim(self, request: Request, edge: EdgeFlow) -> None:
        """Drop the chunks that were fed."""
        while edge.base < edge.fed:
            self._drop_kept(request, edge)

    def _drop_kept(self, request: Request, edge: EdgeFlow) -> None:
        payload = edge.drop_first()
        request.kept_bytes -= payload.size_bytes
        request.kept_chunks -= 1
        self._drop(payload)

    def _drop_all_kept(self, request: Request, edge: EdgeFlow) -> None:
        while edge.chunks:
            self._drop_kept(request, edge)

    def _keeps_too_much(self, request: Request) -> bool:
        return (
            request.kept_bytes > self._limits.retention_bytes
            or request.kept_chunks > MAX_KEPT_CHUNKS
        )

    def _relieve(self, request: Request) -> None:
        """Give up repeating tasks, the greediest first, to stay within the retention budget.

        If that is not enough, the request fails.
        """
        greedy = [task for task in request.tasks.values() if task.fed_kept_bytes]
        greedy.sort(key=lambda task: -task.fed_kept_bytes)
        for task in greedy:
            if self._keeps_too_much(request):
                task.keeps_inputs = False
                self._trim_unneeded(request, task)
                request.story.add(
                    self._now, f"{task.key.stage}: inputs too large to keep for another attempt"
                )
        if self._keeps_too_much(request):
            self._fail(
                request,
                Failure(
                    kind=FailureKind.STAGE_ERROR,
                    detail=f"more than {self._limits.retention_bytes} bytes or {MAX_KEPT_CHUNKS} chunks wait "
                    "between stages; raise `orchestrator.limits.retention_bytes` or use stream edges",
                    code="retention_exceeded",
                ),
            )

    def _on_input_consumed(self, event: on.InputConsumed) -> None:
        found = self._task(event)
        if found is None or found[1].is_abandoned:
            self._late()
            return
        request, task = found
        edge = request.edges.get(event.edge)
        if (
            edge is None
            or edge.spec.target != task.key.stage
            or task.state is not TaskState.BOUND
            or event.up_to > edge.fed
        ):
            raise self._impossible(
                f"{event.task} consumed {event.edge} up to {event.up_to}", request
            )
        task.progress_at = self._now
        if edge.spec.source is None and event.up_to > edge.consumed:
            request.input_at = self._now
        edge.consume(event.up_to)
        self._feed(request, task, edge)
        if edge.spec.source is not None:
            self._grant(request.tasks[edge.spec.source])

    def _on_consumer_drained(self, event: on.ConsumerDrained) -> None:
        request = self._concerned(event, event.request)
        if request is None:
            self._late()
            return
        output = request.outputs.get(event.output)
        if output is None or event.up_to > output.produced:
            raise self._impossible(
                f"the client drained {event.output} up to {event.up_to}", request
            )
        output.consume(event.up_to)
        self._grant(request.tasks[output.stage])

    def _grant(self, task: Task) -> None:
        """Pass credit on to the producer, in steps of half a window."""
        if task.state is not TaskState.BOUND or task.is_cancelled:
            return
        assert task.replica is not None
        chunks, nbytes = task.limits()
        gain_chunks, gain_bytes = chunks - task.granted_chunks, nbytes - task.granted_bytes
        is_worth_it = gain_chunks >= task.step_chunks or gain_bytes >= task.step_bytes
        if not is_worth_it and (task.has_credit or (gain_chunks <= 0 and gain_bytes <= 0)):
            return
        if not task.has_credit:
            task.progress_at = self._now
        task.granted_chunks = max(chunks, task.granted_chunks)
        task.granted_bytes = max(nbytes, task.granted_bytes)
        self._out.append(
            do.Grant(
                replica=task.replica,
                task=task.key,
                chunks=task.granted_chunks,
                bytes=task.granted_bytes,
            )
        )

    def _on_payload_done(self, event: on.PayloadDone) -> None:
        held = self._held_by(event.holder)
        if held is None or event.payload not in held:
            self._late()
            return
        held[event.payload] -= 1
        if not held[event.payload]:
            del held[event.payload]
        self._drop(event.payload)

    def _held_by(self, holder: TaskKey | ChannelId) -> dict[PayloadRef, int] | None:
        """Return what a task's replica or an API process may be viewing; `None` if it is gone."""
        if not isinstance(holder, TaskKey):
            channel = self._channels.get(holder)
            return None if channel is None else channel.held
        request = self._requests.get(holder.request)
        task = None if request is None else request.tasks.get(holder.stage)
        return None if task is None or task.key != holder else task.held

    def _drop(self, payload: PayloadRef) -> None:
        if self._holds.drop(payload):
            self._out.append(do.Release(payload=payload))

    # ------------------------------------------------------------------ tasks: end

    def _on_task_finished(self, event: on.TaskFinished) -> None:
        found = self._ended(event)
        if found is None:
            return
        request, task = found
        self._place_of(task).did_work()
        self._unbind(task)
        request.story.add(self._now, f"{task.key.stage}: finished after {task.produced} chunks")
        self._complete(request, task)

    def _on_task_cancelled(self, event: on.TaskCancelled) -> None:
        found = self._ended(event)
        if found is None:
            return
        request, task = found
        if not task.is_cancelled:
            raise self._impossible(
                f"{event.task} was cancelled, but nobody asked for that", request
            )
        self._unbind(task)
        self._complete(request, task)

    def _on_task_failed(self, event: on.TaskFailed) -> None:
        found = self._ended(event)
        if found is None:
            return
        request, task = found
        self._unbind(task)
        request.story.add(self._now, f"{task.key.stage}: failed: {event.failure.detail}")
        if request.state is _DRAINING or task.is_abandoned:
            self._complete(request, task)
        else:
            self._end(
                request, do.Fail(channel=request.channel, request=request.id, failure=event.failure)
            )

    def _complete(self, request: Request, task: Task) -> None:
        """Pass a task's end on: to the client, its consumers, its sources, and the request itself."""
        if request.state is not _RUNNING:
            self._forget_if_drained(request)
            return
        for output in task.outputs:
            self._out.append(
                do.Emit(
                    channel=request.channel,
                    request=request.id,
                    output=output.name,
                    seq=output.produced,
                    payload=None,
                    offset=task.units,
                    final=True,
                )
            )
        for edge in task.edges_out:
            edge.has_ended = True
            self._pass_on(request, edge)
        for edge in task.edges_in:
            self._close_edge(request, edge)
        if request.is_through:
            self._finish(request)

    def _finish(self, request: Request) -> None:
        """End a request whose tasks have all finished; a leader waits for its companions."""
        if request.is_leader and any(each.state is _RUNNING for each in request.party[1:]):
            return
        timings = request.timings(self._now)
        self._end(request, do.Finish(channel=request.channel, request=request.id, timings=timings))

    def _close_edge(self, request: Request, edge: EdgeFlow) -> None:
        """The consumer wants no more of this edge; a source that nobody wants any more stops too."""
        if edge.is_closed:
            return
        edge.close()
        self._drop_all_kept(request, edge)
        if edge.spec.source is None:
            return
        source = request.tasks[edge.spec.source]
        if source.state is TaskState.FINISHED:
            return
        if source.outputs or not all(each.is_closed for each in source.edges_out):
            self._grant(source)
            return
        source.is_abandoned = True
        for each in source.edges_in:
            self._close_edge(request, each)
        if source.state is TaskState.BOUND:
            self._cancel_task(request, source)
        else:
            self._unreserve(request, source)

    # ------------------------------------------------------------------ requests: end

    def _on_request_aborted(self, event: on.RequestAborted) -> None:
        request = self._concerned(event, event.request)
        if request is None:
            self._late()
        else:
            self._cancel(request, "aborted by the client")
        if event.acknowledge and event.channel in self._channels:
            stopped = request is not None
            self._out.append(
                do.AcknowledgeAbort(channel=event.channel, request=event.request, stopped=stopped)
            )

    def _on_request_broken(self, event: on.RequestBroken) -> None:
        request = self._concerned(event, event.request)
        if request is None:
            self._late(*event.payloads)
            return
        self._discard(event.payloads)
        self._end(
            request, do.Fail(channel=request.channel, request=request.id, failure=event.failure)
        )

    def _cancel(self, request: Request, why: str) -> None:
        request.story.add(self._now, why)
        self._end(request, do.Cancelled(channel=request.channel, request=request.id))

    def _fail(self, request: Request, failure: Failure) -> None:
        request.story.add(self._now, failure.detail)
        named = msgspec.structs.replace(failure, detail=f"request {request.id}: {failure.detail}")
        self._end(request, do.Fail(channel=request.channel, request=request.id, failure=named))

    def _end(self, request: Request, terminal: do.Finish | do.Fail | do.Cancelled) -> None:
        """End a request: the only way out, whatever the reason."""
        self._count(_TERMINALS[type(terminal)])
        request.story.add(self._now, _TERMINALS[type(terminal)])
        self._out.append(terminal)
        self._queued[request.plan.pipeline].pop(request.id, None)
        request.state = _DRAINING
        self._deadlines.clear(DeadlineKind.REQUEST, request.id)
        del self._channels[request.channel].requests[request.id]
        for task in request.tasks.values():
            if task.state is TaskState.BOUND:
                self._cancel_task(request, task)
            elif task.state is not TaskState.FINISHED:
                self._unreserve(request, task)
        for edge in request.edges.values():
            self._drop_all_kept(request, edge)
        for payload in _present(request.options):
            self._drop(payload)
        self._forget_if_drained(request)
        if len(request.party) > 1:
            self._end_party(request, terminal)

    def _end_party(self, request: Request, terminal: do.Finish | do.Fail | do.Cancelled) -> None:
        """Let a request's companions know that it has ended."""
        leader = request.party[0]
        if isinstance(terminal, do.Finish):
            if leader.state is _RUNNING and leader.is_through:
                self._finish(leader)
            return
        if request is not leader and leader.state in (_QUEUED, _RUNNING):
            self._fail(leader, _companion_lost(request, terminal))
        for other in request.party[1:]:
            if other.state in (_QUEUED, _RUNNING):
                self._cancel(other, f"its companion {request.id} has ended")

    def _cancel_task(self, request: Request, task: Task) -> None:
        """Tell a replica to end a task; a task is told once."""
        if task.is_cancelled:
            return
        assert task.replica is not None
        task.is_cancelled = True
        request.story.add(self._now, f"{task.key.stage}: told to stop after {task.produced} chunks")
        self._deadlines.set(
            DeadlineKind.CANCEL, task.key, self._now + self._limits.cancel_timeout_s
        )
        self._out.append(do.CancelTask(replica=task.replica, task=task.key))

    def _forget_if_drained(self, request: Request) -> None:
        """Drop the record of an ended request when no replica works for it any more."""
        if request.state is _DONE:
            return
        if any(task.state is TaskState.BOUND for task in request.tasks.values()):
            return
        request.state = _DONE
        del self._requests[request.id]
        self._archive[request.id] = request.story
        while len(self._archive) > ARCHIVED_STORIES:
            self._archive.popitem(last=False)

    # ------------------------------------------------------------------ replicas

    def _on_replica_offered(self, event: on.ReplicaOffered) -> None:
        pool = self._pools.get(event.stage)
        former = None if pool is None else pool.joined_as(event.nonce)
        is_here = former is not None and former.phase in LIVE
        if former is not None and is_here and event.connection <= former.connection:
            self._late()
        elif (failure := self._not_admissible(event, pool, former)) is not None:
            self._out.append(do.RefuseReplica(connection=event.connection, failure=failure))
        else:
            if former is not None and is_here:
                self._evict(former, "its process has joined again")
            self._supervision.admit(event.stage, event.nonce, event.connection, self._now)

    def _not_admissible(
        self, event: on.ReplicaOffered, pool: Pool | None, former: Replica | None
    ) -> Failure | None:
        """Return why a process can't join."""
        if pool is None:
            return self._no_such_stage(event.stage)
        if self._is_stopping or not self._has_started:
            return _starting_or_stopping()
        if former is None and sum(place.phase in LIVE for place in pool.replicas) >= MAX_REPLICAS:
            return Failure(
                kind=FailureKind.OVERLOADED,
                detail=f"stage {event.stage} has {MAX_REPLICAS} replicas, which is the limit",
                retry_after_s=1.0,
            )
        return None

    def _on_replica_joined(self, event: on.ReplicaJoined) -> None:
        place = self._supervision.live(event.replica)
        if place is None or place.phase is not ReplicaPhase.STARTING:
            self._late()
            return
        self._supervision.joined(place, self._now)

    def _on_replica_progressed(self, event: on.ReplicaProgressed) -> None:
        place = self._supervision.live(event.replica)
        if place is None:
            self._late()
            return
        if place.phase is not ReplicaPhase.LOADING:
            raise self._impossible(f"{event.replica} loads while {place.phase.value}")
        self._supervision.progressed(place, event.what, event.fraction, self._now)

    def _on_replica_ready(self, event: on.ReplicaReady) -> None:
        place = self._supervision.live(event.replica)
        if place is None:
            self._late()
            return
        if place.phase is not ReplicaPhase.LOADING or event.slots < 1:
            raise self._impossible(
                f"{event.replica} is ready with {event.slots} slots while {place.phase.value}"
            )
        place.max_step_s = event.max_step_s
        self._supervision.ready(place, event.slots, event.recovery)
        self._calls.learn(place.id, event.methods)
        self._must_admit = True

    def _on_stats_reported(self, event: on.StatsReported) -> None:
        place = self._supervision.live(event.replica)
        if place is None:
            self._late()
        else:
            place.reported = event

    def _on_replica_alive(self, event: on.ReplicaAlive) -> None:
        place = self._supervision.live(event.replica)
        if place is None or not place.bound:
            self._late()
        elif event.step_age_s > place.max_step_s:
            self._evict(
                place,
                f"one step has run for {event.step_age_s:.0f} s; its backend allows "
                f"{place.max_step_s:g} s (`max_step_s`)",
            )
        else:
            self._must_admit |= self._supervision.alive(place, self._now)

    def _on_replica_start_failed(self, event: on.ReplicaStartFailed) -> None:
        place = self._supervision.live(event.replica)
        if place is None:
            self._late()
            return
        # A reason that the process could name will not go away by itself; a stage that has worked
        # before gets the back-off all the same.
        for_good = not self._pools[event.replica.stage].was_ready
        self._evict(place, event.reason, for_good=for_good)

    def _on_replica_died(self, event: on.ReplicaDied) -> None:
        place = self._supervision.live(event.replica)
        if place is not None:
            self._evict(place, event.reason)
        elif self._supervision.has_place(event.replica):
            self._late()
        else:
            raise self._impossible(f"{event.replica} died, but there is no such place")

    def _on_poller_failed(self, event: on.PollerFailed) -> None:
        """Evict nobody, since nobody is named; tasks that do not go on have deadlines of their own."""
        pool = self._pools.get(event.stage)
        if pool is None:
            raise self._impossible(f"a poller of {event.stage}, which does not exist, has failed")
        for place in pool.replicas:
            for key in place.bound:
                story = self._requests[key.request].story
                story.add(self._now, f"{event.stage}: its poller starts again: {event.reason}")

    def _on_drain_requested(self, event: on.DrainRequested) -> None:
        place = self._supervision.live(event.replica)
        if place is None or place.phase is ReplicaPhase.DRAINING:
            self._late()
            self._answer_order(event, _no_such_replica(event.replica))
            return
        if event.replace and not self._is_stopping:
            self._supervision.replace(place, self._now)
        else:
            self._supervision.drain(place, self._now)
        self._must_admit = True
        self._answer_order(event)

    def _on_scale_requested(self, event: on.ScaleRequested) -> None:
        failure = self._unscalable(event)
        if failure is None:
            self._supervision.scale(event.stage, event.replicas, self._now)
            self._must_admit = True
        self._answer_order(event, failure)

    def _unscalable(self, event: on.ScaleRequested) -> Failure | None:
        """Return why a stage can't have so many replicas."""
        if event.stage not in self._pools:
            return self._no_such_stage(event.stage)
        if not 0 <= event.replicas <= MAX_REPLICAS:
            return Failure(
                kind=FailureKind.INVALID_REQUEST,
                detail=f"{event.replicas} replicas of {event.stage}: use 0 to {MAX_REPLICAS}",
                param="replicas",
            )
        if self._is_stopping or not self._has_started:
            return _starting_or_stopping()
        return None

    def _no_such_stage(self, stage: StageId) -> Failure:
        return Failure(
            kind=FailureKind.INVALID_REQUEST,
            detail=f"there is no stage {stage!r}; this server has: {', '.join(self._pools)}",
            param="stage",
        )

    def _answer_order(
        self, event: on.DrainRequested | on.ScaleRequested, failure: Failure | None = None
    ) -> None:
        if event.channel is not None and event.channel in self._channels:
            self._out.append(
                do.AnswerOrder(channel=event.channel, number=event.number, failure=failure)
            )

    def _evict(self, place: Replica, reason: str, *, for_good: bool = False) -> None:
        """A process is gone, or must go: plan its successor, and repeat or fail what it held."""
        replica = place.id
        self._must_admit = True
        self._count("replica_deaths")
        self._supervision.bury(place, reason, self._now, for_good=for_good)
        for request, task in self._strand(place):
            if request.state is not _RUNNING or task.is_abandoned:
                self._complete(request, task)
            else:
                self._recover(request, task, replica, reason)

    def _strand(self, place: Replica) -> list[tuple[Request, Task]]:
        """Unbind all that a process held which is no more."""
        requests = [self._requests[key.request] for key in place.bound]
        stranded = [(request, request.tasks[place.id.stage]) for request in requests]
        for _, task in stranded:
            self._unbind(task)
        return stranded

    def _recover(self, request: Request, task: Task, replica: ReplicaId, reason: str) -> None:
        """Repeat a dead replica's task if nobody has heard of it yet; else end its request."""
        stage = task.key.stage
        request.story.add(
            self._now, f"{stage}: {replica} died after {task.produced} chunks: {reason}"
        )
        task.deaths += 1
        if task.deaths >= self._limits.poison_deaths:
            self._fail(
                request,
                Failure(
                    kind=FailureKind.POISON_REQUEST,
                    detail=f"{task.deaths} replicas of {stage} in a row died on it, the last: {reason}",
                    where=str(replica),
                ),
            )
        elif task.may_repeat:
            self._repeat(request, task)
        else:
            why = (
                "after it had sent output"
                if task.has_forwarded and task.recovery == "retry"
                else "and this can't be repeated"
            )
            self._fail(
                request,
                Failure(
                    kind=FailureKind.REPLICA_LOST,
                    detail=f"replica {replica} died ({reason}) {why}; try again",
                    where=str(replica),
                    retry_after_s=1.0,
                ),
            )

    def _repeat(self, request: Request, task: Task) -> None:
        """Dispatch a task again under the next attempt number; keep what it did if that comes again."""
        self._count("retried")
        if task.recovery != "replay":
            for edge in task.edges_out:
                self._drop_all_kept(request, edge)
            task.forget_output()
        task.repeat()
        task.state = TaskState.READY
        task.ready_at = self._now
        task.has_reserved = True
        self._pools[task.key.stage].reserved += 1
        self._bind(request, task)

    # ------------------------------------------------------------------ calls

    def _on_rpc_requested(self, event: on.RpcRequested) -> None:
        if event.call in self._calls:
            raise self._impossible(f"call {event.call} was requested twice")
        if event.channel not in self._channels:
            self._late()
            failure = Failure(kind=FailureKind.CANCELLED, detail="its API process is gone")
            self._calls.refuse(event, failure)
        elif self._is_stopping:
            self._calls.refuse(event, _shutting_down())
        else:
            self._calls.requested(event, self._now)

    def _on_rpc_answered(self, event: on.RpcAnswered) -> None:
        if not self._calls.answered(event):
            self._late()

    # ------------------------------------------------------------------ deadlines

    def _on_deadline_passed(self) -> None:
        while (key := self._deadlines.pop_due(self._now)) is not None:
            self._expire(key)

    def _expire(self, key: DeadlineKey) -> None:
        kind, what = key
        match kind:
            case DeadlineKind.REQUEST:
                assert isinstance(what, str)
                self._check_waits(self._requests[RequestId(what)])
            case DeadlineKind.CANCEL:
                assert isinstance(what, TaskKey)
                place = self._place_of(self._requests[what.request].tasks[what.stage])
                self._evict(
                    place,
                    f"did not end cancelled task {what} in {self._limits.cancel_timeout_s:g} s",
                )
            case DeadlineKind.SHUTDOWN:
                self._expire_shutdown()
            case DeadlineKind.CALL:
                assert isinstance(what, str)
                self._calls.expire(CallId(what), self._now)
            case DeadlineKind.EXCLUSIVE:
                assert isinstance(what, ReplicaId)
                self._evict(
                    self._supervision.place_of(what),
                    f"did not end an exclusive call within {self._limits.drain_timeout_s:g} s after "
                    "its deadline",
                )
            case (
                DeadlineKind.START
                | DeadlineKind.PROGRESS
                | DeadlineKind.RESTART
                | DeadlineKind.DRAIN
            ):
                assert isinstance(what, ReplicaId)
                self._expire_place(kind, self._supervision.place_of(what))
            case _:
                assert_never(kind)

    def _expire_shutdown(self) -> None:
        for request in list(self._requests.values()):
            if request.state in (_QUEUED, _RUNNING):
                self._fail(
                    request,
                    Failure(
                        kind=FailureKind.ENGINE_DEAD,
                        detail="the server shut down before it was finished",
                        code="server_shutting_down",
                    ),
                )
        self._exit()

    def _expire_place(self, kind: DeadlineKind, place: Replica) -> None:
        if kind is DeadlineKind.RESTART:
            self._supervision.start(place, self._now)
        elif kind is DeadlineKind.START:
            timeout_s = self._pools[place.id.stage].spec.start_timeout_s
            # Like a reason that the process names itself, a hang while starting comes again.
            self._evict(
                place,
                f"showed no progress for {timeout_s:g} s while starting",
                for_good=not self._pools[place.id.stage].was_ready,
            )
        elif kind is DeadlineKind.PROGRESS:
            self._look_after(place)
        else:
            self._evict(place, f"did not drain within {self._limits.drain_timeout_s:g} s")

    def _look_after(self, place: Replica) -> None:
        """Suspect or evict a replica that has work and does not go on, or see when to look again."""
        tasks = [self._requests[key.request].tasks[key.stage] for key in place.bound]
        working = [task.progress_at for task in tasks if task.has_work and task.has_credit]
        silent_since = max(place.alive_at, *(task.progress_at for task in tasks))
        if self._supervision.is_overdue(place, silent_since, self._now, has_work=bool(working)):
            timeout_s = self._pools[place.id.stage].spec.progress_timeout_s
            self._evict(place, f"had work and showed no progress for {timeout_s:g} s")
        self._must_admit = True

    def _check_waits(self, request: Request) -> None:
        """End a request whose wait is over, or look again when the next of its waits may be."""
        if self._now >= request.expires_at:
            self._fail(
                request,
                Failure(
                    kind=FailureKind.DEADLINE_EXCEEDED,
                    detail=f"not finished in {request.expires_at - request.submitted_at:g} s",
                    where=self._holder(request),
                ),
            )
            return
        next_at = min(request.expires_at, self._now + request.check_s)
        for wait in waits_of(request, self._pools, self._limits):
            if self._now >= wait.until:
                self._fail(request, wait.failure)
                return
            next_at = min(next_at, wait.until)
        self._deadlines.set(DeadlineKind.REQUEST, request.id, next_at)

    def _holder(self, request: Request) -> str:
        """Return what holds a request up: the queue, or the first stage that has not finished."""
        if request.state is _QUEUED:
            return "queue"
        open_stages = (
            stage for stage, task in request.tasks.items() if task.state is not TaskState.FINISHED
        )
        return next(open_stages, "companions")

    # ------------------------------------------------------------------ what is always true

    def check_invariants(self) -> None:
        """Raise `AssertionError` if the state contradicts itself; tests call it after each event."""
        counts = self._counts
        live = [r for r in self._requests.values() if r.state is not RequestState.DRAINING]
        ended = counts["finished"] + counts["failed"] + counts["cancelled"]
        assert counts["received"] == counts["rejected"] + counts["accepted"], "received"
        assert counts["accepted"] == ended + len(live), "accepted"
        for request in self._requests.values():
            self._check_request(request)
        for pool in self._pools.values():
            self._check_pool(pool)
        self._check_waiting()
        self._check_holds()
        self._calls.check_invariants()
        belong = {
            request_id for channel in self._channels.values() for request_id in channel.requests
        }
        assert belong == {request.id for request in live}, "channel requests"

    def _check_request(self, request: Request) -> None:
        is_queued = request.id in self._queued[request.plan.pipeline]
        assert is_queued == (request.state is RequestState.QUEUED), f"{request.id}: queue"
        is_live = request.state is not RequestState.DRAINING
        assert self._deadlines.has(DeadlineKind.REQUEST, request.id) == is_live, (
            f"{request.id}: deadline"
        )
        waits_in_line = any(
            t.state is TaskState.READY and not t.has_reserved for t in request.tasks.values()
        )
        assert (request.id in self._line) == waits_in_line, f"{request.id}: line"
        for stage, task in request.tasks.items():
            is_bound = task.state is TaskState.BOUND
            if is_bound:
                place = self._place_of(task)
                assert place.id == task.replica, f"{task.key}: bound to a former incarnation"
                assert task.key in place.bound, f"{task.key}: not known to {place.id}"
            has_deadline = self._deadlines.has(DeadlineKind.CANCEL, task.key)
            assert has_deadline == (is_bound and task.is_cancelled), f"{task.key}: cancel deadline"
            is_unbound = task.state is TaskState.READY and task.has_reserved
            assert (request.id in self._unbound[stage]) == is_unbound, f"{task.key}: unbound"
            assert is_bound or not task.held, f"{task.key}: holds payloads unbound"
        for edge in request.edges.values():
            if is_live and not edge.is_closed:
                assert edge.base <= edge.fed <= edge.produced, f"{edge.id}: fed"
                assert edge.consumed <= edge.fed, f"{edge.id}: consumed"
                assert len(edge.chunks) == edge.produced - edge.base, f"{edge.id}: kept"
            else:
                assert not edge.chunks, f"{edge.id}: keeps chunks that nobody wants"
        kept = sum(c.size_bytes for edge in request.edges.values() for c in edge.chunks)
        assert kept == request.kept_bytes, f"{request.id}: kept bytes"
        chunks = sum(len(edge.chunks) for edge in request.edges.values())
        assert chunks == request.kept_chunks, f"{request.id}: kept chunks"

    def _check_waiting(self) -> None:
        ready = [
            (request.id, task)
            for request in self._requests.values()
            for task in request.tasks.values()
            if task.state is TaskState.READY
        ]
        assert len(self._line) == len({r for r, task in ready if not task.has_reserved}), "line"
        unbound = sum(len(waiting) for waiting in self._unbound.values())
        assert unbound == sum(task.has_reserved for _, task in ready), "unbound"
        queued = sum(len(waiting) for waiting in self._queued.values())
        states = [request.state for request in self._requests.values()]
        assert queued == states.count(RequestState.QUEUED), "queued"
        assert not self._out, "commands that nobody was given"

    def _check_pool(self, pool: Pool) -> None:
        ready = [place for place in pool.replicas if place.phase is ReplicaPhase.READY]
        assert pool.capacity == sum(place.slots for place in ready), f"{pool.spec.id}: capacity"
        assert pool.free == sum(place.slots - len(place.bound) for place in ready), (
            f"{pool.spec.id}: free"
        )
        openings = {place.id.slot: len(place.bound) for place in ready if place.has_room}
        assert pool.openings.loads() == openings, f"{pool.spec.id}: openings"
        tasks = [r.tasks[pool.spec.id] for r in self._requests.values() if pool.spec.id in r.tasks]
        assert pool.reserved == sum(task.has_reserved for task in tasks), (
            f"{pool.spec.id}: reserved"
        )
        bound = {task.key for task in tasks if task.state is TaskState.BOUND}
        assert bound == {key for place in pool.replicas for key in place.bound}, (
            f"{pool.spec.id}: bound"
        )
        for place in pool.replicas:
            assert place.phase in LIVE or not place.bound, (
                f"{place.id}: holds tasks without a process"
            )
            is_watched = self._deadlines.has(DeadlineKind.PROGRESS, place.id)
            assert is_watched == bool(place.bound), f"{place.id}: progress deadline"
            waits = place.phase in (ReplicaPhase.DEAD, ReplicaPhase.PARKED)
            has_deadline = self._deadlines.has(DeadlineKind.RESTART, place.id)
            assert has_deadline == waits, f"{place.id}: restart deadline"

    def _check_holds(self) -> None:
        expected: dict[PayloadRef, int] = {}
        holders: list[PayloadRef] = []
        for request in self._requests.values():
            if request.state is not RequestState.DRAINING:
                holders += _present(request.options)
            for edge in request.edges.values():
                holders += edge.chunks
            for task in request.tasks.values():
                holders += [ref for ref, count in task.held.items() for _ in range(count)]
        for channel in self._channels.values():
            holders += [ref for ref, count in channel.held.items() for _ in range(count)]
        for payload in holders:
            expected[payload] = expected.get(payload, 0) + 1
        assert expected == self._holds.counts(), "holds"

    # ------------------------------------------------------------------ small things

    def _concerned(
        self, event: on.RequestEvent | on.TaskEvent, request_id: RequestId
    ) -> Request | None:
        """Return the request that an event moves; `None` if the event is late.

        Raises:
            InvalidTransition: `LEGAL` has no such event in the request's state.
        """
        request = self._requests.get(request_id)
        outcomes = LEGAL[type(event)].get(_DONE if request is None else request.state)
        if outcomes is None:
            raise self._impossible(f"{type(event).__name__} of a queued request", request)
        return request if outcomes else None

    def _task(self, event: on.TaskEvent) -> tuple[Request, Task] | None:
        """Return the task that an event moves and its request; `None` if the event is late."""
        request = self._concerned(event, event.task.request)
        task = None if request is None else request.tasks.get(event.task.stage)
        if request is None or task is None or task.key != event.task:
            return None
        return request, task

    def _ended(self, event: on.EndEvent) -> tuple[Request, Task] | None:
        """Return the bound task that has ended at its replica; a late one is counted."""
        found = self._task(event)
        if found is None:
            self._late()
        elif found[1].state is not TaskState.BOUND:
            raise self._impossible(f"{event.task} ended while {found[1].state.value}", found[0])
        return found

    def _late(self, *payloads: PayloadRef) -> None:
        self._count("late")
        self._discard(payloads)

    def _discard(self, payloads: Iterable[PayloadRef]) -> None:
        """Release those of some payloads that nobody holds."""
        for payload in dict.fromkeys(payloads):
            if payload not in self._holds:
                self._out.append(do.Release(payload=payload))

    def _count(self, name: str) -> None:
        self._counts[name] += 1

    def _impossible(self, what: str, request: Request | None = None) -> InvalidTransition:
        """Return the refusal of an event; to be raised before anything has changed."""
        story = "" if request is None else f"\n{request.story}"
        return InvalidTransition(f"this is a bug in Stretto: {what}{story}")


def _not_served(pipeline: PipelineSpec, event: on.RequestSubmitted) -> Failure:
    wanted = ", ".join(event.outputs) or "its outputs"
    names = (*(name for name, _ in event.inputs), *event.open_inputs)
    given = ", ".join(dict.fromkeys(names)) or "nothing"
    inputs, outputs = ", ".join(pipeline.inputs), ", ".join(o.name for o in pipeline.outputs)
    return Failure(
        kind=FailureKind.INVALID_REQUEST,
        detail=f"pipeline {pipeline.name!r} can't make {wanted} from {given}; "
        f"its inputs are {inputs}, its outputs {outputs}",
        param="outputs",
        code="unsupported_value",
    )


def _shutting_down() -> Failure:
    return Failure(
        kind=FailureKind.OVERLOADED,
        detail="the server is shutting down",
        code="server_shutting_down",
        retry_after_s=1.0,
    )


def _starting_or_stopping() -> Failure:
    return Failure(
        kind=FailureKind.OVERLOADED,
        detail="the server starts or stops at this moment",
        code="server_shutting_down",
        retry_after_s=1.0,
    )


def _no_leader(leader: RequestId) -> Failure:
    return Failure(
        kind=FailureKind.INVALID_REQUEST,
        detail=f"request {leader} does not wait for such a companion: submit the leader first, on the same "
        "channel, with `companions`, and the companions with the same inputs and outputs",
        param="companion_of",
    )


def _too_many_companions(number: int) -> Failure:
    return Failure(
        kind=FailureKind.INVALID_REQUEST,
        detail=f"{number} companions: use 0 to {MAX_COMPANIONS}",
        param="companions",
    )


def _companion_refused(companion: RequestId, refusal: Failure) -> Failure:
    text = f"its companion {companion} was refused: {refusal.detail}"
    return msgspec.structs.replace(refusal, detail=text)


def _companion_lost(companion: Request, terminal: do.Fail | do.Cancelled) -> Failure:
    if isinstance(terminal, do.Fail):
        text = f"its companion {companion.id} has failed: {terminal.failure.detail}"
        return msgspec.structs.replace(terminal.failure, detail=text)
    return Failure(
        kind=FailureKind.STAGE_ERROR,
        detail=f"its companion {companion.id} was aborted",
        code="companion_lost",
    )


def _no_such_replica(replica: ReplicaId) -> Failure:
    return Failure(
        kind=FailureKind.INVALID_REQUEST,
        detail=f"replica {replica} is gone or leaves already",
        param="replica",
        code="replica_not_found",
    )


def _affinity_lost(stage: StageId) -> Failure:
    return Failure(
        kind=FailureKind.REPLICA_LOST,
        detail=f"the replica of {stage} that it requires is gone; start anew",
        where=stage,
        code="affinity_lost",
    )


def _present(payload: PayloadRef | None) -> tuple[PayloadRef, ...]:
    return () if payload is None else (payload,)
