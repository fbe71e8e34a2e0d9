"""Orchestrator ↔ replica. `Up` travels from the replica, `Down` to it.

A message with a payload whose place is inline owns the next `size_bytes` bytes of the frame's body
(`inline_payload`). Keys of inline payloads are empty on the wire; each side names its own.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from stretto.core.graph import EdgeSpec
from stretto.errors import Failure
from stretto.types import (
    INLINE,
    Boundary,
    CallClass,
    CallId,
    EdgeId,
    PayloadRef,
    PipelineName,
    Recovery,
    ReplicaId,
    RunId,
    StageId,
    TaskKey,
)


class _Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base: a positional, immutable record."""


class Hello(_Message, frozen=True, tag=1):
    """First message of a replica.

    Attributes:
        protocol: `PROTOCOL_VERSION` of the sender.
        run: The run it was started for.
        replica: The identity it was started with.
        nonce: The launcher's nonce, so that a repeated or foreign join is recognised.
        pid: Process id.
        host: Host name.
    """

    protocol: int
    run: RunId
    replica: ReplicaId
    nonce: str
    pid: int
    host: str


class LoadProgress(_Message, frozen=True, tag=2):
    """Loading goes on: what, and how far (0.0 to 1.0)."""

    what: str
    fraction: float


class StageFacts(_Message, frozen=True, tag=3):
    """What a stage's backend declares, for people and for the HTTP edge.

    Attributes:
        kind: `autoregressive`, `generation`, `diffusion` or `function`.
        unit: What chunk lengths count.
        media: For example `{"rate_hz": 24000, "channels": 1, "format": "s16le"}`.
        voices: Names that requests may ask for; empty if the stage has none.
        recovery: The most that may be done with its tasks after a death.
        max_step_s: How long one step may take; a longer one has hung.
    """

    kind: str
    unit: str
    media: dict[str, int | float | str]
    voices: tuple[str, ...]
    recovery: Recovery
    max_step_s: float


class Ready(_Message, frozen=True, tag=4):
    """Loaded and warmed up.

    Attributes:
        slots: How many tasks this replica holds at a time.
        facts: What its backend declares.
        methods: What can be called here.
    """

    slots: int
    facts: StageFacts
    methods: dict[str, CallClass] = {}


class StartFailed(_Message, frozen=True, tag=5):
    """Loading failed; the process exits after this."""

    reason: str


class Produced(_Message, frozen=True, tag=6):
    """A task's next chunk; see `stretto.core.events.ChunkProduced`."""

    task: TaskKey
    seq: int
    payload: PayloadRef
    offset: int
    length: int
    kind: Literal["data", "preview"]
    media_s: float
    boundary: Boundary | None = None
    transfer_s: float = 0.0
    finish_reason: str = ""


class Consumed(_Message, frozen=True, tag=7):
    """The adapter has absorbed the edge's chunks below `up_to`."""

    task: TaskKey
    edge: EdgeId
    up_to: int


class Viewed(_Message, frozen=True, tag=8):
    """No view of the payload remains in this process for this task."""

    task: TaskKey
    payload: PayloadRef


class Ended(_Message, frozen=True, tag=9):
    """A task has ended and its slot is free; `failure` goes with `failed` only."""

    task: TaskKey
    outcome: Literal["finished", "failed", "cancelled"]
    failure: Failure | None = None


class Reported(_Message, frozen=True, tag=12):
    """A backend tells numbers about its replica; see `stretto.core.events.StatsReported`."""

    running: int
    waiting: int
    values: dict[str, float]


class Alive(_Message, frozen=True, tag=10):
    """This process reacts and holds tasks; its present step has run for `step_age_s` seconds."""

    step_age_s: float


class CallAnswered(_Message, frozen=True, tag=11):
    """A method has run.

    Attributes:
        call: Which call.
        value: What it returned, as msgpack; empty if it failed.
        failure: Why it failed.
        is_asleep: This replica takes no task until another call has woken it.
    """

    call: CallId
    value: bytes
    failure: Failure | None = None
    is_asleep: bool = False


