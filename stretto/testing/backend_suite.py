"""Checks that a backend keeps its side of the contract, whichever form it has.

    check_backend(MyBackend(), [[{"text": "one"}], [{"text": "two"}, {"text": "three"}]])

It needs no replica and no loop of the caller's, so it fits in any test suite.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar, cast

from stretto.backends.contract import (
    Backend,
    Capabilities,
    Chunk,
    Finished,
    Input,
    More,
    Outcome,
    StepBackend,
    StreamBackend,
    Task,
)
from stretto.errors import ConfigError
from stretto.replica.calls import checked_methods
from stretto.transport import codec
from stretto.types import Payload, RequestId, StageId, TaskKey, Value

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

_MAX_STEPS = 100_000
_STAGE = StageId("checked")
_CUMULATIVE_EVIDENCE = 3
_CANCEL_TIMEOUT_S = 0.5
T = TypeVar("T")


class BackendCheckFailed(AssertionError):
    """The backend breaks its contract; the text says which part, and how it was seen."""


@dataclass(frozen=True, slots=True)
class MadeChunk:
    """A chunk as it would travel; two are equal if a client can't tell them apart."""

    data: bytes
    length: int
    kind: str
    media_s: float
    boundary: bytes | None


@dataclass(slots=True)
class _Run:
    """One task under check."""

    task: Task
    items: deque[Input]
    buffers: deque[bytearray]
    chunks: list[MadeChunk] = field(default_factory=list[MadeChunk])
    failure: Exception | None = None
    state: object = None

    def use_up(self) -> Input:
        """Take the item away, and its bytes from under any view that was kept."""
        item = self.items.popleft()
        buffer = self.buffers.popleft()
        buffer[:] = b"\xff" * len(buffer)
        return item


def check_backend(
    backend: object,
    inputs: Sequence[Sequence[Payload]],
    *,
    name: str = "input",
    options: Payload | None = None,
    poison: Payload | None = None,
) -> list[list[MadeChunk]]:
    """Load a backend and put it through its contract; return each task's chunks.

    Args:
        backend: Of either form, not yet loaded.
        inputs: For each of at least two tasks, the payloads that arrive on its one edge.
        name: The edge's name in the stage.
        options: What the client asked for, for every task.
        poison: A payload that the backend must refuse; the task with it must fail, and no other.

    Raises:
        BackendCheckFailed: The contract is broken.
    """
    if len(inputs) < 2:  # noqa: PLR2004 - one task can't disturb another
        raise BackendCheckFailed("give the inputs of at least two tasks")
    _check_capabilities(backend)
    _check_load(cast("Backend", backend))
    check = _Check(cast("Backend", backend), name, options or {})
    alone = [check.chunks_of([payloads])[0] for payloads in inputs]
    for number, chunks in enumerate(alone):
        _check_increments(number, chunks)
    for what, runner in check.companies.items():
        for number, (chunks, expected) in enumerate(zip(runner(inputs), alone, strict=True)):
            _check_equal(chunks, expected, f"task {number} {what}")
    check.cancelled(inputs[0])
    if poison is not None:
        check.poisoned(inputs, poison, alone)
    _check_equal(
        check.chunks_of([inputs[0]])[0], alone[0], "task 0 after cancelled and failed ones"
    )
    return alone


