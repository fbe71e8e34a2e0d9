"""What happened: the router's inputs. Past tense, immutable, with the time of their arrival.

Each class is one row family of the table in `router`. `now` is in monotonic seconds of the
orchestrator's clock. Events serialise to JSON lines (`stretto.core.eventlog`) and carry references,
never a user's text.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from stretto.errors import Failure
from stretto.types import (
    Boundary,
    CallClass,
    CallId,
    ChannelId,
    EdgeId,
    InputName,
    OutputName,
    PayloadRef,
    PipelineName,
    Recovery,
    ReplicaId,
    RequestId,
    SessionId,
    StageId,
    TaskKey,
)


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True, gc=False):
    """Base of all events; `now` is the monotonic time of arrival in seconds."""

    now: float


class EngineStarted(Event, frozen=True, kw_only=True):
    """The shell is ready to start processes; the first event of a life."""


class ChannelOpened(Event, frozen=True, kw_only=True):
    """An API process has connected."""

    channel: ChannelId


class ChannelClosed(Event, frozen=True, kw_only=True):
    """An API process is gone: its requests are aborted and its holds dropped."""

    channel: ChannelId


class Affinity(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a request's tasks should go: to the replicas that served this key last.

    Attributes:
        key: For example a session or a cached prefix.
        mode: `prefer` takes another replica if that one is gone or full; `require` waits for it, and
            fails if it is gone.
    """

    key: str
    mode: Literal["prefer", "require"] = "prefer"


class RequestSubmitted(Event, frozen=True, kw_only=True):
    """A client asks for something.

    Attributes:
        channel: Who asks, and where outputs go.
        request: Minted by the shell from the channel and its counter.
        pipeline: Which pipeline of the deployment.
        inputs: The supplied inputs; each is complete unless it is open.
        open_inputs: Inputs that go on: `InputAppended` brings more of each, `InputClosed` ends it.
        outputs: The wanted outputs; empty means all of the pipeline's.
        options: Named values for every stage (`seed`, `voice`, …).
        timeout_s: The client's own deadline, at most the configured one.
        priority: Smaller goes first.
        session: The session it belongs to, if any.
        label: The client's id, for people.
        affinity: Which replicas it should meet again, if any.
        companions: So many other requests go with this one: none starts before all are there, and this one
            finishes last.
        companion_of: The request that this one goes with; it was submitted before, on the same channel.
    """

    channel: ChannelId
    request: RequestId
    pipeline: PipelineName
    inputs: tuple[tuple[InputName, PayloadRef], ...]
    open_inputs: tuple[InputName, ...] = ()
    outputs: tuple[OutputName, ...] = ()
    options: PayloadRef | None = None
    timeout_s: float | None = None
    priority: int = 0
    session: SessionId | None = None
    label: str = ""
    affinity: Affinity | None = None
    companions: int = 0
    companion_of: RequestId | None = None


class InputAppended(Event, frozen=True, kw_only=True):
    """The client sends more of an open input; its values may differ from piece to piece."""

    request: RequestId
    input: InputName
    payload: PayloadRef


class InputClosed(Event, frozen=True, kw_only=True):
    """Nothing more comes on an input; a closed one may be closed again."""

    request: RequestId
    input: InputName


class RequestAborted(Event, frozen=True, kw_only=True):
    """The client does not want the rest.

    Attributes:
        request: Which one; unknown and ended ones are legal.
        channel: Who says so.
        acknowledge: Answer with `AcknowledgeAbort`.
    """

    request: RequestId
    channel: ChannelId
    acknowledge: bool = False


class RequestBroken(Event, frozen=True, kw_only=True):
    """The router refused an event of this request (`InvalidTransition`): a bug of ours ends it alone.

    Attributes:
        request: Which one; unknown and ended ones are legal.
        failure: The refusal.
        payloads: The refused event's payloads (`payloads_of`), which nobody holds.
    """

    request: RequestId
    failure: Failure
    payloads: tuple[PayloadRef, ...] = ()


class ConsumerDrained(Event, frozen=True, kw_only=True):
    """The client has taken its output up to, not including, chunk `up_to`: credit flows back."""

    request: RequestId
    output: OutputName
    up_to: int