class Offer(_Message, frozen=True, tag=28):
    """First message of a process from elsewhere: it wants to serve a stage.

    Attributes:
        protocol: `PROTOCOL_VERSION` of the sender.
        stage: Which stage.
        nonce: The process's own name, the same for as long as it lives.
        challenge: Random bytes, for the answer's proof.
        pid: Process id.
        host: Host name.
        payload_port: Where, on the host that this comes from, its payload files can be pulled.
        proof: See `messages.proofs`.
    """

    protocol: int
    stage: StageId
    nonce: str
    challenge: bytes
    pid: int
    host: str
    payload_port: int
    proof: bytes


class Leaving(_Message, frozen=True, tag=29):
    """Whoever runs this process wants it to finish what it has and to leave; answered by `Drain`."""


class Welcome(_Message, frozen=True, tag=32):
    """The hello was accepted."""

    protocol: int
    run: RunId


class Open(_Message, frozen=True, tag=33):
    """Open a task; see `stretto.core.commands.Dispatch`."""

    task: TaskKey
    pipeline: PipelineName
    edges: tuple[EdgeSpec, ...]
    options: PayloadRef | None
    skip_units: int
    chunks: int
    bytes: int
    resume: Boundary | None = None
    resume_units: int = 0

    @property
    def left_out_units(self) -> int:
        """Return how many of the first units that this attempt makes are not to be sent."""
        return self.skip_units - self.resume_units


class Feed(_Message, frozen=True, tag=34):
    """An edge's next chunk for a task."""

    task: TaskKey
    edge: EdgeId
    seq: int
    payload: PayloadRef


class CloseInput(_Message, frozen=True, tag=35):
    """Nothing follows on this edge of a task."""

    task: TaskKey
    edge: EdgeId


class Cancel(_Message, frozen=True, tag=36):
    """End a task; answered by `Ended`, also when it had already ended by itself."""

    task: TaskKey


class Grant(_Message, frozen=True, tag=37):
    """A task's send right; see `stretto.core.commands.Dispatch`."""

    task: TaskKey
    chunks: int
    bytes: int


class Release(_Message, frozen=True, tag=38):
    """Nobody holds these payload files of yours any more."""

    keys: tuple[str, ...]


class Drain(_Message, frozen=True, tag=39):
    """Nothing new comes; exit when the last task has ended."""


class Call(_Message, frozen=True, tag=40):
    """Run a method; answered by `CallAnswered`. See `stretto.core.commands.CallReplica`.

    Attributes:
        call: Which call.
        method: One that `Ready` has named.
        call_class: With an exclusive one no task is open, and none is opened before its answer.
        arguments: By name, as msgpack.
    """

    call: CallId
    method: str
    call_class: CallClass
    arguments: bytes


class Challenge(_Message, frozen=True, tag=60):
    """First message to a process from elsewhere; its offer proves that it knows the token."""

    protocol: int
    challenge: bytes


class Accepted(_Message, frozen=True, tag=61):
    """The offer is taken: `launch` is a `LaunchSpec` as msgpack, so that the other host needs no file."""

    launch: bytes
    proof: bytes


class Refused(_Message, frozen=True, tag=62):
    """The offer is not taken; with a `retry_after_s` it may be made again."""

    failure: Failure


Up: TypeAlias = (
    Hello
    | LoadProgress
    | Ready
    | StartFailed
    | Produced
    | Consumed
    | Viewed
    | Ended
    | Alive
    | Reported
    | CallAnswered
    | Offer
    | Leaving
)
Down: TypeAlias = (
    Welcome
    | Open
    | Feed
    | CloseInput
    | Cancel
    | Grant
    | Release
    | Drain
    | Call
    | Challenge
    | Accepted
    | Refused
)


def inline_payload(message: object) -> PayloadRef | None:
    """Return the message's payload if its bytes lie in the frame's body."""
    match message:
        case Produced(payload=payload) | Feed(payload=payload):
            return payload if payload.place == INLINE else None
        case Open(options=PayloadRef() as options):
            return options if options.place == INLINE else None
        case _:
            return None