class _Check:
    """Runs tasks through one backend in different company."""

    def __init__(self, backend: Backend, name: str, options: Payload) -> None:
        self._backend = backend
        self._name = name
        self._options = options
        self._is_step = hasattr(backend, "step")
        self._made = 0
        self.companies: Mapping[
            str, Callable[[Sequence[Sequence[Payload]]], list[list[MadeChunk]]]
        ] = {
            "together with the others": self.chunks_of,
            "in reversed order": lambda inputs: self.chunks_of(inputs[::-1])[::-1],
            "with the others joining later": lambda inputs: self.chunks_of(inputs, stagger=1),
        }

    def chunks_of(
        self, inputs: Sequence[Sequence[Payload]], stagger: int = 0
    ) -> list[list[MadeChunk]]:
        """Run tasks side by side; each joins `stagger` steps after the one before."""
        runs = self._play(inputs, stagger)
        for run in runs:
            if run.failure is not None:
                raise BackendCheckFailed(f"{run.task.key} failed: {run.failure!r}") from run.failure
        return [run.chunks for run in runs]

    def cancelled(self, payloads: Sequence[Payload]) -> None:
        """Cancel a task after its first step and before it: `close` must take both."""
        if not self._is_step:
            asyncio.run(self._cancel_stream(self._new_run(payloads)))
            return
        backend = cast("StepBackend[Any]", self._backend)
        for steps in (0, 1):
            run = self._new_run(payloads)
            run.state = backend.open(run.task)
            for _ in range(steps):
                backend.step([(run.state, run.items[0])])
            _checked(lambda r=run: backend.close(r.state), f"`close` after {steps} steps")

    def poisoned(
        self, inputs: Sequence[Sequence[Payload]], poison: Payload, alone: list[list[MadeChunk]]
    ) -> None:
        """Put a bad task between good ones."""
        runs = self._play([inputs[0], [poison], inputs[1]])
        if runs[1].failure is None:
            raise BackendCheckFailed("the task with the poison payload did not fail")
        for run, expected in ((runs[0], alone[0]), (runs[2], alone[1])):
            if run.failure is not None:
                raise BackendCheckFailed(
                    f"a bad task has failed a good one: {run.failure!r}; return the exception as its "
                    "item's outcome instead of raising it out of `step`"
                )
            _check_equal(run.chunks, expected, "a task next to one that fails")

    def _play(self, inputs: Sequence[Sequence[Payload]], stagger: int = 0) -> list[_Run]:
        runs = [self._new_run(payloads) for payloads in inputs]
        if self._is_step:
            self._play_steps(runs, stagger)
        else:
            asyncio.run(self._play_streams(runs))
        return runs

    def _new_run(self, payloads: Sequence[Payload]) -> _Run:
        self._made += 1
        key = TaskKey(RequestId(f"task{self._made}"), _STAGE, 0)
        run = _Run(Task(key=key, stage=_STAGE, options=self._options), deque(), deque())
        for payload in payloads:
            buffer = bytearray(codec.encode(cast("Mapping[str, Any]", payload)).join())
            run.buffers.append(buffer)
            run.items.append(Input(name=self._name, payload=codec.decode(memoryview(buffer))))
        run.buffers.append(bytearray())
        run.items.append(Input(name=self._name, payload={}, final=True, last=True))
        return run

    def _play_steps(self, runs: Sequence[_Run], stagger: int) -> None:
        backend = cast("StepBackend[Any]", self._backend)
        waiting = deque(enumerate(runs))
        active: list[_Run] = []
        for turn in range(_MAX_STEPS):
            while waiting and waiting[0][0] * stagger <= turn:
                _, run = waiting.popleft()
                run.state = backend.open(run.task)
                active.append(run)
            if not active:
                return
            outcomes = _step(backend, active)
            results = zip(active, outcomes, strict=True)
            active = [run for run, outcome in results if not self._over(run, outcome)]
        raise BackendCheckFailed(f"a task has not ended after {_MAX_STEPS} steps")

    def _over(self, run: _Run, outcome: Outcome) -> bool:
        """Take over an outcome; close the task and say so if it has ended."""
        backend = cast("StepBackend[Any]", self._backend)
        ends = True
        if isinstance(outcome, Exception):
            run.failure = outcome
        else:
            made = outcome.chunks if isinstance(outcome, (Finished, More)) else outcome
            run.chunks += [_made(chunk) for chunk in made]
            if isinstance(outcome, More):
                if outcome.after_s == math.inf:
                    raise BackendCheckFailed(f"{run.task.key} waits for ever")
                return False
            ends = run.use_up().last or isinstance(outcome, Finished)
        if ends:
            _checked(lambda: backend.close(run.state), "`close`")
        return ends

    async def _play_streams(self, runs: Sequence[_Run]) -> None:
        await asyncio.gather(*(self._play_stream(run) for run in runs))

    async def _play_stream(self, run: _Run) -> None:
        backend = cast("StreamBackend", self._backend)
        try:
            async for chunk in backend.run(run.task, _inputs(run)):
                run.chunks.append(_made(chunk))
        except BackendCheckFailed:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a backend raises fails its task
            run.failure = error

    async def _cancel_stream(self, run: _Run) -> None:
        async def play() -> None:
            async for _ in cast("StreamBackend", self._backend).run(run.task, _inputs(run)):
                pass

        playing = asyncio.create_task(play())
        await asyncio.sleep(0)
        playing.cancel()
        done, _ = await asyncio.wait({playing}, timeout=_CANCEL_TIMEOUT_S)
        if not done:
            raise BackendCheckFailed("a cancelled `run` goes on: let CancelledError through")


