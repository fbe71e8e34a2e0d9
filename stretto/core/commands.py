"""What must be done: the router's outputs. Imperative, immutable, executed in order by the shell.

A command that can fail answers with an event: a replica that can't be reached is `ReplicaDied`, a
process that can't be started too, a client that is gone is `ChannelClosed`.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from stretto.core.graph import EdgeSpec
from stretto.errors import Failure
from stretto.types import (
    Boundary,
    CallClass,
    CallId,
    ChannelId,
    EdgeId,
    OutputName,
    PayloadRef,
    PipelineName,
    ReplicaId,
    RequestId,
    StageId,
    TaskKey,
)

UNLIMITED = 2**53
"""A grant without bound; exact in JSON too."""


class Command(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True, gc=False):
    """Base of all commands."""


class Dispatch(Command, frozen=True, kw_only=True):
    """Open a task at a replica. Its inputs follow as `Feed`.

    Attributes:
        replica: Where; chosen now, sticky from here on.
        task: Which.
        pipeline: The pipeline, by which the replica finds the edges' adapters.
        edges: The task's input edges in this request's plan.
        options: The request's options.
        skip_units: Units that earlier attempts have already forwarded.
        resume: Where this attempt goes on; its inputs begin behind it. `None` is the beginning.
        resume_units: The units before `resume`.
        chunks: Send right: chunk numbers below this may be sent.
        bytes: Send right: the next chunk may be sent while fewer bytes than this were.
    """

    replica: ReplicaId
    task: TaskKey
    pipeline: PipelineName
    edges: tuple[EdgeSpec, ...]
    options: PayloadRef | None = None
    skip_units: int = 0
    resume: Boundary | None = None
    resume_units: int = 0
    chunks: int = UNLIMITED
    bytes: int = UNLIMITED


class Feed(Command, frozen=True, kw_only=True):
    """Give a task an edge's next chunk."""

    replica: ReplicaId
    task: TaskKey
    edge: EdgeId
    seq: int
    payload: PayloadRef


class CloseInput(Command, frozen=True, kw_only=True):
    """Tell a task that an edge has ended: nothing follows on it."""

    replica: ReplicaId
    task: TaskKey
    edge: EdgeId


class CancelTask(Command, frozen=True, kw_only=True):
    """Tell a replica to end a task; it answers with the task's end."""

    replica: ReplicaId
    task: TaskKey


class Grant(Command, frozen=True, kw_only=True):
    """Raise a task's send right; see `Dispatch.chunks` and `Dispatch.bytes`."""

    replica: ReplicaId
    task: TaskKey
    chunks: int
    bytes: int