class ReplicaJoined(Event, frozen=True, kw_only=True):
    """A process has said hello and is loading."""

    replica: ReplicaId


class ReplicaOffered(Event, frozen=True, kw_only=True):
    """A process from elsewhere, which has proved that it may, offers itself to a stage.

    Attributes:
        stage: Which stage; it may not exist.
        nonce: The process's own name; it comes again under it when its connection was lost.
        connection: Counts the connections on which processes have offered themselves.
    """

    stage: StageId
    nonce: str
    connection: int


class ReplicaProgressed(Event, frozen=True, kw_only=True):
    """A replica tells how far its loading is; `fraction` runs from 0.0 to 1.0."""

    replica: ReplicaId
    what: str
    fraction: float


class ReplicaReady(Event, frozen=True, kw_only=True):
    """A replica has loaded and warmed up.

    Attributes:
        replica: Which one.
        slots: How many tasks it holds at a time.
        recovery: The most that its backend allows to be done with its tasks after its death.
        max_step_s: How long one step of its backend may take.
        methods: What can be called there, each with its class.
    """

    replica: ReplicaId
    slots: int
    recovery: Recovery = "retry"
    max_step_s: float = 30.0
    methods: tuple[tuple[str, CallClass], ...] = ()


class StatsReported(Event, frozen=True, kw_only=True):
    """A backend has told numbers about its replica, with or without outputs.

    Attributes:
        replica: Which one.
        running: Tasks in the step that told them.
        waiting: Tasks that the replica holds besides.
        values: The backend's own numbers; the last of each name counts.
    """

    replica: ReplicaId
    running: int
    waiting: int
    values: dict[str, float]


class ReplicaAlive(Event, frozen=True, kw_only=True):
    """A replica that holds tasks reacts, and tells since when its present step has been running.

    Attributes:
        replica: Which one.
        step_age_s: Seconds since the step began; 0 between steps.
    """

    replica: ReplicaId
    step_age_s: float = 0.0


class ReplicaStartFailed(Event, frozen=True, kw_only=True):
    """A replica reports why it can't serve, for example a missing module. It exits by itself."""

    replica: ReplicaId
    reason: str


class ReplicaDied(Event, frozen=True, kw_only=True):
    """A replica's link has closed or its process has ended, whichever was noticed first."""

    replica: ReplicaId
    reason: str


class DrainRequested(Event, frozen=True, kw_only=True):
    """An operator wants a replica to take nothing new, finish what it has, and leave.

    Attributes:
        replica: Which one.
        replace: Another one starts at once, so that the stage keeps its number.
        channel: Who asks; `None` wants no answer.
        number: Under which number the answer is awaited.
    """

    replica: ReplicaId
    replace: bool = False
    channel: ChannelId | None = None
    number: int = 0


class ScaleRequested(Event, frozen=True, kw_only=True):
    """An operator wants a stage to have so many replicas.

    Attributes:
        stage: Which stage.
        replicas: How many; those too many are drained.
        channel: Who asks; `None` wants no answer.
        number: Under which number the answer is awaited.
    """

    stage: StageId
    replicas: int
    channel: ChannelId | None = None
    number: int = 0


class PollerFailed(Event, frozen=True, kw_only=True):
    """What looks after a stage's clients has failed, and starts again; it names no replica.

    Attributes:
        stage: Whose.
        reason: What went wrong.
    """

    stage: StageId
    reason: str


class ChunkProduced(Event, frozen=True, kw_only=True):
    """A task has made its next chunk.

    Attributes:
        task: Whose; a late attempt's chunk is dropped and its payload released.
        seq: Counts the task's data chunks from 0.
        payload: Where its values are.
        offset: Where it begins, in the stage's units.
        length: How many units it adds.
        kind: `data`, or `preview`: no credit, no sequence number, to outputs only.
        media_s: Its playback duration in seconds.
        boundary: If a later attempt can go on behind this chunk, how.
        transfer_s: How long its replica waited for the payloads that it was made of.
        finish_reason: Why the task's output ends with it, if its backend says so.
    """

    task: TaskKey
    seq: int
    payload: PayloadRef
    offset: int = 0
    length: int = 0
    kind: Literal["data", "preview"] = "data"
    media_s: float = 0.0
    boundary: Boundary | None = None
    transfer_s: float = 0.0
    finish_reason: str = ""


