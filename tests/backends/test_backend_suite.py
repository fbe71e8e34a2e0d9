"""The conformance suite finds each way of breaking the contract."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, ClassVar

import pytest

from stretto.backends.contract import Capabilities, Chunk, Finished, Input, LoadProgress, More, Task
from stretto.backends.loading import backend_class
from stretto.backends.scripted import ScriptedStream
from stretto.testing.backend_suite import BackendCheckFailed, check_backend
from stretto.transport import decode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from stretto.backends.contract import Outcome
    from stretto.types import CallClass, Payload

INPUTS: list[list[Payload]] = [
    [{"text": text, "data": memoryview(text.encode())} for text in texts]
    for texts in (["a", "b", "c"], ["d", "e", "f", "g"])
]
POISON: Payload = {"text": "poison"}


class Good:
    """A step backend that keeps the contract; the others below break it in one way each."""

    capabilities: ClassVar[Capabilities] = Capabilities()

    def load(self, progress: LoadProgress) -> None:
        """Load nothing."""
        progress("nothing", 1.0)

    def open(self, task: Task) -> list[str]:
        """Remember the task's texts."""
        del task
        return []

    def step(self, items: Sequence[tuple[list[str], Input]]) -> Sequence[Outcome]:
        """Advance each task."""
        return [self.advance(state, item) for state, item in items]

    def advance(self, state: list[str], item: Input) -> Outcome:
        """Give the text back."""
        text = str(item.payload.get("text", ""))
        if text == "poison":
            return ValueError("poison")
        state.append(text)
        return (Chunk(values={"text": text}),) if text else Finished()

    def close(self, state: list[str]) -> None:
        """Forget."""
        state.clear()


class Cumulative(Good):
    """Repeats what came before."""

    def advance(self, state: list[str], item: Input) -> Outcome:
        """Give all texts so far."""
        outcome = super().advance(state, item)
        return (Chunk(values={"text": "".join(state)}),) if item.payload else outcome


class BatchShaped(Good):
    """Cuts its chunks by how many tasks are in the step."""

    def step(self, items: Sequence[tuple[list[str], Input]]) -> Sequence[Outcome]:
        """Make one chunk per task in the step."""
        return [
            [Chunk(values={"text": str(item.payload.get("text", ""))})] * len(items)
            for _, item in items
        ]


class Mixing(Good):
    """Shares state between tasks."""

    last: str = ""

    def advance(self, state: list[str], item: Input) -> Outcome:
        """Give the text before, whosever it was."""
        outcome = super().advance(state, item)
        if not item.payload:
            return outcome
        before, self.last = self.last, str(item.payload["text"])
        return (Chunk(values={"text": before}),)


class Keeping(Good):
    """Keeps views of its inputs."""

    def __init__(self) -> None:
        self.kept: list[memoryview] = []

    def open(self, task: Task) -> list[str]:
        """Start with nothing kept."""
        self.kept.clear()
        return super().open(task)

    def advance(self, state: list[str], item: Input) -> Outcome:
        """Give what is kept at the end only."""
        super().advance(state, item)
        data = item.payload.get("data")
        if isinstance(data, memoryview):
            self.kept.append(data)
        return (Chunk(values={"data": b"".join(self.kept)}),) if item.last else ()


class Breaking(Good):
    """Lets one bad task break the step."""

    def advance(self, state: list[str], item: Input) -> Outcome:
        """Raise."""
        outcome = super().advance(state, item)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


class Lenient(Good):
    """Accepts what it should refuse."""

    def advance(self, state: list[str], item: Input) -> Outcome:
        """Never fail."""
        outcome = super().advance(state, item)
        return () if isinstance(outcome, Exception) else outcome


class Fragile(Good):
    """Can't be closed before its end."""

    def close(self, state: list[str]) -> None:
        """Insist on three texts."""
        if len(state) < 3:
            raise RuntimeError("too early")


class Short(Good):
    """Forgets outcomes."""

    def step(self, items: Sequence[tuple[list[str], Input]]) -> Sequence[Outcome]:
        """Give too few."""
        return super().step(items)[1:]