class StageTiming(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One stage's part in a request.

    Attributes:
        stage: Which stage.
        replica: The replica that did the last attempt.
        waited_s: From having input to being dispatched.
        first_chunk_s: From dispatch to the first chunk; `None` if there was none.
        ran_s: From dispatch to the end, or to now.
        chunks: Data chunks made.
        units: Units made, in the stage's unit.
        media_s: Playback seconds made.
        attempts: 1 unless a replica died.
        finish_reason: Why its output ended, if its backend said so: for example `length`.
    """

    stage: StageId
    replica: ReplicaId | None = None
    waited_s: float = 0.0
    first_chunk_s: float | None = None
    ran_s: float = 0.0
    chunks: int = 0
    units: int = 0
    media_s: float = 0.0
    attempts: int = 1
    finish_reason: str = ""


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request's time went: seconds in the queue, then stage by stage."""

    queued_s: float
    stages: tuple[StageTiming, ...]


class Emit(Command, frozen=True, kw_only=True):
    """Send the client a chunk of an output.

    Attributes:
        channel: The API process that owns the request.
        request: Which request.
        output: Which of its outputs.
        seq: Counts the output's data chunks from 0.
        payload: The values; `None` on an empty terminal.
        offset: Where it begins, in the stage's units.
        length: How many units it adds.
        kind: `data` or `preview`.
        media_s: Its playback duration in seconds.
        final: The output ends with this one, exactly once per output of a finished request.
        timings: With an output's first chunk: where the time went until now.
    """

    channel: ChannelId
    request: RequestId
    output: OutputName
    seq: int
    payload: PayloadRef | None
    offset: int = 0
    length: int = 0
    kind: Literal["data", "preview"] = "data"
    media_s: float = 0.0
    final: bool = False
    timings: Timings | None = None


class Finish(Command, frozen=True, kw_only=True):
    """Terminal: the request has ended well; all its outputs were emitted."""

    channel: ChannelId
    request: RequestId
    timings: Timings


class Fail(Command, frozen=True, kw_only=True):
    """Terminal: the request has failed."""

    channel: ChannelId
    request: RequestId
    failure: Failure


class Cancelled(Command, frozen=True, kw_only=True):
    """Terminal: the request was aborted."""

    channel: ChannelId
    request: RequestId


class Reject(Command, frozen=True, kw_only=True):
    """The request was not accepted; nothing was started."""

    channel: ChannelId
    request: RequestId
    failure: Failure


class AcknowledgeAbort(Command, frozen=True, kw_only=True):
    """Answer an abort that asked for it; `stopped` says whether there was anything to stop."""

    channel: ChannelId
    request: RequestId
    stopped: bool


class Release(Command, frozen=True, kw_only=True):
    """Nobody holds the payload any more: its owner frees it."""

    payload: PayloadRef


class StartReplica(Command, frozen=True, kw_only=True):
    """Start a process for this identity."""

    replica: ReplicaId


class AdmitReplica(Command, frozen=True, kw_only=True):
    """Give the process that has offered itself on this connection its identity, and have it load."""

    replica: ReplicaId
    nonce: str
    connection: int


class RefuseReplica(Command, frozen=True, kw_only=True):
    """Tell the process that has offered itself on this connection that it is not wanted."""

    connection: int
    failure: Failure


class DrainReplica(Command, frozen=True, kw_only=True):
    """Tell a replica that it gets nothing new and may leave when it has finished."""

    replica: ReplicaId


class StopReplica(Command, frozen=True, kw_only=True):
    """Kill the replica's process group and close its link."""

    replica: ReplicaId


class ReplicaState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What people and health checks may know about a replica.

    Attributes:
        replica: Which one.
        state: `starting`, `loading`, `ready`, `suspect` (it does not go on; no new work), `calling`
            (an exclusive call waits for its tasks, or runs), `asleep` (until it is woken), `draining`,
            `dead` (a restart is due) or `parked` (it failed too often; tried again later).
        detail: What is being loaded, or why it died.
        fraction: How far loading is, 0.0 to 1.0.
    """

    replica: ReplicaId
    state: Literal[
        "starting",
        "loading",
        "ready",
        "suspect",
        "calling",
        "asleep",
        "draining",
        "dead",
        "parked",
        "stopped",
    ]
    detail: str = ""
    fraction: float = 0.0


class Announce(Command, frozen=True, kw_only=True):
    """Tell every API process about a replica, in order with the outputs."""

    state: ReplicaState


class AnnounceTarget(Command, frozen=True, kw_only=True):
    """Tell every API process how many replicas a stage is meant to have now."""

    stage: StageId
    replicas: int


class AnswerOrder(Command, frozen=True, kw_only=True):
    """Answer an operator's order; without a failure it is being carried out."""

    channel: ChannelId
    number: int
    failure: Failure | None = None


class CallReplica(Command, frozen=True, kw_only=True):
    """Have a replica run a method; it answers with `RpcAnswered`, or dies.

    Attributes:
        replica: Where.
        call: Whose arguments it gets.
        method: Which method.
        call_class: `control`: at once. `exclusive`: the replica holds no task, and gets none meanwhile.
    """

    replica: ReplicaId
    call: CallId
    method: str
    call_class: CallClass


class CallOutcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What came of a call at one replica; `failure` goes with `error` and `died`."""

    replica: ReplicaId
    status: Literal["ok", "error", "died"]
    failure: Failure | None = None


class AnswerRpc(Command, frozen=True, kw_only=True):
    """Answer a call, exactly once.

    Attributes:
        channel: Who asked; it may be gone.
        call: Which call; what is kept for it is not needed any more.
        outcomes: By replica, in the order of their places.
        failure: Why the call as a whole has failed, if it has.
    """

    channel: ChannelId
    call: CallId
    outcomes: tuple[CallOutcome, ...] = ()
    failure: Failure | None = None


class Exit(Command, frozen=True, kw_only=True):
    """Everything has been stopped; the shell may close its sockets and end."""


AnyCommand: TypeAlias = (
    Emit
    | Feed
    | Grant
    | Release
    | Dispatch
    | CloseInput
    | CancelTask
    | Finish
    | Fail
    | Cancelled
    | Reject
    | AcknowledgeAbort
    | Announce
    | AnnounceTarget
    | AnswerOrder
    | StartReplica
    | AdmitReplica
    | RefuseReplica
    | DrainReplica
    | StopReplica
    | CallReplica
    | AnswerRpc
    | Exit
)
