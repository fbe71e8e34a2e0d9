"""Backends that show one thing each; they run in replicas on the test's own loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from typing import TYPE_CHECKING, ClassVar, cast

from stretto.backends.contract import (
    Capabilities,
    Chunk,
    Finished,
    Input,
    LoadProgress,
    More,
    Outcome,
    Task,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from stretto.types import CallClass


class Recorder:
    """What the backends of one test have been asked; a test empties it first.

    Attributes:
        opened: Tasks by request.
        closed: How often each was closed.
        batches: Requests that took part in each step.
        inputs: Inputs by request, as text.
        may_step: Cleared, it stops the next step until it is set.
        stepping: Set while a step waits for it.
        may_tidy: Generators wait for it when they are closed.
        tidying: Set while one does.
    """

    def __init__(self) -> None:
        self.opened: Counter[str] = Counter()
        self.closed: Counter[str] = Counter()
        self.batches: list[list[str]] = []
        self.inputs: dict[str, list[Input]] = {}
        self.may_step = threading.Event()
        self.may_step.set()
        self.stepping = threading.Event()
        self.may_tidy = asyncio.Event()
        self.may_tidy.set()
        self.tidying = asyncio.Event()


seen = Recorder()


def forget() -> Recorder:
    """Start a test with nothing recorded."""
    global seen  # noqa: PLW0603 - the replica finds its backend by name only
    seen = Recorder()
    return seen


class Base:
    """Loads at once."""

    capabilities: ClassVar[Capabilities] = Capabilities()

    def load(self, progress: LoadProgress) -> None:
        """Say that it is done."""
        progress("nothing", 1.0)


class Obedient(Base):
    """A step backend whose inputs say what their outcome is.

    The text of an input is `<verb> <argument>`; anything else comes back as a chunk.
    """

    def open(self, task: Task) -> Task:
        """Note the task; the option `refuse` refuses it."""
        if task.options.get("refuse"):
            raise ValueError("refused at open")
        seen.opened[task.key.request] += 1
        return task

    def step(self, items: Sequence[tuple[Task, Input]]) -> Sequence[Outcome]:
        """Do what the inputs say."""
        seen.batches.append([task.key.request for task, _ in items])
        if not seen.may_step.is_set():
            seen.stepping.set()
            seen.may_step.wait(5)
        texts = [str(item.payload.get("text", "")) for _, item in items]
        if "quit" in texts:
            raise SystemExit(3)
        if "break" in texts:
            raise MemoryError("broken on purpose")
        if "short" in texts:
            return []
        if "nothing" in texts:
            return cast("Sequence[Outcome]", None)
        for task, item in items:
            seen.inputs.setdefault(task.key.request, []).append(item)
        return [self._outcome(text) for text in texts]

    def close(self, state: Task) -> None:
        """Count it; the option `stuck` raises."""
        seen.closed[state.key.request] += 1
        if state.options.get("stuck"):
            raise RuntimeError("refused at close")

    def _outcome(self, text: str) -> Outcome:
        verb, _, argument = text.partition(" ")
        outcomes: dict[str, Callable[[], Outcome]] = {
            "": lambda: (),
            "fail": lambda: ValueError(argument),
            "many": lambda: [Chunk(values={"n": n}) for n in range(int(argument))],
            "more": lambda: More(Chunk(values={"text": text})),
            "sleep": lambda: More(after_s=float(argument)),
            "finish": lambda: Finished(Chunk(values={"text": text})),
            "none": lambda: cast("Outcome", None),
            "measured": lambda: (
                Chunk(values={}, kind="metrics", metrics={"seen": 1.0}),
                Chunk(values={"bad": cast("str", object())}),
            ),
            "bad": lambda: (Chunk(values={"bad": cast("str", object())}),),
        }
        return outcomes.get(verb, lambda: (Chunk(values={"text": text}),))()


class Copycat(Base):
    """A step backend that gives its input's values back without copying them."""

    def open(self, task: Task) -> Task:
        """Keep the task."""
        return task

    def step(self, items: Sequence[tuple[Task, Input]]) -> Sequence[Outcome]:
        """Give each input back."""
        return [(Chunk(values=dict(item.payload)),) if item.payload else () for _, item in items]

    def close(self, state: Task) -> None:
        """Release nothing."""


