"""Deployments and events of which a test names only what matters.

The builders of events take `now=0.0` and the first request, stage, attempt and replica unless told otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from stretto.core import commands as do
from stretto.core import events as on
from stretto.core.graph import (
    Deployment,
    EdgeMode,
    EdgeSpec,
    Limits,
    OutputSpec,
    PipelineSpec,
    StageSpec,
)
from stretto.core.router import Router
from stretto.errors import Failure, FailureKind
from stretto.types import (
    INLINE,
    SHARED_MEMORY,
    ChannelId,
    EdgeId,
    IncarnationNumber,
    InputName,
    OutputName,
    PayloadRef,
    PipelineName,
    ReplicaId,
    RequestId,
    StageId,
    TaskKey,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

A, B, C, D = StageId("a"), StageId("b"), StageId("c"), StageId("d")
TEXT, VOICE = InputName("text"), InputName("voice")
AUDIO, WORDS = OutputName("audio"), OutputName("words")
API = ChannelId("1.1")
R1, R2, R3, R4 = (RequestId(f"1.1-{number}") for number in range(1, 5))

STREAM, FULL = EdgeMode.STREAM, EdgeMode.FULL


def edge(
    source: StageId | InputName,
    target: StageId,
    *,
    mode: EdgeMode = STREAM,
    name: str = "in",
    chunks: int = 4,
    nbytes: int = 1000,
) -> EdgeSpec:
    """Return an edge; a source that is an input's name makes it a request edge."""
    from_request = source in (TEXT, VOICE)
    return EdgeSpec(
        target=target,
        name=name,
        source=None if from_request else StageId(source),
        request_input=InputName(source) if from_request else None,
        mode=mode,
        window_chunks=chunks,
        window_bytes=nbytes,
    )


def pipeline(
    *edges: EdgeSpec,
    outputs: Iterable[tuple[OutputName, StageId]],
    inputs: tuple[InputName, ...] = (TEXT,),
    name: str = "p",
) -> PipelineSpec:
    """Return a pipeline."""
    return PipelineSpec(
        name=PipelineName(name),
        inputs=inputs,
        edges=edges,
        outputs=tuple(OutputSpec(name=output, stage=stage) for output, stage in outputs),
    )


def deployment(
    *pipelines: PipelineSpec, limits: Limits | None = None, stages: Iterable[StageSpec] = ()
) -> Deployment:
    """Return a deployment of the pipelines' stages, those that are named as named."""
    named = {stage.id: stage for stage in stages}
    used: dict[StageId, None] = {}
    for each in pipelines:
        for link in each.edges:
            for stage in (link.source, link.target):
                if stage is not None:
                    used[stage] = None
    return Deployment(
        stages=tuple(named.get(stage, StageSpec(id=stage, slots=2)) for stage in used),
        pipelines=pipelines,
        limits=limits or Limits(),
    )


def line_of_2(
    *,
    limits: Limits | None = None,
    chunks: int = 4,
    nbytes: int = 1000,
    stages: Iterable[StageSpec] = (),
) -> Deployment:
    """Return `text → a ⇒ b → audio`."""
    return deployment(
        pipeline(edge(TEXT, A), edge(A, B, chunks=chunks, nbytes=nbytes), outputs=[(AUDIO, B)]),
        limits=limits,
        stages=stages,
    )


def line_of_3(*, limits: Limits | None = None, stages: Iterable[StageSpec] = ()) -> Deployment:
    """Return `text → a ⇒ b ⇒ c → audio`."""
    return deployment(
        pipeline(edge(TEXT, A), edge(A, B), edge(B, C), outputs=[(AUDIO, C)]),
        limits=limits,
        stages=stages,
    )


def diamond(*, limits: Limits | None = None, stages: Iterable[StageSpec] = ()) -> Deployment:
    """Return `text → a`, `a → b` in full, `a ⇒ c`, and `b ⇒ d`, `c ⇒ d → audio`."""
    return deployment(
        pipeline(
            edge(TEXT, A),
            edge(A, B, mode=FULL),
            edge(A, C),
            edge(B, D, name="left"),
            edge(C, D, name="right"),
            outputs=[(AUDIO, D)],
        ),
        limits=limits,
        stages=stages,
    )


def shared(*, limits: Limits | None = None, stages: Iterable[StageSpec] = ()) -> Deployment:
    """Return `chat` (`text → a → words`, `a ⇒ b → audio`) and `speech` (`text → b → audio`)."""
    return deployment(
        pipeline(edge(TEXT, A), edge(A, B), outputs=[(WORDS, A), (AUDIO, B)], name="chat"),
        pipeline(edge(TEXT, B), outputs=[(AUDIO, B)], name="speech"),
        limits=limits,
        stages=stages,
    )


def replica(stage: StageId = A, slot: int = 0, incarnation: int = 1) -> ReplicaId:
    """Return a replica's identity."""
    return ReplicaId(stage, slot, IncarnationNumber(incarnation))


def task(stage: StageId = A, request: RequestId = R1, attempt: int = 0) -> TaskKey:
    """Return a task's key."""
    return TaskKey(request, stage, attempt)


def inline(key: object, size_bytes: int = 10) -> PayloadRef:
    """Return an inline payload."""
    return PayloadRef(INLINE, str(key), size_bytes)


def shm(key: object, size_bytes: int = 100) -> PayloadRef:
    """Return a payload in shared memory."""
    return PayloadRef(SHARED_MEMORY, str(key), size_bytes)


