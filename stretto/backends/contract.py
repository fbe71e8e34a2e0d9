"""The contract between a backend and the replica runtime, in the two forms that exist today.

A backend is an ordinary class. The runtime constructs it with the stage's `options` as keyword
arguments, calls `load` once in the compute thread, and then uses one of two forms:

* **Per request**: `run(task)` is an async generator; the runtime drives one per task on its event
  loop. For functions that await (remote calls, light text work). It must not block the loop.
* **Per step**: `open`, `step` and `close` run in the compute thread; the runtime batches inputs of
  different tasks into one `step`. For anything that computes.

A backend may offer methods that can be called from outside (`Engine.collective_rpc`) in a class attribute

    rpc_methods: ClassVar[Mapping[str, CallClass]] = {"temperature": "control", "reload": "exclusive"}

A `control` method runs on the replica's loop at once, beside the tasks; it may be `async`, and must not
block. An `exclusive` one runs in the compute thread while the replica has no task. Arguments come by
name; they and the result are what msgpack can carry. A backend that can give its memory back has `sleep()`
and `wake()`, which every replica offers as exclusive methods and which need not be named.

What a backend may keep: values of an input's payload are views that are valid until `step` returns
and the chunks it returned are encoded (form 1: until the next input is taken); copy what must live
longer.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, TypeAlias, TypeVar

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from stretto.types import Payload, Recovery, StageId, TaskKey

    OutputValue: TypeAlias = str | int | float | bool | bytes | Buffer | None

Kind: TypeAlias = Literal["autoregressive", "generation", "diffusion", "function"]
ChunkKind: TypeAlias = Literal["data", "preview", "metrics"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a backend declares about itself; read by the runtime, sent to the orchestrator.

    Attributes:
        kind: The kind of stage.
        unit: What `Chunk.length` counts: `samples`, `frames`, `tokens`, `bytes`.
        cumulative: Each chunk repeats what came before. Always refused at load: chunks are increments.
        pausable: One task can be held back without holding back the others.
        recovery: What may be done with a task whose replica died. `fail` never repeats it; `retry`
            repeats one of which nothing was forwarded; `replay` repeats any. A `replay` backend's values
            depend on the inputs, the options and their place in units alone, wherever its chunks end;
            each chunk has a length, and arrays have one item per unit.
        max_step_s: A step that runs for longer has hung; the replica is killed and its tasks go elsewhere.
        media: Facts for the edge, for example `{"rate_hz": 24000, "channels": 1}`.
        voices: Voice names that requests may ask for; empty if the stage has none.
        devices: Kinds of devices it can compute on. One that names more than `cpu` is made with the
            keyword argument `device`, which is `cpu` or `cuda`; the GPU that it is meant for is then the
            only one that it sees.
    """

    kind: Kind = "function"
    unit: str = "items"
    cumulative: bool = False
    pausable: bool = True
    recovery: Recovery = "retry"
    max_step_s: float = 30.0
    media: Mapping[str, int | float | str] = field(default_factory=dict[str, int | float | str])
    voices: tuple[str, ...] = ()
    devices: tuple[str, ...] = ("cpu",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A request's part at this stage, as the backend sees it.

    Attributes:
        key: Identity; for log texts only.
        stage: The stage being served.
        options: What the client asked for, validated at the edge: `seed`, `voice`, `speed`, …
        skip_units: So many of the units that this attempt makes were forwarded by an earlier one; the
            runtime leaves them out.
        resume: The token of the boundary (`Chunk.boundary`) behind which this attempt goes on; the
            inputs before it do not come again. `None` begins at the beginning.
    """

    key: TaskKey
    stage: StageId
    options: Payload
    skip_units: int = 0
    resume: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """One item for a task: what the edge's adapter made of a source's chunk.

    Attributes:
        name: The edge's name in the consuming stage, for example `text` or `frames`.
        payload: Named values; arrays are read-only `memoryview`s, see `stretto.types.Value`.
        final: Nothing follows on this input.
        last: Nothing follows on any input: the task's last item. It may carry an empty payload.
    """

    name: str
    payload: Payload
    final: bool = False
    last: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """An increment of a stage's output.

    Attributes:
        values: Named values; arrays are C-contiguous buffers such as `numpy.ndarray`.
        length: How many of the stage's units this chunk adds. Previews add none.
        kind: `data`; or `preview`, which takes no credit and may be dropped; or `metrics`, which is no output
            at all: only its `metrics` are taken.
        metrics: Numbers about this replica for operators, at most 32 names; the last of each counts, and
            what is not finite does not.
        media_s: Playback duration in seconds, 0 where that means nothing.
        boundary: A token if another attempt could go on behind this chunk, without the inputs that are
            used up with it: what the backend must know then. Only on the last chunk of an outcome.
        finish_reason: Why the task's output ends with this chunk, if there is more to say than that it does:
            for example `length`. At most 32 characters; the task's last one counts.
    """

    values: Mapping[str, OutputValue]
    length: int = 1
    kind: ChunkKind = "data"
    media_s: float = 0.0
    boundary: bytes | None = None
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    finish_reason: str = ""


class Finished:
    """Outcome of a step item: the task is complete; nothing may follow. `chunks` are its last ones."""

    __slots__ = ("chunks",)

    def __init__(self, *chunks: Chunk) -> None:
        self.chunks = chunks


class More:
    """Outcome of a step item: it is not used up; a later step gets the same input again.

    For output that takes many steps: between two of them other tasks get theirs, and a task without
    send right waits. `after_s` is how long the runtime waits before that step, `math.inf` for ever.
    """

    __slots__ = ("after_s", "chunks")

    def __init__(self, *chunks: Chunk, after_s: float = 0.0) -> None:
        self.chunks = chunks
        self.after_s = after_s


Outcome: TypeAlias = "Sequence[Chunk] | Finished | More | Exception"
"""What one step did for one item: chunks (perhaps none), the end, a part, or this task's own failure.

A task also ends, without `Finished`, when its last item was stepped and its outcome did not fail."""

LoadProgress: TypeAlias = Callable[[str, float], None]
"""`(what, fraction)`: tells the operator what is being loaded; fraction runs from 0.0 to 1.0."""


class Backend(Protocol):
    """What both forms share."""

    capabilities: ClassVar[Capabilities]

    def load(self, progress: LoadProgress) -> None:
        """Load weights and warm up; the replica is ready when this returns.

        Raises:
            Exception: Anything; the replica reports it as its reason and exits.
        """
        ...


class StreamBackend(Backend, Protocol):
    """Form 1: one async generator per task."""

    def run(self, task: Task, inputs: AsyncIterator[Input]) -> AsyncIterator[Chunk]:
        """Produce the task's chunks in order; returning ends the task.

        Raises:
            Exception: Fails this task only.
        """
        ...


StateT = TypeVar("StateT")


class StepBackend(Backend, Protocol[StateT]):
    """Form 2: batching across tasks, in the compute thread."""

    def open(self, task: Task) -> StateT:
        """Make a task's state. Raising fails the task before it starts; `close` is then not called."""
        ...

    def step(self, items: Sequence[tuple[StateT, Input]]) -> Sequence[Outcome]:
        """Advance each task by one item; outcomes are in the items' order.

        A task appears at most once per step. An exception out of `step` itself fails every item of
        this step and no other task.
        """
        ...

    def close(self, state: StateT) -> None:
        """Release a task's state; called exactly once on every path."""
        ...


Adapter: TypeAlias = "Callable[[Payload, bool], Sequence[Payload]]"
"""Turns a source's chunk `(payload, final)` into zero or more inputs; one instance per task and edge.

It runs in the consuming replica, in the compute thread. What it returns when `final` is true ends the
input.
"""