class Twice(Copycat):
    """A step backend that gives its input's values back twice."""

    def step(self, items: Sequence[tuple[Task, Input]]) -> Sequence[Outcome]:
        """Give each input back, and again."""
        return [[Chunk(values=dict(item.payload))] * 2 for _, item in items]


class Hoarder(Base):
    """A step backend that keeps views until their task ends."""

    def open(self, task: Task) -> list[object]:
        """Start an empty hoard."""
        del task
        return []

    def step(self, items: Sequence[tuple[list[object], Input]]) -> Sequence[Outcome]:
        """Keep every value."""
        for hoard, item in items:
            hoard.extend(item.payload.values())
        return [() for _ in items]

    def close(self, state: list[object]) -> None:
        """Leave it to the runtime to let go."""


class Streaming(Base):
    """A per-request backend whose inputs say what it does."""

    async def run(  # noqa: C901 - one case per verb
        self, task: Task, inputs: AsyncIterator[Input]
    ) -> AsyncIterator[Chunk]:
        """Do what the inputs say."""
        request = task.key.request
        seen.opened[request] += 1
        try:
            async for item in inputs:
                seen.inputs.setdefault(request, []).append(item)
                verb, _, argument = str(item.payload.get("text", "")).partition(" ")
                match verb:
                    case "fail":
                        raise ValueError(argument)
                    case "return":
                        return
                    case "hang":
                        await _for_ever()
                    case "deaf":
                        with contextlib.suppress(asyncio.CancelledError):
                            await _for_ever()
                        yield Chunk(values={"n": -1})
                    case "count":
                        for n in range(int(argument)):
                            yield Chunk(values={"n": n})
                    case "measured":
                        bad = cast("str", object())
                        yield Chunk(values={"bad": bad}, metrics={"seen": 1.0})
                    case "none":
                        yield cast("Chunk", None)
                    case _ if item.payload:
                        yield Chunk(values=dict(item.payload))
                    case _:
                        pass
        finally:
            seen.tidying.set()
            await seen.may_tidy.wait()
            seen.closed[request] += 1


async def _for_ever() -> None:
    await asyncio.get_running_loop().create_future()


class Cumulative(Obedient):
    """Declares what the runtime refuses."""

    capabilities: ClassVar[Capabilities] = Capabilities(cumulative=True)


class Unpausable(Obedient):
    """Declares what the runtime refuses."""

    capabilities: ClassVar[Capabilities] = Capabilities(pausable=False)


class Undeclared:
    """Declares nothing."""

    def step(self, items: object) -> None:
        """Do nothing."""


class Quitter(Base):
    """Calls `sys.exit` while it loads."""

    def load(self, progress: LoadProgress) -> None:
        """Leave."""
        del progress
        raise SystemExit(3)

    def step(self, items: object) -> None:
        """Do nothing."""


class Called(Obedient):
    """Offers methods."""

    rpc_methods: ClassVar[Mapping[str, CallClass]] = {
        "thread_alone": "exclusive",
        "thread_beside": "control",
        "break_alone": "exclusive",
        "break_beside": "control",
        "break_later": "control",
        "give_object": "control",
        "give_bytes": "exclusive",
        "leave": "exclusive",
    }

    def thread_alone(self) -> str:
        """Name the thread."""
        return threading.current_thread().name

    def thread_beside(self) -> str:
        """Name the thread."""
        return threading.current_thread().name

    def break_alone(self) -> None:
        """Raise."""
        raise ValueError("on purpose")

    def break_beside(self) -> None:
        """Raise."""
        raise ValueError("on purpose")

    async def break_later(self) -> None:
        """Raise."""
        await asyncio.sleep(0)
        raise ValueError("on purpose")

    def give_object(self) -> object:
        """Return what can't be sent."""
        return object()

    def give_bytes(self, count: int) -> bytes:
        """Return so many bytes."""
        return bytes(count)

    def leave(self) -> None:
        """Exit."""
        raise SystemExit(3)


class Sleeper(Obedient):
    """A step backend that can be put to sleep, and tells whether it is."""

    is_asleep = False

    def sleep(self) -> None:
        """Sleep."""
        self.is_asleep = True

    def wake(self) -> None:
        """Wake."""
        self.is_asleep = False

    def step(self, items: Sequence[tuple[Task, Input]]) -> Sequence[Outcome]:
        """Refuse to work while asleep."""
        assert not self.is_asleep
        return super().step(items)