class InputConsumed(Event, frozen=True, kw_only=True):
    """The consumer's adapter has absorbed an edge's chunks up to, not including, `up_to`."""

    task: TaskKey
    edge: EdgeId
    up_to: int


class PayloadDone(Event, frozen=True, kw_only=True):
    """No view of the payload remains at this holder: a task's replica or an API process."""

    holder: TaskKey | ChannelId
    payload: PayloadRef


class TaskFinished(Event, frozen=True, kw_only=True):
    """A task has ended well, with or without output."""

    task: TaskKey


class TaskFailed(Event, frozen=True, kw_only=True):
    """A task has ended badly; its replica stays usable."""

    task: TaskKey
    failure: Failure


class TaskCancelled(Event, frozen=True, kw_only=True):
    """A task has ended because it was told to."""

    task: TaskKey


class RpcRequested(Event, frozen=True, kw_only=True):
    """Somebody wants a method called at replicas; the shell keeps the arguments.

    Attributes:
        call: Minted by the shell from the channel and its counter.
        channel: Who asks, and where the answer goes.
        method: Which method.
        timeout_s: How long the answers may take; positive.
        stages: At the replicas of these stages; empty means wherever there is such a method.
    """

    call: CallId
    channel: ChannelId
    method: str
    timeout_s: float
    stages: tuple[StageId, ...] = ()


class RpcAnswered(Event, frozen=True, kw_only=True):
    """A replica has run a method; the shell keeps the value.

    Attributes:
        call: Which call; one that has ended is legal.
        replica: Who answers.
        failure: Why there is no value.
        is_asleep: The replica can't take tasks until another call has woken it.
    """

    call: CallId
    replica: ReplicaId
    failure: Failure | None = None
    is_asleep: bool = False


class DeadlinePassed(Event, frozen=True, kw_only=True):
    """`next_deadline()` has come."""


class ShutdownRequested(Event, frozen=True, kw_only=True):
    """Take nothing new, finish what runs within `drain_s` seconds, then stop everything."""

    drain_s: float


ReplicaEvent: TypeAlias = (
    ReplicaOffered
    | ReplicaJoined
    | ReplicaProgressed
    | ReplicaReady
    | ReplicaAlive
    | StatsReported
    | ReplicaStartFailed
    | ReplicaDied
    | DrainRequested
)
RequestEvent: TypeAlias = (
    RequestAborted | RequestBroken | ConsumerDrained | InputAppended | InputClosed
)
EndEvent: TypeAlias = TaskFinished | TaskFailed | TaskCancelled
TaskEvent: TypeAlias = ChunkProduced | InputConsumed | EndEvent
AnyEvent: TypeAlias = (
    ChunkProduced
    | InputConsumed
    | ConsumerDrained
    | PayloadDone
    | TaskFinished
    | TaskFailed
    | TaskCancelled
    | RequestSubmitted
    | InputAppended
    | InputClosed
    | RequestAborted
    | RequestBroken
    | EngineStarted
    | ChannelOpened
    | ChannelClosed
    | ReplicaOffered
    | ReplicaJoined
    | ReplicaProgressed
    | ReplicaReady
    | ReplicaAlive
    | StatsReported
    | ReplicaStartFailed
    | ReplicaDied
    | DrainRequested
    | ScaleRequested
    | PollerFailed
    | RpcRequested
    | RpcAnswered
    | DeadlinePassed
    | ShutdownRequested
)


def payloads_of(event: AnyEvent) -> tuple[PayloadRef, ...]:
    """Return the payloads that an event hands over to the router."""
    match event:
        case ChunkProduced(payload=payload) | InputAppended(payload=payload):
            return (payload,)
        case RequestSubmitted(inputs=inputs, options=options):
            refs = tuple(payload for _, payload in inputs)
            return refs if options is None else (*refs, options)
        case RequestBroken(payloads=payloads):
            return payloads
        case _:
            return ()


def request_of(item: object) -> RequestId | None:
    """Return the request that an event or a command is about, `None` if it is about none."""
    task = getattr(item, "task", None)
    if isinstance(task, TaskKey):
        return task.request
    request = getattr(item, "request", None)
    return RequestId(request) if isinstance(request, str) else None
