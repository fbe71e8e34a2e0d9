"""The state of requests and of their tasks: data only; `router` moves it."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from stretto.core.commands import UNLIMITED, StageTiming, Timings
from stretto.core.flow import EdgeFlow, OutputFlow, Sink
from stretto.core.graph import EdgeMode, Limits, Plan
from stretto.core.story import Story
from stretto.types import (
    Boundary,
    EdgeId,
    InputName,
    OutputName,
    PayloadRef,
    Recovery,
    ReplicaId,
    StageId,
    TaskKey,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stretto.core.events import RequestSubmitted


class RequestState(Enum):
    """What a request waits for; it is in `Router.requests` in all of them but the last."""

    QUEUED = "queued"  # for slots at its entry stages; also in the waiting line
    RUNNING = "running"  # for its tasks
    DRAINING = "draining"  # its terminal was sent; for the end of cancelled tasks
    DONE = "done"  # for nothing; its story is in the archive


class TaskState(Enum):
    """What a task waits for."""

    WAITING_INPUT = "waiting_input"  # for what it can start with
    READY = "ready"  # for a slot or a usable replica
    BOUND = "bound"  # for its end; it is in its replica's `bound`
    FINISHED = "finished"  # for nothing


class Task:
    """A request's part at one stage.

    Attributes:
        key: Identity of the present attempt.
        state: See `TaskState`.
        replica: Who does, or did, the present attempt.
        edges_in: Its inputs.
        edges_out: Its outputs to stages.
        outputs: Its outputs to the client.
        sinks: Everybody who takes its chunks: `edges_out` and `outputs`.
        held: Shared-memory payloads that its replica may be viewing, and how many views of each.
        produced: Data chunks of this attempt.
        bytes_produced: Their bytes.
        earlier_chunks: Data chunks of earlier attempts on which this one goes on.
        earlier_bytes: Their bytes.
        units: Units of all these chunks.
        has_forwarded: A chunk went to a stage or to the client.
        recovery: What may be done after a death; see `stretto.types.Recovery`.
        keeps_inputs: What another attempt would need is all kept.
        resume: Where another attempt would go on; `None` is the beginning.
        resume_units: The units before that.
        has_reserved: A slot at its stage is promised to it.
        is_cancelled: Its replica was told to end it.
        is_abandoned: It was cancelled because nobody wants its output; its end counts as finished.
        deaths: Replica deaths in a row without a new chunk.
        granted_chunks: Send right that the replica knows.
        granted_bytes: Likewise.
        step_chunks: A grant of fewer chunks is worth a message only if the task waits for it.
        step_bytes: Likewise.
        progress_at: When it last did something or was last enabled to.
        finish_reason: Why its output ended, as its backend said last.
    """

    __slots__ = (
        "bytes_produced",
        "deaths",
        "dispatched_at",
        "earlier_bytes",
        "earlier_chunks",
        "edges_in",
        "edges_out",
        "ended_at",
        "finish_reason",
        "first_chunk_at",
        "granted_bytes",
        "granted_chunks",
        "has_forwarded",
        "has_reserved",
        "held",
        "is_abandoned",
        "is_cancelled",
        "keeps_inputs",
        "key",
        "media_s",
        "outputs",
        "produced",
        "progress_at",
        "ready_at",
        "recovery",
        "replica",
        "resume",
        "resume_units",
        "sinks",
        "state",
        "step_bytes",
        "step_chunks",
        "units",
    )

    def __init__(
        self,
        key: TaskKey,
        edges_in: tuple[EdgeFlow, ...],
        edges_out: tuple[EdgeFlow, ...],
        outputs: tuple[OutputFlow, ...],
        recovery: Recovery,
    ) -> None:
        self.key = key
        self.state = TaskState.WAITING_INPUT
        self.replica: ReplicaId | None = None
        self.edges_in = edges_in
        self.edges_out = edges_out
        self.outputs = outputs
        self.sinks: tuple[Sink, ...] = (*edges_out, *outputs)
        self.held: dict[PayloadRef, int] = {}
        self.produced = 0
        self.bytes_produced = 0
        self.earlier_chunks = 0
        self.earlier_bytes = 0
        self.units = 0
        self.media_s = 0.0
        self.has_forwarded = False
        self.recovery: Recovery = recovery
        self.keeps_inputs = True
        self.resume: Boundary | None = None
        self.resume_units = 0
        self.has_reserved = False
        self.is_abandoned = False
        self.is_cancelled = False
        self.deaths = 0
        self.granted_chunks = 0
        self.granted_bytes = 0
        windows = [(s.window_chunks, s.window_bytes) for s in self.sinks if s.is_limiting]
        self.step_chunks = max(min((chunks for chunks, _ in windows), default=2) // 2, 1)
        self.step_bytes = max(min((nbytes for _, nbytes in windows), default=2) // 2, 1)
        self.ready_at = 0.0
        self.dispatched_at = 0.0
        self.first_chunk_at: float | None = None
        self.ended_at: float | None = None
        self.progress_at = 0.0
        self.finish_reason = ""

    @property
    def may_start(self) -> bool:
        """Say whether the task can be dispatched: a stream input, all full inputs, or all ended."""
        full = [e.may_start for e in self.edges_in if not _streams(e)]
        return (
            any(e.may_start for e in self.edges_in if _streams(e))
            or (bool(full) and all(full))
            or all(e.has_ended for e in self.edges_in)
        )

    @property
    def has_credit(self) -> bool:
        """Say whether its replica may send the next chunk."""
        return self.produced < self.granted_chunks and self.bytes_produced < self.granted_bytes

    @property
    def has_work(self) -> bool:
        """Say whether its replica has input that it has not absorbed, or all the input there will be."""
        return any(edge.consumed < edge.fed for edge in self.edges_in) or all(
            edge.close_sent for edge in self.edges_in
        )

    @property
    def may_repeat(self) -> bool:
        """Say whether another attempt could take its place unnoticed."""
        if self.recovery == "retry":
            return self.keeps_inputs and not self.has_forwarded
        return self.keeps_inputs and self.recovery == "replay"

    @property
    def fed_kept_bytes(self) -> int:
        """Return how many bytes are kept only for another attempt."""
        return sum(edge.fed_kept_bytes for edge in self.edges_in)

    def limits(self) -> tuple[int, int]:
        """Return the send right in chunks and bytes of this attempt that the sinks allow now."""
        chunks = nbytes = UNLIMITED
        for sink in self.sinks:
            if sink.is_limiting:
                chunks = min(chunks, sink.consumed + sink.window_chunks)
                nbytes = min(nbytes, sink.bytes_consumed + sink.window_bytes)
        return chunks - self.earlier_chunks, nbytes - self.earlier_bytes

    def count(self, size_bytes: int, length: int, media_s: float) -> None:
        """Count a data chunk."""
        self.produced += 1
        self.bytes_produced += size_bytes
        self.units += length
        self.media_s += media_s
        self.deaths = 0

    def repeat(self) -> None:
        """Become the next attempt: the kept inputs again, and output from where the last one stood."""
        self.key = self.key._replace(attempt=self.key.attempt + 1)
        for edge in self.edges_in:
            edge.rewind()
        self.earlier_chunks += self.produced
        self.earlier_bytes += self.bytes_produced
        self.produced = self.bytes_produced = 0
        self.ended_at = None

    def forget_output(self) -> None:
        """Count what was produced no more; nothing of it may have been forwarded."""
        for edge in self.edges_out:
            edge.restart()
        self.produced = self.bytes_produced = self.units = 0
        self.earlier_chunks = self.earlier_bytes = 0
        self.media_s = 0.0
        self.finish_reason = ""
        self.first_chunk_at = None

    def timing(self, now: float) -> StageTiming:
        """Return this task's part of the request's time."""
        if self.replica is None:
            return StageTiming(stage=self.key.stage)
        first = None if self.first_chunk_at is None else self.first_chunk_at - self.dispatched_at
        return StageTiming(
            stage=self.key.stage,
            replica=self.replica,
            waited_s=self.dispatched_at - self.ready_at,
            first_chunk_s=first,
            ran_s=(now if self.ended_at is None else self.ended_at) - self.dispatched_at,
            chunks=self.earlier_chunks + self.produced,
            units=self.units,
            media_s=self.media_s,
            attempts=self.key.attempt + 1,
            finish_reason=self.finish_reason,
        )


def _streams(edge: EdgeFlow) -> bool:
    return edge.spec.mode is EdgeMode.STREAM


class Request:
    """One accepted request.

    Attributes:
        id: Identity.
        channel: Who asked.
        plan: The subgraph it runs.
        state: See `RequestState`.
        tasks: By stage, in topological order.
        edges: By id, the request's own inputs included.
        outputs: By name.
        options: The options' payload, held.
        affinity: Which replicas it should meet again.
        input_at: When the client last sent something, or a task last used some of it.
        party: Itself and its companions, in order; one that goes alone is a party of its own.
        party_size: How many they are to be.
        kept_bytes: Bytes of all chunks in its edges' buffers.
        kept_chunks: How many they are.
        submitted_at: Monotonic seconds.
        started_at: When its first slots were reserved; `None` while it is queued.
        expires_at: The end of its life.
        check_s: How often its waits must be looked at, at least.
    """

    __slots__ = (
        "affinity",
        "channel",
        "check_s",
        "edges",
        "expires_at",
        "id",
        "input_at",
        "kept_bytes",
        "kept_chunks",
        "options",
        "outputs",
        "party",
        "party_size",
        "plan",
        "priority",
        "started_at",
        "state",
        "story",
        "submitted_at",
        "tasks",
    )

    def __init__(
        self,
        submitted: RequestSubmitted,
        plan: Plan,
        limits: Limits,
        recovery: Mapping[StageId, Recovery],
    ) -> None:
        self.id = submitted.request
        self.channel = submitted.channel
        self.plan = plan
        self.state = RequestState.QUEUED
        self.options = submitted.options
        self.affinity = submitted.affinity
        self.priority = submitted.priority
        self.party: list[Request] = [self]
        self.party_size = 1 + submitted.companions
        self.kept_bytes = self.kept_chunks = 0
        self.submitted_at = self.input_at = 0.0
        self.started_at: float | None = None
        self.expires_at = 0.0
        self.check_s = 0.0
        self.story = Story(submitted.label)
        self.edges: dict[EdgeId, EdgeFlow] = {
            edge.id: EdgeFlow(edge, is_limiting=edge.id not in plan.buffered)
            for stage in plan.stages
            for edge in plan.edges_in[stage]
        }
        self.outputs: dict[OutputName, OutputFlow] = {
            name: OutputFlow(name, stage, limits.client_window_chunks, limits.client_window_bytes)
            for stage in plan.stages
            for name in plan.outputs[stage]
        }
        self.tasks = {
            stage: Task(
                TaskKey(self.id, stage, 0, submitted.session),
                tuple(self.edges[edge.id] for edge in plan.edges_in[stage]),
                tuple(self.edges[edge.id] for edge in plan.edges_out[stage]),
                tuple(self.outputs[name] for name in plan.outputs[stage]),
                recovery[stage],
            )
            for stage in plan.stages
        }

    def welcome(self, companion: Request) -> None:
        """Let another request go with this one."""
        self.party.append(companion)
        companion.party, companion.party_size = self.party, self.party_size

    @property
    def is_complete(self) -> bool:
        """Say whether all who go together are there."""
        return len(self.party) == self.party_size

    @property
    def is_leader(self) -> bool:
        """Say whether others go with this one, or would."""
        return self.party[0] is self

    @property
    def is_through(self) -> bool:
        """Say whether all its tasks have finished."""
        return all(task.state is TaskState.FINISHED for task in self.tasks.values())

    def edges_of(self, name: InputName) -> list[EdgeFlow]:
        """Return the edges that one of its inputs feeds."""
        return [self.edges[s.id] for s in self.plan.request_edges if s.request_input == name]

    def awaited_input(self) -> InputName | None:
        """Return an input that the client has not ended and that keeps a task waiting.

        A task waits for more when it has used all there is, and for the end when it wants a full input.
        """
        for spec in self.plan.request_edges:
            edge = self.edges[spec.id]
            is_used = edge.consumed == edge.produced or not _streams(edge)
            if is_used and not edge.has_ended and not edge.is_closed:
                return spec.request_input
        return None

    def timings(self, now: float) -> Timings:
        """Return where the request's time went until now."""
        started = now if self.started_at is None else self.started_at
        return Timings(
            queued_s=started - self.submitted_at,
            stages=tuple(task.timing(now) for task in self.tasks.values()),
        )
