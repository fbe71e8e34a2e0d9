"""What the application needs of an engine; `stretto.engine.Engine` is one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from stretto.engine.channel import Topic
    from stretto.engine.client import EngineState
    from stretto.engine.readiness import Readiness
    from stretto.engine.stream import OutputChunk
    from stretto.errors import StrettoError
    from stretto.messages.channel import HttpDone, PipelineInfo
    from stretto.types import Payload, ReplicaId


class SpeechStream(Protocol):
    """A request's chunks; see `stretto.engine.Stream`."""

    def __aiter__(self) -> Self:
        """Return itself."""
        ...

    async def __anext__(self) -> OutputChunk:
        """Return the next chunk; raise what ended the request."""
        ...

    def abort(self, reason: StrettoError | None = None) -> None:
        """Stop the request now; reads raise `reason`. An ended one is left alone."""
        ...


class SpeechEngine(Protocol):
    """An engine as the HTTP edge sees it."""

    @property
    def state(self) -> EngineState:
        """What the engine waits for."""
        ...

    @property
    def readiness(self) -> Readiness:
        """The stages as last heard of."""
        ...

    @property
    def pipelines(self) -> tuple[PipelineInfo, ...]:
        """What can be asked for."""
        ...

    async def ask(self, topic: Topic, argument: str = "") -> str:
        """Ask the orchestrator something that changes nothing."""
        ...

    async def scale(self, stage: str, replicas: int) -> None:
        """Have a stage get so many replicas."""
        ...

    async def drain(self, replica: ReplicaId, *, replace: bool = False) -> None:
        """Have a replica finish what it has and leave."""
        ...

    def report(self, message: HttpDone) -> None:
        """Tell it something for the metrics; never waits."""
        ...

    def generate(
        self,
        *,
        pipeline: str,
        outputs: Sequence[str],
        options: Payload,
        label: str,
        text: str,
    ) -> SpeechStream:
        """Submit a request; never blocks."""
        ...