async def _inputs(run: _Run) -> AsyncIterator[Input]:
    while run.items:
        yield run.items[0]
        run.use_up()


def _step(backend: StepBackend[Any], active: Sequence[_Run]) -> Sequence[Outcome]:
    items = [(run.state, run.items[0]) for run in active]
    try:
        outcomes = backend.step(items)
    except Exception as error:  # noqa: BLE001 - whatever a backend raises fails the items of the step
        return [error for _ in items]
    if len(outcomes) != len(items):
        raise BackendCheckFailed(f"`step` gave {len(outcomes)} outcomes for {len(items)} items")
    return outcomes


def _made(chunk: object) -> MadeChunk:
    if not isinstance(chunk, Chunk):
        raise BackendCheckFailed(f"it made a {type(chunk).__name__} where a Chunk belongs")
    if chunk.length < 0:
        raise BackendCheckFailed(f"it made a chunk of length {chunk.length}")
    encoded = _checked(lambda: codec.encode(chunk.values), f"a chunk with {sorted(chunk.values)}")
    return MadeChunk(encoded.join(), chunk.length, chunk.kind, chunk.media_s, chunk.boundary)


def _checked(call: Callable[[], T], what: str) -> T:
    try:
        return call()
    except Exception as error:
        raise BackendCheckFailed(f"{what} raises {error!r}") from error


def _check_capabilities(backend: object) -> None:
    capabilities = getattr(backend, "capabilities", None)
    if not isinstance(capabilities, Capabilities):
        raise BackendCheckFailed("it declares no `capabilities`")
    if capabilities.cumulative or not capabilities.pausable:
        raise BackendCheckFailed("the runtime refuses `cumulative=True` and `pausable=False`")
    if not (hasattr(backend, "run") or hasattr(backend, "step")):
        raise BackendCheckFailed("it has neither `run` nor `step`")
    try:
        checked_methods(type(backend).__name__, type(backend))
    except ConfigError as error:
        raise BackendCheckFailed(error.detail) from error


def _check_load(backend: Backend) -> None:
    fractions: list[float] = []
    backend.load(lambda _, fraction: fractions.append(fraction))
    if any(not 0.0 <= fraction <= 1.0 for fraction in fractions) or fractions != sorted(fractions):
        raise BackendCheckFailed(f"progress goes from 0.0 up to 1.0, it went {fractions}")


def _check_equal(chunks: list[MadeChunk], expected: list[MadeChunk], what: str) -> None:
    if chunks == expected:
        return
    if [chunk.length for chunk in chunks] != [chunk.length for chunk in expected]:
        lengths = [chunk.length for chunk in chunks], [chunk.length for chunk in expected]
        raise BackendCheckFailed(
            f"{what}: chunks have lengths {lengths[0]}, alone they had {lengths[1]}; boundaries may "
            "depend on the task's inputs only"
        )
    wrong = next(i for i, (a, b) in enumerate(zip(chunks, expected, strict=True)) if a != b)
    raise BackendCheckFailed(
        f"{what}: chunk {wrong} differs from the one made alone; does the backend share state between "
        "tasks, or keep a view of an input?"
    )


def _check_increments(number: int, chunks: list[MadeChunk]) -> None:
    """Look for values that grow by repeating all that came before."""
    decoded = [
        codec.decode(chunk.data) for chunk in chunks if chunk.kind == "data" and chunk.length
    ]
    if len(decoded) < _CUMULATIVE_EVIDENCE:
        return
    for name in decoded[0]:
        series = [_plain(values.get(name)) for values in decoded]
        if all(_repeats(before, after) for before, after in pairwise(series)):
            raise BackendCheckFailed(
                f"task {number}: each chunk's {name!r} repeats what came before; chunks are increments"
            )


def _repeats(before: bytes, after: bytes) -> bool:
    return bool(before) and len(after) > len(before) and after.startswith(before)


def _plain(value: Value) -> bytes:
    """Return text, bytes or an array as bytes; nothing else can be cumulative."""
    if isinstance(value, str):
        return value.encode()
    return bytes(value) if isinstance(value, bytes | memoryview) else b""
