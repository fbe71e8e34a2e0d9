"""API process ↔ orchestrator. `Up` travels to the orchestrator, `Down` from it.

Requests are known by `number`, counted by the API process; the orchestrator makes a `RequestId` of it
with the channel's own id, so no process can name another's request.
The last messages of a channel are `Fatal` (only after a crash) and `Closing`, always in this order.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from stretto.core.commands import ReplicaState, Timings
from stretto.core.events import Affinity
from stretto.errors import Failure
from stretto.messages.link import StageFacts
from stretto.types import (
    INLINE,
    ChannelId,
    InputName,
    OutputName,
    PayloadRef,
    PipelineName,
    ReplicaId,
    RunId,
    SessionId,
    StageId,
)


class _Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base: a positional, immutable record."""


class Hello(_Message, frozen=True, tag=1):
    """First message of an API process; `name` is for people (`api`, `supervisor`, `engine`)."""

    protocol: int
    run: RunId
    pid: int
    name: str


class Submit(_Message, frozen=True, tag=2):
    """A new request; see `stretto.core.events.RequestSubmitted`.

    Inline bytes in the body: the inputs in order, then the options.
    """

    number: int
    pipeline: PipelineName
    inputs: tuple[tuple[InputName, PayloadRef], ...]
    outputs: tuple[OutputName, ...]
    options: PayloadRef | None
    timeout_s: float | None
    priority: int
    session: SessionId | None
    label: str
    affinity: Affinity | None = None
    open_inputs: tuple[InputName, ...] = ()
    companions: int = 0
    companion_of: int | None = None


class Append(_Message, frozen=True, tag=11):
    """More of an open input; its bytes are in the body."""

    number: int
    input: InputName
    payload: PayloadRef


class CloseInput(_Message, frozen=True, tag=12):
    """Nothing more comes on an open input."""

    number: int
    input: InputName


class Abort(_Message, frozen=True, tag=3):
    """The client does not want the rest of a request."""

    number: int
    acknowledge: bool


class Drained(_Message, frozen=True, tag=4):
    """The client has taken an output's chunks below `up_to`."""

    number: int
    output: OutputName
    up_to: int


class Viewed(_Message, frozen=True, tag=5):
    """No view of a shared-memory payload remains in this process."""

    payload: PayloadRef


class Ask(_Message, frozen=True, tag=6):
    """A question about the engine that changes nothing; answered by `Answer` of the same number.

    Attributes:
        number: Counted by the asking process; not to be confused with a request's number.
        topic: `status`, `story` or `metrics`.
        argument: What about; for `story` a request's name or label.
    """

    number: int
    topic: Literal["status", "story", "metrics"]
    argument: str = ""


class HttpDone(_Message, frozen=True, tag=7):
    """An HTTP exchange has ended; for the metrics, whose one owner is the orchestrator.

    Attributes:
        endpoint: The route's template, or `other`; a bounded set.
        code: Status; 499 if the client left before there was one.
        duration_s: From the request's head to the end of the response.
        first_audio_s: From the request's head to the first audio, if there was any.
    """

    endpoint: str
    code: int
    duration_s: float
    first_audio_s: float | None = None


class Scale(_Message, frozen=True, tag=8):
    """An operator's order; answered by `Answer` of the same number, counted with those of `Ask`."""

    number: int
    stage: StageId
    replicas: int


class Drain(_Message, frozen=True, tag=9):
    """An operator's order; see `stretto.core.events.DrainRequested`. Answered like `Scale`."""

    number: int
    replica: ReplicaId
    replace: bool


class Call(_Message, frozen=True, tag=10):
    """Have a method called at replicas; answered by `CallAnswered` of the same number.

    Attributes:
        number: Counted by the asking process, from 1; each kind of number for itself.
        method: Which method.
        stages: At the replicas of these stages; empty means wherever there is such a method.
        arguments: By name, as msgpack, `MAX_CALL_BYTES` at most.
        timeout_s: How long the answers may take; above 0, `MAX_CALL_TIMEOUT_S` at most.
    """

    number: int
    method: str
    stages: tuple[StageId, ...]
    arguments: bytes
    timeout_s: float


class CallResult(_Message, frozen=True):
    """What came of a call at one replica: a value as msgpack if it is `ok`, else a failure."""

    replica: ReplicaId
    status: Literal["ok", "error", "died"]
    value: bytes = b""
    failure: Failure | None = None


