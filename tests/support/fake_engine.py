"""An engine for the HTTP edge: real streams, and a test that plays the other end.

`FakeEngine` keeps what the application may ask for; each request gets a `Stream` over an `Inbox` that
the test fills through its `Job`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from stretto.engine.client import EngineState
from stretto.engine.readiness import Readiness
from stretto.engine.stream import Inbox, Stream, Window
from stretto.errors import EngineDead, StrettoError
from stretto.messages import channel as wire
from stretto.transport import codec
from stretto.types import (
    INLINE,
    InputName,
    OutputName,
    Payload,
    PayloadRef,
    ReplicaId,
    RequestId,
    Value,
)
from tests.support.fake_orchestrator import (
    AUDIO,
    SPEECH,
    TALKER,
    TIMINGS,
    VOCODER,
    WAIT_S,
    facts,
    replica,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stretto.engine.channel import Topic
    from stretto.messages.channel import PipelineInfo


class Job:
    """One request, seen from the engine.

    Attributes:
        text: What was asked for.
        options: The request's options.
        label: The client's id.
        granted: Chunks for which credit has come back.
        is_aborted: Set when the application has given the request up.
    """

    def __init__(self, number: int, text: str, options: Payload, label: str) -> None:
        self.text = text
        self.options = options
        self.label = label
        self.granted = 0
        self.is_aborted = asyncio.Event()
        self.inbox = Inbox(number, self, Window(8, 1024 * 1024))
        self._seq = 0

    def audio(self, *pieces: bytes) -> Job:
        """Send chunks of audio."""
        for piece in pieces:
            data = codec.encode({"audio": piece}).join()
            self.output(PayloadRef(INLINE, "", len(data)), data)
        return self

    def output(self, payload: PayloadRef | None, data: bytes | None) -> None:
        """Send one chunk; the first one carries timings."""
        timings = TIMINGS if self._seq == 0 else None
        final = payload is None
        message = wire.Output(
            self.inbox.number, AUDIO, self._seq, payload, 0, 1, "data", 0.02, final, timings
        )
        self._seq += 1
        self.inbox.put(message, data)

    def finish(self) -> None:
        """End well."""
        self.output(None, None)
        self.inbox.end(None, TIMINGS)

    def fail(self, error: StrettoError) -> None:
        """End badly."""
        self.inbox.end(error)

    # ---- what an inbox needs of its channel

    def grant(self, number: int, output: OutputName, up_to: int) -> None:
        """Take credit."""
        self.granted = up_to

    def append(self, number: int, name: InputName, values: Payload) -> None:
        """Take no more: HTTP requests are complete."""

    def close_input(self, number: int, name: InputName) -> None:
        """Do nothing."""

    def abandon(self, number: int) -> None:
        """Take note of an abort."""
        self.is_aborted.set()

    async def pulled(self, payload: PayloadRef) -> bytes:
        """Refuse: all payloads are inline."""
        raise AssertionError(f"{payload} is on no other host")

    def values(self, payload: PayloadRef, inline: bytes | memoryview | None) -> dict[str, Value]:
        """Decode."""
        assert inline is not None
        return codec.decode(inline)

    def discard(self, payload: PayloadRef) -> None:
        """Do nothing: all payloads are inline."""


class FakeEngine:
    """Implements `stretto.server.contract.SpeechEngine`.

    Attributes:
        state: What the application sees.
        readiness: Both stages are ready unless a test changes it.
        jobs: Requests so far.
        streams: Their streams; held, so that the application must end each one itself.
        script: Called with each new request.
        reports: What was told for the metrics.
        answers: What questions are answered, by topic.
        orders: What operators wanted.
    """

    def __init__(self, script: Callable[[Job], object] | None = None) -> None:
        self.state = EngineState.ALIVE
        self.readiness = ready_stages()
        self.pipelines: tuple[PipelineInfo, ...] = (SPEECH,)
        self.jobs: list[Job] = []
        self.streams: list[Stream] = []
        self.script: Callable[[Job], object] | None = script
        self.reports: list[wire.HttpDone] = []
        self.answers: dict[str, str] = {}
        self.orders: list[tuple[str, int]] = []
        self._news = asyncio.Event()
        self._taken = 0

    async def ask(self, topic: Topic, argument: str = "") -> str:
        """Answer, unless there is no engine."""
        if self.state is not EngineState.ALIVE:
            raise EngineDead("gone")
        return self.answers[topic]

    async def scale(self, stage: str, replicas: int) -> None:
        """Take note."""
        self.orders.append((stage, replicas))

    async def drain(self, replica: ReplicaId, *, replace: bool = False) -> None:
        """Take note."""
        self.orders.append((str(replica), replace))

    def report(self, message: wire.HttpDone) -> None:
        """Take note."""
        self.reports.append(message)

    def generate(
        self,
        *,
        pipeline: str,
        outputs: Sequence[str],
        options: Payload,
        label: str,
        text: str,
    ) -> Stream:
        """Take a request."""
        if self.state is not EngineState.ALIVE:
            raise EngineDead("gone")
        job = Job(len(self.jobs), text, options, label)
        self.jobs.append(job)
        self._news.set()
        if self.script is not None:
            self.script(job)
        request = RequestId(f"1.1-{len(self.jobs)}")
        self.streams.append(Stream(request, job.inbox, asyncio.get_running_loop()))
        return self.streams[-1]

    async def next_job(self) -> Job:
        """Return the next request that no earlier call has returned."""
        async with asyncio.timeout(WAIT_S):
            while len(self.jobs) <= self._taken:
                self._news.clear()
                await self._news.wait()
        self._taken += 1
        return self.jobs[self._taken - 1]


def ready_stages() -> Readiness:
    """Return two ready stages that speak 24 kHz, the talker with one voice."""
    readiness = Readiness({TALKER: 1, VOCODER: 1}, (replica(TALKER), replica(VOCODER)))
    readiness.stage(TALKER, facts(voices=("heart",)))
    readiness.stage(VOCODER, facts())
    return readiness
