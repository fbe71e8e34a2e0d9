"""The router: *this happened; what must be done?*

Rules
  * `handle` is the only door. It validates first and mutates then: an impossible event raises
    `InvalidTransition`, and nothing has changed.
  * A late event (output of a cancelled request, message of a former incarnation) is not impossible:
    it is counted, its payload is released, and nothing else happens.
  * Each accepted request ends in exactly one of `Finish`, `Fail`, `Cancelled`; no `Emit` follows it.
  * One function, `_terminate`, cleans up after every kind of end.

Theory of operation
  A request runs the subgraph (`graph.Plan`) between the inputs it brings and the outputs it wants.
  Its stages fall into groups that stream concurrently. When a stage has what it can start with, a slot
  is reserved at every stage of its group, all or nothing; requests that find no room wait in line.
  Tasks are bound to replicas one by one, each when it can start, by least outstanding work.

  Chunks are payload references. A chunk of a stream edge is fed at once; a full edge keeps its chunks
  until the source has ended. Windows over edges and outputs give the producer its send right: credit
  comes back as `InputConsumed` and `ConsumerDrained`, and goes on as `Grant`.

  What a task was fed is kept until its first chunk was forwarded. Until then a death of its replica
  costs nothing: the task is dispatched again under the next attempt number. After that the client
  would hear a seam, and the request fails.

  Time is in the events. Whatever waits has a deadline; `next_deadline` is `None` when nothing waits,
  so an idle engine sets no timer.

Table (request state x event; a dash raises, `late` counts and releases)

    event              QUEUED      RUNNING               DRAINING            gone
    RequestAborted     -> DONE     -> DRAINING or DONE   late                late
    RequestBroken      -> DONE     -> DRAINING or DONE   late                late
    ChunkProduced      -          RUNNING               late                late
    InputConsumed      -          RUNNING               late                late
    ConsumerDrained    -          RUNNING               late                late
    TaskFinished       -          RUNNING or -> DONE    DRAINING or -> DONE late
    TaskFailed         -          -> DRAINING or DONE   DRAINING or -> DONE late
    TaskCancelled      -          RUNNING (abandoned)   DRAINING or -> DONE late
    ReplicaDied        QUEUED     RUNNING or the end    DRAINING or -> DONE late
    DeadlinePassed     or the end or the end            replica evicted     nothing
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TypeVar, assert_never

import msgspec

from stretto.core import commands as do
from stretto.core import events as on
from stretto.core.admission import DrainRate, Group, WaitingLine
from stretto.core.deadlines import DeadlineKey, DeadlineKind, Deadlines
from stretto.core.flow import EdgeFlow, OutputFlow
from stretto.core.graph import Deployment, EdgeMode, PipelineSpec, Plan, induce, validated
from stretto.core.holds import Holds
from stretto.core.requests import Request, RequestState, Task, TaskState
from stretto.core.slots import LIVE, Pool, Replica, ReplicaPhase, did_work, died
from stretto.core.story import Story
from stretto.errors import Failure, FailureKind, InvalidTransition
from stretto.types import (
    INLINE,
    ChannelId,
    InputName,
    OutputName,
    PayloadRef,
    PipelineName,
    ReplicaId,
    RequestId,
    StageId,
    TaskKey,
)

EventT = TypeVar("EventT")

ARCHIVED_STORIES = 256
"""Stories of ended requests that are kept for `story()`."""


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """Totals since the start; received = rejected + accepted, accepted = finished + failed + cancelled + open."""

    received: int = 0
    rejected: int = 0
    accepted: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    retried: int = 0
    late: int = 0
    replica_deaths: int = 0


class StageStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges of one stage."""

    stage: StageId
    capacity: int
    bound: int
    reserved: int
    replicas: tuple[tuple[ReplicaId, str], ...]


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
        self._pipelines: dict[PipelineName, PipelineSpec] = {p.name: p for p in deployment.pipelines}
        self._pools: dict[StageId, Pool] = {stage.id: Pool(stage) for stage in deployment.stages}
        self._plans: dict[
            tuple[PipelineName, tuple[InputName, ...], tuple[OutputName, ...]], Plan | None
        ] = {}
        self._channels: dict[ChannelId, _Channel] = {}
        self._requests: dict[RequestId, Request] = {}
        self._queued: dict[PipelineName, dict[RequestId, None]] = {p.name: {} for p in deployment.pipelines}
        self._line = WaitingLine()
        self._unbound: dict[StageId, dict[RequestId, None]] = {s.id: {} for s in deployment.stages}
        self._drain_rate = DrainRate()
        self._holds = Holds()
        self._deadlines = Deadlines()
        self._archive: OrderedDict[RequestId, Story] = OrderedDict()
        self._counts: dict[str, int] = dict.fromkeys(Counters.__struct_fields__, 0)
        self._has_started = False
        self._is_stopping = False
        self._has_exited = False
        self._now = 0.0
        self._out: list[do.AnyCommand] = []

    # ------------------------------------------------------------------ the door

    def handle(self, event: on.AnyEvent) -> tuple[do.AnyCommand, ...]:
        """Take one event and return what must be done, in order.

        Raises:
            InvalidTransition: The event is impossible in this state; nothing has changed.
        """
        self._now = max(self._now, event.now)
        self._out = []
        self._transition(event)
        if self._is_stopping and not self._requests:
            self._exit()
        return tuple(self._out)

    def next_deadline(self) -> float | None:
        """Return when `DeadlinePassed` is due, in monotonic seconds; `None` if nothing waits."""
        return self._deadlines.next()

    def _transition(self, event: on.AnyEvent) -> None:  # noqa: C901, PLR0912 - one arm per event
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
            case on.ReplicaJoined():
                self._on_replica_joined(event)
            case on.ReplicaProgressed():
                self._on_replica_progressed(event)
            case on.ReplicaReady():
                self._on_replica_ready(event)
            case on.ReplicaStartFailed():
                self._on_replica_start_failed(event)
            case on.ReplicaDied():
                self._on_replica_died(event)
            case on.DrainRequested():
                self._on_drain_requested(event)
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
                    replicas=tuple((place.id, place.phase.value) for place in pool.replicas),
                )
                for pool in self._pools.values()
            ),
        )

    def replica_states(self) -> tuple[do.ReplicaState, ...]:
        """Return where every replica stands, for a channel that has just opened."""
        return tuple(_state_of(place) for pool in self._pools.values() for place in pool.replicas)

    # ------------------------------------------------------------------ engine and channels

    def _on_engine_started(self) -> None:
        self._require(not self._has_started, "the engine was started twice")
        self._has_started = True
        for pool in self._pools.values():
            for place in pool.replicas:
                self._start(pool, place)

    def _on_channel_opened(self, event: on.ChannelOpened) -> None:
        self._require(event.channel not in self._channels, f"channel {event.channel} was opened twice")
        self._channels[event.channel] = _Channel()

    def _on_channel_closed(self, event: on.ChannelClosed) -> None:
        channel = self._channels.get(event.channel)
        if channel is None:
            self._count("late")
            return
        for request_id in list(channel.requests):
            request = self._requests[request_id]
            request.story.add(self._now, "its API process is gone")
            self._cancel(request)
        del self._channels[event.channel]
        for payload, count in channel.held.items():
            for _ in range(count):
                self._drop(payload)

    def _on_shutdown_requested(self, event: on.ShutdownRequested) -> None:
        if self._is_stopping:
            return
        self._is_stopping = True
        self._deadlines.set(DeadlineKind.SHUTDOWN, None, self._now + event.drain_s)

    def _exit(self) -> None:
        """Stop every process; called when no request is left or the drain deadline has passed."""
        if self._has_exited:
            return
        self._has_exited = True
        self._deadlines.clear(DeadlineKind.SHUTDOWN, None)
        for pool in self._pools.values():
            for place in pool.replicas:
                was_live = place.phase in LIVE
                pool.leave_ready(place, ReplicaPhase.STOPPED)
                self._clear_place_deadlines(place)
                if was_live:
                    self._out.append(do.StopReplica(replica=place.id))
                    self._announce(place)
        self._out.append(do.Exit())

    # ------------------------------------------------------------------ requests: begin

    def _on_request_submitted(self, event: on.RequestSubmitted) -> None:
        channel = self._channels.get(event.channel)
        self._require(event.request not in self._requests, f"request {event.request} was submitted twice")
        if channel is None:
            self._late(*(ref for _, ref in event.inputs), *_present(event.options))
            return
        self._count("received")
        plan, refusal = self._plan(event)
        if plan is None:
            self._reject(event, refusal)
            return
        self._count("accepted")
        request = self._accept(event, plan)
        channel.requests[request.id] = None
        for task in request.tasks.values():
            self._consider(request, task)
        if request.state is RequestState.QUEUED:
            request.story.add(self._now, "queued")

    def _plan(self, event: on.RequestSubmitted) -> tuple[Plan | None, Failure]:
        """Return the request's plan, or why it is refused."""
        if self._is_stopping:
            return None, _failure(
                FailureKind.OVERLOADED, "the server is shutting down", code="server_shutting_down", retry=1.0
            )
        pipeline = self._pipelines.get(event.pipeline)
        if pipeline is None:
            known = ", ".join(self._pipelines)
            return None, _failure(
                FailureKind.INVALID_REQUEST,
                f"there is no pipeline {event.pipeline!r}; this server has: {known}",
                param="model",
                code="model_not_found",
            )
        plan = self._induced(pipeline, event)
        if plan is None:
            return None, _failure(
                FailureKind.INVALID_REQUEST,
                f"pipeline {pipeline.name!r} can't make {', '.join(event.outputs) or 'its outputs'} from "
                f"{', '.join(name for name, _ in event.inputs) or 'nothing'}; its inputs are "
                f"{', '.join(pipeline.inputs)}, its outputs {', '.join(o.name for o in pipeline.outputs)}",
                param="outputs",
                code="unsupported_value",
            )
        queued = len(self._queued[pipeline.name])
        if queued >= self._limits.max_queued:
            return None, _failure(
                FailureKind.OVERLOADED,
                f"{queued} requests are waiting, which is the limit; try again later",
                code="queue_full",
                retry=self._drain_rate.retry_after_s(pipeline.name, queued, self._now),
            )
        return plan, _NO_FAILURE

    def _induced(self, pipeline: PipelineSpec, event: on.RequestSubmitted) -> Plan | None:
        outputs = event.outputs or tuple(output.name for output in pipeline.outputs)
        inputs = tuple(name for name, _ in event.inputs)
        if set(inputs) - set(pipeline.inputs) or set(outputs) - {o.name for o in pipeline.outputs}:
            return None
        key = (pipeline.name, tuple(sorted(inputs)), tuple(sorted(outputs)))
        if key not in self._plans:
            self._plans[key] = induce(pipeline, inputs, outputs)
        return self._plans[key]

    def _reject(self, event: on.RequestSubmitted, failure: Failure) -> None:
        self._count("rejected")
        self._out.append(do.Reject(channel=event.channel, request=event.request, failure=failure))
        for _, payload in event.inputs:
            self._out.append(do.Release(payload=payload))
        self._out += [do.Release(payload=payload) for payload in _present(event.options)]

    def _accept(self, event: on.RequestSubmitted, plan: Plan) -> Request:
        may_retry = {s: self._pools[s].spec.recovery == "retry" for s in plan.stages}
        request = Request(event.request, event.channel, plan, self._limits, may_retry, event.session)
        request.priority = event.priority
        request.label = event.label
        request.submitted_at = self._now
        timeout_s = min(event.timeout_s or self._limits.request_timeout_s, self._limits.request_timeout_s)
        request.expires_at = self._now + timeout_s
        request.check_s = min(
            self._limits.queue_timeout_s,
            self._limits.slow_client_timeout_s,
            self._limits.stage_unavailable_timeout_s,
            *(self._pools[stage].spec.chunk_timeout_s for stage in plan.stages),
        )
        request.options = event.options
        for payload in _present(event.options):
            self._holds.hold(payload)
        for name, payload in event.inputs:
            self._supply(request, name, payload)
        self._requests[request.id] = request
        self._queued[plan.pipeline][request.id] = None
        self._deadlines.set(
            DeadlineKind.REQUEST, request.id, min(request.expires_at, self._now + request.check_s)
        )
        request.story.add(self._now, f"submitted to {plan.pipeline}")
        return request

    def _supply(self, request: Request, name: InputName, payload: PayloadRef) -> None:
        """Put a request's own input on its edges, complete."""
        for spec in request.plan.request_edges:
            if spec.request_input == name:
                edge = request.edges[spec.id]
                self._append(request, edge, payload)
                edge.has_ended = True
        if payload not in self._holds:
            self._out.append(do.Release(payload=payload))

    # ------------------------------------------------------------------ slots: reserve and bind

    def _consider(self, request: Request, task: Task) -> None:
        """Make a task ready if it can start now, and find it a place."""
        if task.state is not TaskState.WAITING_INPUT or not task.may_start:
            return
        task.state = TaskState.READY
        task.ready_at = self._now
        if task.has_reserved:
            self._bind(request, task)
            return
        group = request.plan.groups[task.key.stage]
        if all(self._pools[stage].has_room() for stage in group) and not self._is_outrun(request, group):
            self._reserve(request, group)
        else:
            self._line.join(request.id, group, request.priority)

    def _is_outrun(self, request: Request, group: Group) -> bool:
        """Say whether somebody already waits for one of the group's stages."""
        heads = [head for stage in group for head in self._line.heads(stage)]
        return any(self._requests[head].priority <= request.priority for head, _ in heads)

    def _reserve(self, request: Request, group: Group) -> None:
        """Promise the request a slot at each stage of a group, and bind what is ready."""
        if request.state is RequestState.QUEUED:
            request.state = RequestState.RUNNING
            request.started_at = self._now
            del self._queued[request.plan.pipeline][request.id]
            self._drain_rate.started(request.plan.pipeline, self._now)
        for stage in group:
            if request.tasks[stage].state is not TaskState.FINISHED:
                self._pools[stage].reserved += 1
                request.tasks[stage].has_reserved = True
        for stage in group:
            if request.tasks[stage].state is TaskState.READY:
                self._bind(request, request.tasks[stage])

    def _bind(self, request: Request, task: Task) -> None:
        """Dispatch a ready task to the replica with the least work, or let it wait for one."""
        stage = task.key.stage
        place = self._pools[stage].pick()
        if place is None:
            self._unbound[stage][request.id] = None
            request.story.add(self._now, f"waits for a replica of {stage}")
            return
        self._pools[stage].bind(place, task.key)
        task.has_reserved = False
        task.state = TaskState.BOUND
        task.replica = place.id
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
                chunks=task.granted_chunks,
                bytes=task.granted_bytes,
            )
        )
        for edge in task.edges_in:
            self._feed(request, task, edge)

    def _admit(self, stage: StageId) -> None:
        """Use what has become free at a stage: for unbound tasks first, then for the waiting line."""
        pool = self._pools[stage]
        while self._unbound[stage] and pool.pick() is not None:
            request_id = next(iter(self._unbound[stage]))
            del self._unbound[stage][request_id]
            request = self._requests[request_id]
            self._bind(request, request.tasks[stage])
        while pool.has_room():
            for request_id, group in self._line.heads(stage):
                if all(self._pools[each].has_room() for each in group):
                    self._line.leave(request_id, group)
                    self._reserve(self._requests[request_id], group)
                    break
            else:
                return

    def _unbind(self, task: Task) -> None:
        """Free the slot of a task that has ended at its replica, and the payloads it viewed."""
        place = self._place_of(task)
        self._pools[task.key.stage].unbind(place, task.key)
        self._deadlines.clear(DeadlineKind.CANCEL, task.key)
        task.state = TaskState.FINISHED
        task.ended_at = self._now
        self._drop_held(task)
        if place.phase is ReplicaPhase.DRAINING and not place.bound:
            self._leave(place)

    def _place_of(self, task: Task) -> Replica:
        assert task.replica is not None  # noqa: S101 - a bound task has a replica
        return self._pools[task.key.stage].replicas[task.replica.slot]

    # ------------------------------------------------------------------ chunks and credits

    def _on_chunk_produced(self, event: on.ChunkProduced) -> None:
        found = self._task(event.task)
        if found is None:
            self._late(event.payload)
            return
        request, task = found
        if event.kind == "preview":
            self._preview(request, task, event)
            return
        self._require(
            task.state is TaskState.BOUND and event.seq == task.produced,
            f"{event.task} produced chunk {event.seq}, expected {task.produced}",
            request,
        )
        task.produced += 1
        task.bytes_produced += event.payload.size_bytes
        task.units += event.length
        task.media_s += event.media_s
        task.progress_at = self._now
        task.deaths = 0
        if task.first_chunk_at is None:
            task.first_chunk_at = self._now
        request.story.add(self._now, task.chunk_line)
        for output in task.outputs:
            self._emit(request, task, output, event)
        for edge in task.edges_out:
            if not edge.is_closed:
                self._append(request, edge, event.payload)
                self._consider(request, request.tasks[edge.spec.target])
                self._feed(request, request.tasks[edge.spec.target], edge)
        if event.payload not in self._holds:
            self._out.append(do.Release(payload=event.payload))
        if request.kept_bytes > self._limits.retention_bytes:
            self._relieve(request)

    def _preview(self, request: Request, task: Task, event: on.ChunkProduced) -> None:
        for output in task.outputs:
            self._emit_to(request, output.name, event, seq=event.seq)
        if event.payload not in self._holds:
            self._out.append(do.Release(payload=event.payload))

    def _emit(self, request: Request, task: Task, output: OutputFlow, event: on.ChunkProduced) -> None:
        seq = output.produced
        output.produce(event.payload.size_bytes)
        self._emit_to(request, output.name, event, seq=seq)
        self._forwarded(request, task)

    def _emit_to(self, request: Request, output: OutputName, event: on.ChunkProduced, *, seq: int) -> None:
        if event.payload.place != INLINE:
            held = self._channels[request.channel].held
            held[event.payload] = held.get(event.payload, 0) + 1
            self._holds.hold(event.payload)
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
                timings=None if seq or event.kind == "preview" else request.timings(self._now),
            )
        )

    def _append(self, request: Request, edge: EdgeFlow, payload: PayloadRef) -> None:
        """Put a chunk on an edge and keep it for feeding and for a retry of the consumer."""
        edge.produce(payload.size_bytes)
        edge.chunks.append(payload)
        request.kept_bytes += payload.size_bytes
        self._holds.hold(payload)

    def _feed(self, request: Request, task: Task, edge: EdgeFlow) -> None:
        """Give a bound task what is on its edge, as far as the window allows, and the edge's end."""
        if task.state is not TaskState.BOUND:
            return
        assert task.replica is not None  # noqa: S101 - a bound task has a replica
        source = request.tasks[edge.spec.source] if edge.spec.source is not None else None
        if edge.is_starved:
            task.progress_at = self._now
        while edge.may_feed:
            payload = edge.chunks[edge.fed - edge.base]
            self._out.append(
                do.Feed(
                    replica=task.replica, task=task.key, edge=edge.spec.id, seq=edge.fed, payload=payload
                )
            )
            if payload.place != INLINE and payload not in task.held:
                task.held[payload] = None
                self._holds.hold(payload)
            edge.fed += 1
            edge.fed_bytes += payload.size_bytes
            if source is not None:
                self._forwarded(request, source)
        if edge.has_ended and edge.fed == edge.produced and not edge.close_sent:
            edge.close_sent = True
            self._out.append(do.CloseInput(replica=task.replica, task=task.key, edge=edge.spec.id))
        if not task.may_retry:
            self._trim(request, edge)

    def _forwarded(self, request: Request, task: Task) -> None:
        """Note that a chunk of the task has left: it can't be repeated, so its inputs need not be kept."""
        if task.has_forwarded:
            return
        task.has_forwarded = True
        task.may_retry = False
        for edge in task.edges_in:
            self._trim(request, edge)

    def _trim(self, request: Request, edge: EdgeFlow) -> None:
        """Drop the chunks that were fed."""
        while edge.base < edge.fed:
            self._drop_kept(request, edge)

    def _drop_kept(self, request: Request, edge: EdgeFlow) -> None:
        payload = edge.chunks.popleft()
        edge.base += 1
        request.kept_bytes -= payload.size_bytes
        self._drop(payload)

    def _relieve(self, request: Request) -> None:
        """Give up retries to stay within the retention budget; if that is not enough, the request."""
        for task in request.tasks.values():
            if task.state is TaskState.BOUND and task.may_retry:
                task.may_retry = False
                request.story.add(self._now, f"{task.key.stage}: inputs too large to keep for a retry")
                for edge in task.edges_in:
                    self._trim(request, edge)
        if request.kept_bytes > self._limits.retention_bytes:
            self._fail(
                request,
                FailureKind.STAGE_ERROR,
                f"more than {self._limits.retention_bytes} bytes wait between stages; "
                "raise `orchestrator.limits.retention_bytes` or use stream edges",
                code="retention_exceeded",
            )

    def _on_input_consumed(self, event: on.InputConsumed) -> None:
        found = self._task(event.task)
        if found is None:
            self._count("late")
            return
        request, task = found
        edge = request.edges.get(event.edge)
        self._require(
            edge is not None and task.state is TaskState.BOUND and event.up_to <= edge.fed,
            f"{event.task} consumed {event.edge} up to {event.up_to}",
            request,
        )
        assert edge is not None  # noqa: S101 - required above
        task.progress_at = self._now
        edge.consume(event.up_to)
        self._feed(request, task, edge)
        if edge.spec.source is not None:
            self._grant(request.tasks[edge.spec.source])

    def _on_consumer_drained(self, event: on.ConsumerDrained) -> None:
        request = self._requests.get(event.request)
        if request is None or request.state is not RequestState.RUNNING:
            self._count("late")
            return
        output = request.outputs.get(event.output)
        self._require(
            output is not None and event.up_to <= output.produced,
            f"the client drained {event.output} up to {event.up_to}",
            request,
        )
        assert output is not None  # noqa: S101 - required above
        output.consume(event.up_to)
        for task in request.tasks.values():
            if output in task.outputs:
                self._grant(task)

    def _grant(self, task: Task) -> None:
        """Pass credit on to the producer, in steps of half a window."""
        if task.state is not TaskState.BOUND:
            return
        assert task.replica is not None  # noqa: S101 - a bound task has a replica
        chunks, nbytes = task.limits()
        half_chunks = min((s.window_chunks for s in task.sinks if s.is_limiting), default=2) // 2
        half_bytes = min((s.window_bytes for s in task.sinks if s.is_limiting), default=2) // 2
        gain_chunks, gain_bytes = chunks - task.granted_chunks, nbytes - task.granted_bytes
        is_blocked = (
            task.produced >= task.granted_chunks or task.bytes_produced >= task.granted_bytes
        ) and (gain_chunks > 0 or gain_bytes > 0)
        if is_blocked or gain_chunks >= max(half_chunks, 1) or gain_bytes >= max(half_bytes, 1):
            if is_blocked:
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
        if isinstance(event.holder, TaskKey):
            found = self._requests.get(event.holder.request)
            task = None if found is None else found.tasks.get(event.holder.stage)
            if task is None or task.key != event.holder or event.payload not in task.held:
                self._count("late")
                return
            del task.held[event.payload]
        else:
            channel = self._channels.get(event.holder)
            if channel is None or event.payload not in channel.held:
                self._count("late")
                return
            channel.held[event.payload] -= 1
            if not channel.held[event.payload]:
                del channel.held[event.payload]
        self._drop(event.payload)

    def _drop(self, payload: PayloadRef) -> None:
        if self._holds.drop(payload):
            self._out.append(do.Release(payload=payload))

    def _drop_held(self, task: Task) -> None:
        held, task.held = task.held, {}
        for payload in held:
            self._drop(payload)

    # ------------------------------------------------------------------ tasks: end

    def _on_task_finished(self, event: on.TaskFinished) -> None:
        found = self._ended(event.task)
        if found is None:
            return
        request, task = found
        did_work(self._place_of(task))
        self._unbind(task)
        if request.state is RequestState.RUNNING:
            request.story.add(self._now, f"{task.key.stage}: finished")
            self._complete(request, task)
        self._forget_if_drained(request)
        self._admit(task.key.stage)

    def _on_task_cancelled(self, event: on.TaskCancelled) -> None:
        found = self._ended(event.task)
        if found is None:
            return
        request, task = found
        self._require(
            request.state is RequestState.DRAINING or task.is_abandoned,
            f"{event.task} was cancelled, but nobody asked for that",
            request,
        )
        self._unbind(task)
        if request.state is RequestState.RUNNING:
            self._complete(request, task)
        self._forget_if_drained(request)
        self._admit(task.key.stage)

    def _on_task_failed(self, event: on.TaskFailed) -> None:
        found = self._ended(event.task)
        if found is None:
            return
        request, task = found
        self._unbind(task)
        if request.state is RequestState.RUNNING:
            request.story.add(self._now, f"{task.key.stage}: failed: {event.failure.detail}")
            self._terminate(
                request, do.Fail(channel=request.channel, request=request.id, failure=event.failure)
            )
        self._forget_if_drained(request)
        self._admit(task.key.stage)

    def _complete(self, request: Request, task: Task) -> None:
        """Pass a task's end on: to its consumers, its sources, the client, and the request itself."""
        task.state = TaskState.FINISHED
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
            consumer = request.tasks[edge.spec.target]
            self._consider(request, consumer)
            self._feed(request, consumer, edge)
        for edge in task.edges_in:
            self._close_edge(request, edge)
        if all(each.state is TaskState.FINISHED for each in request.tasks.values()):
            self._terminate(
                request,
                do.Finish(
                    channel=request.channel, request=request.id, timings=request.timings(self._now)
                ),
            )

    def _close_edge(self, request: Request, edge: EdgeFlow) -> None:
        """A consumer has finished: it wants no more on this edge, and perhaps nobody does."""
        if edge.is_closed:
            return
        edge.is_closed = True
        while edge.chunks:
            self._drop_kept(request, edge)
        source = request.tasks[edge.spec.source] if edge.spec.source is not None else None
        if source is None or source.state is TaskState.FINISHED:
            return
        if source.outputs or not all(each.is_closed for each in source.edges_out):
            self._grant(source)
        elif source.state is TaskState.BOUND:
            source.is_abandoned = True
            self._cancel_task(source)
        else:
            self._unreserve(request, source)
            self._complete(request, source)

    # ------------------------------------------------------------------ requests: end

    def _on_request_aborted(self, event: on.RequestAborted) -> None:
        request = self._requests.get(event.request)
        is_live = request is not None and request.state is not RequestState.DRAINING
        if request is not None and is_live:
            request.story.add(self._now, "aborted by the client")
            self._cancel(request)
        if event.acknowledge and event.channel in self._channels:
            self._out.append(
                do.AcknowledgeAbort(channel=event.channel, request=event.request, stopped=is_live)
            )

    def _on_request_broken(self, event: on.RequestBroken) -> None:
        request = self._requests.get(event.request)
        if request is None or request.state is RequestState.DRAINING:
            self._count("late")
            return
        self._terminate(
            request, do.Fail(channel=request.channel, request=request.id, failure=event.failure)
        )

    def _cancel(self, request: Request) -> None:
        self._terminate(request, do.Cancelled(channel=request.channel, request=request.id))

    def _fail(
        self,
        request: Request,
        kind: FailureKind,
        detail: str,
        *,
        where: str = "",
        code: str | None = None,
        retry: float | None = None,
    ) -> None:
        request.story.add(self._now, f"failed: {detail}")
        failure = _failure(kind, f"request {request.id}: {detail}", where=where, code=code, retry=retry)
        self._terminate(request, do.Fail(channel=request.channel, request=request.id, failure=failure))

    def _terminate(self, request: Request, terminal: do.Finish | do.Fail | do.Cancelled) -> None:
        """End a request: the only way out, whatever the reason."""
        names = {do.Finish: "finished", do.Fail: "failed", do.Cancelled: "cancelled"}
        self._count(names[type(terminal)])
        request.story.add(self._now, names[type(terminal)])
        self._out.append(terminal)
        request.state = RequestState.DRAINING
        self._queued[request.plan.pipeline].pop(request.id, None)
        self._line.leave(request.id)
        self._deadlines.clear(DeadlineKind.REQUEST, request.id)
        self._channels[request.channel].requests.pop(request.id, None)
        freed: list[StageId] = []
        for task in request.tasks.values():
            if task.state is TaskState.BOUND:
                self._cancel_task(task)
            elif self._unreserve(request, task):
                freed.append(task.key.stage)
        for edge in request.edges.values():
            while edge.chunks:
                self._drop_kept(request, edge)
        for payload in _present(request.options):
            self._drop(payload)
        self._forget_if_drained(request)
        for stage in freed:
            self._admit(stage)

    def _cancel_task(self, task: Task) -> None:
        """Tell a replica to end a task; a task is told once."""
        if task.is_cancelled:
            return
        task.is_cancelled = True
        assert task.replica is not None  # noqa: S101 - a bound task has a replica
        self._deadlines.set(DeadlineKind.CANCEL, task.key, self._now + self._limits.cancel_timeout_s)
        self._out.append(do.CancelTask(replica=task.replica, task=task.key))

    def _unreserve(self, request: Request, task: Task) -> bool:
        """Give a promised slot back; return whether there was one."""
        self._unbound[task.key.stage].pop(request.id, None)
        task.state = TaskState.FINISHED
        if not task.has_reserved:
            return False
        task.has_reserved = False
        self._pools[task.key.stage].reserved -= 1
        return True

    def _forget_if_drained(self, request: Request) -> None:
        """Drop the record of an ended request when no replica works for it any more."""
        if request.state is not RequestState.DRAINING:
            return
        if any(task.state is TaskState.BOUND for task in request.tasks.values()):
            return
        request.state = RequestState.DONE
        del self._requests[request.id]
        self._archive[request.id] = request.story
        while len(self._archive) > ARCHIVED_STORIES:
            self._archive.popitem(last=False)

    # ------------------------------------------------------------------ replicas

    def _on_replica_joined(self, event: on.ReplicaJoined) -> None:
        place = self._live(event.replica)
        if place is None:
            return
        self._require(
            place.phase is ReplicaPhase.STARTING, f"{event.replica} joined while {place.phase.value}"
        )
        place.phase = ReplicaPhase.LOADING
        self._watch_start(place)
        self._announce(place)

    def _on_replica_progressed(self, event: on.ReplicaProgressed) -> None:
        place = self._live(event.replica)
        if place is None:
            return
        self._require(
            place.phase is ReplicaPhase.LOADING, f"{event.replica} loads while {place.phase.value}"
        )
        self._watch_start(place)
        self._announce(place, detail=event.what, fraction=event.fraction)

    def _on_replica_ready(self, event: on.ReplicaReady) -> None:
        place = self._live(event.replica)
        if place is None:
            return
        self._require(
            place.phase is ReplicaPhase.LOADING and event.slots > 0,
            f"{event.replica} is ready with {event.slots} slots while {place.phase.value}",
        )
        self._deadlines.clear(DeadlineKind.START, place.id)
        self._pools[event.replica.stage].become_ready(place, event.slots)
        self._announce(place, fraction=1.0)
        self._admit(event.replica.stage)

    def _on_replica_start_failed(self, event: on.ReplicaStartFailed) -> None:
        place = self._live(event.replica)
        if place is None:
            return
        # A reason that the process could name will not go away by itself; a stage that has worked
        # before gets the back-off all the same.
        for_good = not self._pools[event.replica.stage].was_ready
        self._evict(place, event.reason, for_good=for_good)

    def _on_replica_died(self, event: on.ReplicaDied) -> None:
        place = self._live(event.replica)
        if place is not None:
            self._evict(place, event.reason)

    def _on_drain_requested(self, event: on.DrainRequested) -> None:
        place = self._live(event.replica)
        if place is None or place.phase is ReplicaPhase.DRAINING:
            return
        pool = self._pools[event.replica.stage]
        pool.leave_ready(place, ReplicaPhase.DRAINING)
        self._announce(place)
        if not place.bound:
            self._leave(place)
            return
        self._deadlines.clear(DeadlineKind.START, place.id)
        self._deadlines.set(DeadlineKind.DRAIN, place.id, self._now + self._limits.drain_timeout_s)
        self._out.append(do.DrainReplica(replica=place.id))

    def _leave(self, place: Replica) -> None:
        """A drained replica has nothing left to do."""
        self._pools[place.id.stage].leave_ready(place, ReplicaPhase.STOPPED)
        self._clear_place_deadlines(place)
        self._out.append(do.StopReplica(replica=place.id))
        self._announce(place)

    def _live(self, replica: ReplicaId) -> Replica | None:
        """Return the place that this very process fills; a former incarnation's message is late."""
        pool = self._pools.get(replica.stage)
        place = None if pool is None else pool.find(replica)
        if place is None:
            self._count("late")
        return place

    def _start(self, pool: Pool, place: Replica) -> None:
        self._out.append(do.StartReplica(replica=pool.start(place)))
        self._watch_start(place)
        self._announce(place)

    def _watch_start(self, place: Replica) -> None:
        timeout_s = self._pools[place.id.stage].spec.start_timeout_s
        self._deadlines.set(DeadlineKind.START, place.id, self._now + timeout_s)

    def _evict(self, place: Replica, reason: str, *, for_good: bool = False) -> None:
        """A process is gone, or must go: repeat or fail what it held, and plan its successor."""
        pool = self._pools[place.id.stage]
        was_draining = place.phase is ReplicaPhase.DRAINING
        pool.leave_ready(place, ReplicaPhase.DEAD)
        place.reason = reason
        self._clear_place_deadlines(place)
        self._count("replica_deaths")
        self._out.append(do.StopReplica(replica=place.id))
        if was_draining or self._is_stopping:
            place.phase = ReplicaPhase.STOPPED
        else:
            retry_at = died(place, self._limits, self._now, for_good=for_good)
            self._deadlines.set(DeadlineKind.RESTART, place.id, retry_at)
        self._announce(place, detail=reason)
        stranded = [self._requests[key.request] for key in place.bound]
        for request in stranded:
            task = request.tasks[place.id.stage]
            self._unbind_dead(pool, place, task)
            if request.state is RequestState.RUNNING:
                self._recover(request, task, place.id, reason)
            self._forget_if_drained(request)
        self._admit(place.id.stage)

    def _unbind_dead(self, pool: Pool, place: Replica, task: Task) -> None:
        pool.unbind(place, task.key)
        self._deadlines.clear(DeadlineKind.CANCEL, task.key)
        task.state = TaskState.FINISHED
        task.ended_at = self._now
        self._drop_held(task)

    def _recover(self, request: Request, task: Task, replica: ReplicaId, reason: str) -> None:
        """Repeat a dead replica's task if nobody has heard of it yet; else end its request."""
        stage = task.key.stage
        request.story.add(self._now, f"{stage}: {replica} died: {reason}")
        if task.is_abandoned:
            self._complete(request, task)
            return
        task.deaths += 1
        if task.deaths >= self._limits.poison_deaths:
            self._fail(
                request,
                FailureKind.POISON_REQUEST,
                f"{task.deaths} replicas of {stage} in a row died on it, the last: {reason}",
                where=str(replica),
            )
        elif task.may_retry:
            self._repeat(request, task)
        else:
            self._fail(
                request,
                FailureKind.REPLICA_LOST,
                f"replica {replica} died ({reason}) after it had sent output; try again",
                where=str(replica),
                retry=1.0,
            )

    def _repeat(self, request: Request, task: Task) -> None:
        """Dispatch a task again under the next attempt number, with its inputs from the beginning."""
        self._count("retried")
        task.key = task.key._replace(attempt=task.key.attempt + 1)
        for edge in task.edges_in:
            edge.rewind()
        for edge in task.edges_out:
            while edge.chunks:
                self._drop_kept(request, edge)
            edge.base = edge.produced = edge.consumed = 0
            edge.bytes_produced = edge.bytes_consumed = 0
            edge.sizes.clear()
        task.produced = task.bytes_produced = task.units = 0
        task.media_s = 0.0
        task.first_chunk_at = task.ended_at = None
        task.is_cancelled = False
        task.state = TaskState.READY
        task.ready_at = self._now
        task.has_reserved = True
        self._pools[task.key.stage].reserved += 1
        self._bind(request, task)

    def _clear_place_deadlines(self, place: Replica) -> None:
        for kind in (DeadlineKind.START, DeadlineKind.DRAIN, DeadlineKind.RESTART):
            self._deadlines.clear(kind, place.id)

    def _announce(self, place: Replica, detail: str = "", fraction: float = 0.0) -> None:
        state = _state_of(place)
        if detail or fraction:
            state = msgspec.structs.replace(state, detail=detail, fraction=fraction)
        self._out.append(do.Announce(state=state))

    # ------------------------------------------------------------------ deadlines

    def _on_deadline_passed(self) -> None:
        for key in self._deadlines.due(self._now):
            self._expire(key)

    def _expire(self, key: DeadlineKey) -> None:
        kind, what = key
        match kind:
            case DeadlineKind.REQUEST:
                self._check_waits(what)
            case DeadlineKind.CANCEL:
                self._expire_cancel(what)
            case DeadlineKind.SHUTDOWN:
                self._expire_shutdown()
            case DeadlineKind.START | DeadlineKind.RESTART | DeadlineKind.DRAIN:
                self._expire_place(kind, what)
            case _:
                assert_never(kind)

    def _expire_cancel(self, what: object) -> None:
        assert isinstance(what, TaskKey)  # noqa: S101 - kinds and keys go together
        place = self._place_of(self._requests[what.request].tasks[what.stage])
        self._evict(place, f"did not end cancelled task {what} in {self._limits.cancel_timeout_s:g} s")

    def _expire_shutdown(self) -> None:
        for request in list(self._requests.values()):
            if request.state is not RequestState.DRAINING:
                self._fail(
                    request,
                    FailureKind.ENGINE_DEAD,
                    "the server shut down before it was finished",
                    code="server_shutting_down",
                )
        self._exit()

    def _expire_place(self, kind: DeadlineKind, what: object) -> None:
        assert isinstance(what, ReplicaId)  # noqa: S101 - kinds and keys go together
        pool = self._pools[what.stage]
        place = pool.replicas[what.slot]
        if kind is DeadlineKind.RESTART:
            self._start(pool, place)
        elif kind is DeadlineKind.START:
            self._evict(place, f"showed no progress for {pool.spec.start_timeout_s:g} s while starting")
        else:
            self._evict(place, f"did not drain within {self._limits.drain_timeout_s:g} s")

    def _check_waits(self, what: object) -> None:
        """End a request whose wait is over, or look again when the next of its waits may be."""
        assert isinstance(what, str)  # noqa: S101 - kinds and keys go together
        request = self._requests[RequestId(what)]
        if self._now >= request.expires_at:
            self._fail(
                request,
                FailureKind.DEADLINE_EXCEEDED,
                f"not finished in {request.expires_at - request.submitted_at:g} s; it was "
                f"{'waiting in the queue' if request.state is RequestState.QUEUED else 'running'}",
                where=self._holder(request),
            )
            return
        next_at = min(request.expires_at, self._now + request.check_s)
        waits = self._queue_waits(request) if request.state is RequestState.QUEUED else self._waits(request)
        for since, timeout_s, kind, detail, where in waits:
            if self._now >= since + timeout_s:
                retry = 1.0 if kind is FailureKind.NO_REPLICA else None
                self._fail(request, kind, detail, where=where, retry=retry)
                return
            next_at = min(next_at, since + timeout_s)
        self._deadlines.set(DeadlineKind.REQUEST, request.id, next_at)

    def _queue_waits(self, request: Request) -> list[_Wait]:
        """Return what a queued request waits for."""
        missing = [stage for stage in request.plan.stages if not self._pools[stage].capacity]
        waits = [self._no_slot("queue", request.submitted_at)]
        if missing:
            waits.append(self._no_replica(missing[0], request.submitted_at))
        return waits

    def _waits(self, request: Request) -> list[_Wait]:
        """Return what a running request waits for; waits on other parts of the request are theirs."""
        waits: list[_Wait] = []
        for task in request.tasks.values():
            stage = task.key.stage
            if task.state is TaskState.READY and request.id in self._unbound[stage]:
                waits.append(self._no_replica(stage, task.ready_at))
            elif task.state is TaskState.READY:
                waits.append(self._no_slot(stage, task.ready_at))
            elif task.state is TaskState.BOUND and task.could_go_on:
                timeout_s = self._pools[stage].spec.chunk_timeout_s
                waits.append(
                    (
                        task.progress_at,
                        timeout_s,
                        FailureKind.DEADLINE_EXCEEDED,
                        f"stage {stage} made no progress for {timeout_s:g} s",
                        str(task.replica),
                    )
                )
            elif task.state is TaskState.BOUND and any(_is_full(output) for output in task.outputs):
                timeout_s = self._limits.slow_client_timeout_s
                waits.append(
                    (
                        task.progress_at,
                        timeout_s,
                        FailureKind.DEADLINE_EXCEEDED,
                        f"the client took nothing for {timeout_s:g} s while output was waiting",
                        "client",
                    )
                )
        return waits

    def _no_slot(self, where: str, since: float) -> _Wait:
        timeout_s = self._limits.queue_timeout_s
        return (
            since,
            timeout_s,
            FailureKind.DEADLINE_EXCEEDED,
            f"no free slot in {timeout_s:g} s; the server is busy",
            where,
        )

    def _no_replica(self, stage: StageId, since: float) -> _Wait:
        timeout_s = self._limits.stage_unavailable_timeout_s
        reasons = [place.reason for place in self._pools[stage].replicas if place.reason]
        last = f"; the last one died: {reasons[-1]}" if reasons else ""
        return (
            since,
            timeout_s,
            FailureKind.NO_REPLICA,
            f"stage {stage} had no usable replica for {timeout_s:g} s{last}",
            stage,
        )

    def _holder(self, request: Request) -> str:
        """Return the stage that holds a request up: the first that has not finished."""
        if request.state is RequestState.QUEUED:
            return "queue"
        return next((s for s, t in request.tasks.items() if t.state is not TaskState.FINISHED), "")

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
        self._check_holds()
        belong = {request_id for channel in self._channels.values() for request_id in channel.requests}
        assert belong == {request.id for request in live}, "channel requests"

    def _check_request(self, request: Request) -> None:
        is_queued = request.id in self._queued[request.plan.pipeline]
        assert is_queued == (request.state is RequestState.QUEUED), f"{request.id}: queue"
        is_live = request.state is not RequestState.DRAINING
        assert self._deadlines.has(DeadlineKind.REQUEST, request.id) == is_live, f"{request.id}: deadline"
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
            assert edge.base <= edge.fed <= edge.produced or edge.is_closed, f"{edge.spec.id}: cursors"
            assert edge.consumed <= edge.fed or edge.is_closed, f"{edge.spec.id}: consumed"
            assert is_live or not edge.chunks, f"{edge.spec.id}: keeps chunks of an ended request"
        kept = sum(c.size_bytes for edge in request.edges.values() for c in edge.chunks)
        assert kept == request.kept_bytes, f"{request.id}: kept bytes"

    def _check_pool(self, pool: Pool) -> None:
        ready = [place for place in pool.replicas if place.phase is ReplicaPhase.READY]
        assert pool.capacity == sum(place.slots for place in ready), f"{pool.spec.id}: capacity"
        assert pool.free == sum(place.slots - len(place.bound) for place in ready), f"{pool.spec.id}: free"
        tasks = [r.tasks[pool.spec.id] for r in self._requests.values() if pool.spec.id in r.tasks]
        assert pool.reserved == sum(task.has_reserved for task in tasks), f"{pool.spec.id}: reserved"
        bound = {task.key for task in tasks if task.state is TaskState.BOUND}
        assert bound == {key for place in pool.replicas for key in place.bound}, f"{pool.spec.id}: bound"
        for place in pool.replicas:
            assert place.phase in LIVE or not place.bound, f"{place.id}: holds tasks without a process"
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
                holders += task.held
        for channel in self._channels.values():
            holders += [payload for payload, count in channel.held.items() for _ in range(count)]
        for payload in holders:
            expected[payload] = expected.get(payload, 0) + 1
        assert expected == self._holds.counts(), "holds"

    # ------------------------------------------------------------------ small things

    def _task(self, key: TaskKey) -> tuple[Request, Task] | None:
        """Return a task of a running request by its present attempt; `None` means late."""
        request = self._requests.get(key.request)
        if request is None or request.state is RequestState.DRAINING:
            return None
        task = request.tasks.get(key.stage)
        if task is None or task.key != key or task.is_abandoned:
            return None
        return request, task

    def _ended(self, key: TaskKey) -> tuple[Request, Task] | None:
        """Return the bound task that has ended at its replica; a late one is counted."""
        request = self._requests.get(key.request)
        task = None if request is None else request.tasks.get(key.stage)
        if request is None or task is None or task.key != key:
            self._count("late")
            return None
        self._require(task.state is TaskState.BOUND, f"{key} ended while {task.state.value}", request)
        return request, task

    def _late(self, *payloads: PayloadRef) -> None:
        self._count("late")
        self._out += [do.Release(payload=payload) for payload in payloads if payload not in self._holds]

    def _count(self, name: str) -> None:
        self._counts[name] += 1

    def _require(self, is_legal: bool, what: str, request: Request | None = None) -> None:  # noqa: FBT001
        """Raise before anything has changed."""
        if not is_legal:
            story = "" if request is None else f"\n{request.story}"
            raise InvalidTransition(f"this is a bug in Stretto: {what}{story}")


_Wait = tuple[float, float, FailureKind, str, str]
"""Since when, how long at most, and how the request fails then: kind, text, where."""

_NO_FAILURE = Failure(kind=FailureKind.INTERNAL_ERROR, detail="")


def _failure(
    kind: FailureKind,
    detail: str,
    *,
    where: str = "",
    param: str | None = None,
    code: str | None = None,
    retry: float | None = None,
) -> Failure:
    return Failure(
        kind=kind, detail=detail, where=where, param=param, code=code, retry_after_s=retry
    )


def _present(payload: PayloadRef | None) -> tuple[PayloadRef, ...]:
    return () if payload is None else (payload,)


def _is_full(output: OutputFlow) -> bool:
    return output.produced >= output.chunk_limit or output.bytes_produced >= output.byte_limit


def _state_of(place: Replica) -> do.ReplicaState:
    is_dead = place.phase in (ReplicaPhase.DEAD, ReplicaPhase.PARKED)
    return do.ReplicaState(
        replica=place.id, state=place.phase.value, detail=place.reason if is_dead else ""
    )