class PipelineInfo(_Message, frozen=True):
    """A pipeline's face: its inputs, and its outputs with the stage that makes each."""

    name: PipelineName
    inputs: tuple[InputName, ...]
    outputs: tuple[tuple[OutputName, StageId], ...]


class Welcome(_Message, frozen=True, tag=32):
    """The hello was accepted.

    Attributes:
        protocol: `PROTOCOL_VERSION` of the orchestrator.
        epoch: Which life of the orchestrator this is, from 1.
        channel: This connection's identity.
        shared_memory_dir: Where large payloads lie, or `None`.
        pipelines: What can be asked for.
        replicas: Where every replica stands now; changes follow as `ReplicaNotice`.
        targets: How many replicas each stage is meant to have.
        payload_token: With which payloads of other hosts are pulled; empty if there are none.
    """

    protocol: int
    epoch: int
    channel: ChannelId
    shared_memory_dir: str | None
    pipelines: tuple[PipelineInfo, ...]
    replicas: tuple[ReplicaState, ...]
    targets: dict[StageId, int]
    payload_token: str = ""


class Output(_Message, frozen=True, tag=33):
    """A chunk of a request's output; see `stretto.core.commands.Emit`."""

    number: int
    output: OutputName
    seq: int
    payload: PayloadRef | None
    offset: int
    length: int
    kind: Literal["data", "preview"]
    media_s: float
    final: bool
    timings: Timings | None = None


class Finished(_Message, frozen=True, tag=34):
    """Terminal: all is done."""

    number: int
    timings: Timings


class Failed(_Message, frozen=True, tag=35):
    """Terminal: the request failed."""

    number: int
    failure: Failure


class Cancelled(_Message, frozen=True, tag=36):
    """Terminal: the request was aborted."""

    number: int


class Rejected(_Message, frozen=True, tag=37):
    """Terminal: the request was not accepted."""

    number: int
    failure: Failure


class AbortAcknowledged(_Message, frozen=True, tag=38):
    """An abort was taken; `stopped` says whether there was anything to stop."""

    number: int
    stopped: bool


class ReplicaNotice(_Message, frozen=True, tag=39):
    """A replica's state has changed."""

    state: ReplicaState


class StageNotice(_Message, frozen=True, tag=40):
    """What a stage's backend declares; sent when its first replica is ready."""

    stage: StageId
    facts: StageFacts


class TargetNotice(_Message, frozen=True, tag=44):
    """A stage is meant to have another number of replicas now."""

    stage: StageId
    replicas: int


class Fatal(_Message, frozen=True, tag=41):
    """The orchestrator has crashed; every open request ends with this."""

    failure: Failure


class Closing(_Message, frozen=True, tag=42):
    """Nothing follows: the orchestrator closes this channel on purpose."""


class Answer(_Message, frozen=True, tag=43):
    """The answer to an `Ask`: a text (JSON, or the metrics' own format), or why there is none."""

    number: int
    text: str
    failure: Failure | None = None


class CallAnswered(_Message, frozen=True, tag=45):
    """The answer to a `Call`: what came of it at each replica, or why it failed as a whole."""

    number: int
    results: tuple[CallResult, ...]
    failure: Failure | None = None


Up: TypeAlias = (
    Hello
    | Submit
    | Append
    | CloseInput
    | Abort
    | Drained
    | Viewed
    | Ask
    | HttpDone
    | Scale
    | Drain
    | Call
)
Down: TypeAlias = (
    Welcome
    | Output
    | Finished
    | Failed
    | Cancelled
    | Rejected
    | AbortAcknowledged
    | ReplicaNotice
    | StageNotice
    | TargetNotice
    | Fatal
    | Closing
    | Answer
    | CallAnswered
)


def inline_payloads(message: object) -> tuple[PayloadRef, ...]:
    """Return the message's payloads whose bytes lie in the frame's body, in their order there."""
    match message:
        case Output(payload=PayloadRef() as payload) | Append(payload=payload):
            return (payload,) if payload.place == INLINE else ()
        case Submit(inputs=inputs, options=options):
            refs = [ref for _, ref in inputs]
            if options is not None:
                refs.append(options)
            return tuple(ref for ref in refs if ref.place == INLINE)
        case _:
            return ()