class Endless(Good):
    """Waits for ever."""

    def advance(self, state: list[str], item: Input) -> Outcome:
        """Pause."""
        del state, item
        return More(after_s=float("inf"))


class Backwards(Good):
    """Reports progress that falls."""

    def load(self, progress: LoadProgress) -> None:
        """Go backwards."""
        progress("weights", 1.0)
        progress("weights", 0.5)


class Declared(Good):
    """Declares cumulative chunks."""

    capabilities: ClassVar[Capabilities] = Capabilities(cumulative=True)


class Promising(Good):
    """Offers a method that it does not have."""

    rpc_methods: ClassVar[Mapping[str, CallClass]] = {"fly": "control"}


class Unsendable(Good):
    """Makes values that no payload carries."""

    def advance(self, state: list[str], item: Input) -> Outcome:
        """Make an object."""
        del state, item
        return (Chunk(values={"thing": object()}),)  # pyright: ignore[reportArgumentType]


class Deaf(ScriptedStream):
    """Does not let its first cancellation through."""

    async def run(self, task: Task, inputs: AsyncIterator[Input]) -> AsyncIterator[Chunk]:
        """Wait on in spite of it."""
        with contextlib.suppress(asyncio.CancelledError):
            async for chunk in super().run(task, inputs):
                yield chunk
                await asyncio.sleep(0)
            return
        await asyncio.get_running_loop().create_future()


def test_a_good_backend_passes() -> None:
    """Its chunks come back, task by task."""
    chunks = check_backend(Good(), INPUTS, poison=POISON)
    assert [len(made) for made in chunks] == [3, 4]


@pytest.mark.parametrize(
    ("backend", "text"),
    [
        (Cumulative, "chunks are increments"),
        (BatchShaped, "boundaries may depend on the task's inputs only"),
        (Mixing, "share state between tasks"),
        (Keeping, "keep a view of an input|differs from the one made alone"),
        (Breaking, "instead of raising it out of `step`"),
        (Lenient, "did not fail"),
        (Fragile, "`close` after 0 steps raises RuntimeError"),
        (Short, "gave 0 outcomes for 1 items"),
        (Endless, "waits for ever"),
        (Backwards, "from 0.0 up to 1.0"),
        (Declared, "refuses `cumulative=True`"),
        (Promising, "no such method"),
        (Unsendable, "'thing'"),
        (object, "declares no `capabilities`"),
    ],
)
def test_each_breach_is_found(backend: type[object], text: str) -> None:
    """The error says which part of the contract it is."""
    with pytest.raises(BackendCheckFailed, match=text):
        check_backend(backend(), INPUTS, poison=POISON)


def test_situation_E6_cumulative_output_is_no_increment() -> None:
    """A stage that repeats what came before fails its self-check, whether it declares that or not."""
    for backend, text in ((Cumulative(), "chunks are increments"), (Declared(), "cumulative=True")):
        with pytest.raises(BackendCheckFailed, match=text):
            check_backend(backend, INPUTS, poison=POISON)


@pytest.mark.slow
def test_a_generator_that_ignores_its_cancellation_is_found() -> None:
    """It would hold its slot until its replica is evicted."""
    with pytest.raises(BackendCheckFailed, match="let CancelledError through"):
        check_backend(Deaf(), [[{"text": "x"}], [{"text": "y"}]])


@pytest.mark.slow
def test_the_speech_stages_keep_the_contract() -> None:
    """The talker's chunks are the vocoder's inputs, as in the pipeline."""
    texts: list[list[Payload]] = [[{"text": "Hello."}], [{"text": "It is late. Good night."}]]
    spoken = check_backend(backend_class("hibari-talker")(), texts, name="text")
    frames = [[decode(chunk.data) for chunk in chunks] for chunks in spoken]
    audio = check_backend(backend_class("hibari-vocoder")(), frames, name="frames")
    assert all(sum(chunk.length for chunk in chunks) > 24_000 / 4 for chunks in audio)


def test_one_task_is_not_enough() -> None:
    """Without a neighbour there is nothing to disturb."""
    with pytest.raises(BackendCheckFailed, match="at least two tasks"):
        check_backend(Good(), INPUTS[:1])