def submitted(
    request: RequestId = R1,
    *,
    now: float = 0.0,
    to: str = "p",
    inputs: tuple[InputName, ...] = (TEXT,),
    outputs: tuple[OutputName, ...] = (),
    options: PayloadRef | None = None,
    timeout_s: float | None = None,
    priority: int = 0,
    channel: ChannelId = API,
    label: str = "",
    affinity: on.Affinity | None = None,
) -> on.RequestSubmitted:
    """Return a submission; each input's payload is named `<request>.<input>`."""
    return on.RequestSubmitted(
        now=now,
        channel=channel,
        request=request,
        pipeline=PipelineName(to),
        inputs=tuple((name, inline(f"{request}.{name}")) for name in inputs),
        outputs=outputs,
        options=options,
        timeout_s=timeout_s,
        priority=priority,
        label=label,
        affinity=affinity,
    )


def produced(
    stage: StageId = A,
    seq: int = 0,
    *,
    request: RequestId = R1,
    attempt: int = 0,
    payload: PayloadRef | None = None,
    now: float = 0.0,
    kind: Literal["data", "preview"] = "data",
) -> on.ChunkProduced:
    """Return a chunk of 10 units, whose payload is inline and named `<request>.<stage>.<seq>`."""
    return on.ChunkProduced(
        now=now,
        task=task(stage, request, attempt),
        seq=seq,
        payload=payload or inline(f"{request}.{stage}.{seq}"),
        offset=10 * seq,
        length=10,
        kind=kind,
        media_s=0.1,
    )


def consumed(
    up_to: int,
    *,
    edge_id: str = "a->b.in",
    stage: StageId = B,
    request: RequestId = R1,
    attempt: int = 0,
    now: float = 0.0,
) -> on.InputConsumed:
    """Return the news that a consumer has absorbed chunks."""
    return on.InputConsumed(
        now=now, task=task(stage, request, attempt), edge=EdgeId(edge_id), up_to=up_to
    )


def drained(
    up_to: int, *, request: RequestId = R1, output: OutputName = AUDIO, now: float = 0.0
) -> on.ConsumerDrained:
    """Return the news that the client has taken chunks."""
    return on.ConsumerDrained(now=now, request=request, output=output, up_to=up_to)


def finished(
    stage: StageId = A, *, request: RequestId = R1, attempt: int = 0, now: float = 0.0
) -> on.TaskFinished:
    """Return a task's good end."""
    return on.TaskFinished(now=now, task=task(stage, request, attempt))


def cancelled(
    stage: StageId = A, *, request: RequestId = R1, attempt: int = 0, now: float = 0.0
) -> on.TaskCancelled:
    """Return a task's commanded end."""
    return on.TaskCancelled(now=now, task=task(stage, request, attempt))


def failed(
    stage: StageId = A,
    *,
    request: RequestId = R1,
    attempt: int = 0,
    now: float = 0.0,
    detail: str = "no",
) -> on.TaskFailed:
    """Return a task's bad end."""
    failure = Failure(kind=FailureKind.STAGE_ERROR, detail=detail, where=stage)
    return on.TaskFailed(now=now, task=task(stage, request, attempt), failure=failure)


def aborted(
    request: RequestId = R1, *, now: float = 0.0, acknowledge: bool = False
) -> on.RequestAborted:
    """Return a client's abort."""
    return on.RequestAborted(now=now, request=request, channel=API, acknowledge=acknowledge)


def died(which: ReplicaId, *, now: float = 0.0, reason: str = "exit 9") -> on.ReplicaDied:
    """Return a death."""
    return on.ReplicaDied(now=now, replica=which, reason=reason)


def passed(now: float) -> on.DeadlinePassed:
    """Return the news that time has passed."""
    return on.DeadlinePassed(now=now)


class Checked(Router):
    """A router that checks its invariants after every event, unless told that it is too slow."""

    is_checking = True

    def handle(self, event: on.AnyEvent) -> tuple[do.AnyCommand, ...]:
        """Handle one event, then check."""
        try:
            return super().handle(event)
        finally:
            if self.is_checking:
                self.check_invariants()

    def feed(self, *events: on.AnyEvent) -> tuple[do.AnyCommand, ...]:
        """Handle several events and return the last one's commands."""
        commands: tuple[do.AnyCommand, ...] = ()
        for event in events:
            commands = self.handle(event)
        return commands


def ready(
    router: Checked, which: ReplicaId, *, now: float = 0.0, slots: int | None = None
) -> tuple[do.AnyCommand, ...]:
    """Let a replica that was started join and become ready; return what comes of it."""
    specs = {stage.id: stage for stage in router.deployment.stages}
    return router.feed(
        on.ReplicaJoined(now=now, replica=which),
        on.ReplicaReady(now=now, replica=which, slots=slots or specs[which.stage].slots),
    )


def started(deployed: Deployment, *, loaded: bool = True) -> Checked:
    """Return a router with one open channel, all its replicas ready unless told otherwise."""
    router = Checked(deployed)
    router.feed(on.EngineStarted(now=0.0), on.ChannelOpened(now=0.0, channel=API))
    if loaded:
        for stage in deployed.stages:
            for slot in range(stage.replicas):
                ready(router, replica(stage.id, slot))
    return router


def terminals(commands: Iterable[do.AnyCommand]) -> list[do.Finish | do.Fail | do.Cancelled]:
    """Return the terminals among commands."""
    return [c for c in commands if isinstance(c, (do.Finish, do.Fail, do.Cancelled))]


def of(kind: type[do.Command], commands: Iterable[do.AnyCommand]) -> list[do.AnyCommand]:
    """Return the commands of one kind."""
    return [command for command in commands if isinstance(command, kind)]


def is_empty(router: Router) -> bool:
    """Say whether nothing of any request is left."""
    now = router.statistics()
    slots = sum(stage.bound + stage.reserved for stage in now.stages)
    return not (now.queued or now.running or now.draining or now.held_payloads or slots)
