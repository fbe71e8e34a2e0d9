"""How many events a second the router handles: streams of two stages, in one process, by CPU time.

.venv/bin/python -m scripts.measure.router
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from stretto.core import events as on
from stretto.core.graph import Deployment, EdgeSpec, OutputSpec, PipelineSpec, StageSpec
from stretto.core.router import Router
from stretto.observe.metrics import Metrics
from stretto.types import (
    INLINE,
    SHARED_MEMORY,
    ChannelId,
    IncarnationNumber,
    InputName,
    OutputName,
    PayloadRef,
    PipelineName,
    ReplicaId,
    RequestId,
    StageId,
    TaskKey,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

TALKER, VOCODER = StageId("talker"), StageId("vocoder")
SPEECH, TEXT, AUDIO = PipelineName("speech"), InputName("text"), OutputName("audio")
FRAMES = EdgeSpec(target=VOCODER, name="frames", source=TALKER)
API = ChannelId("1.1")
STREAMS = [RequestId(f"1.1-{number}") for number in range(8)]
CHUNKS = 400

DEPLOYMENT = Deployment(
    stages=(StageSpec(id=TALKER), StageSpec(id=VOCODER)),
    pipelines=(
        PipelineSpec(
            name=SPEECH,
            inputs=(TEXT,),
            edges=(EdgeSpec(target=TALKER, name="text", request_input=TEXT), FRAMES),
            outputs=(OutputSpec(name=AUDIO, stage=VOCODER),),
        ),
    ),
)


def beginning() -> Iterator[on.AnyEvent]:
    """Yield the events until all streams run."""
    yield on.EngineStarted(now=0.0)
    yield on.ChannelOpened(now=0.0, channel=API)
    for stage in (TALKER, VOCODER):
        replica = ReplicaId(stage, 0, IncarnationNumber(1))
        yield on.ReplicaJoined(now=0.0, replica=replica)
        yield on.ReplicaReady(now=0.0, replica=replica, slots=len(STREAMS))
    for request in STREAMS:
        text = PayloadRef(INLINE, f"{request}.text", 60)
        yield on.RequestSubmitted(
            now=0.0, channel=API, request=request, pipeline=SPEECH, inputs=((TEXT, text),)
        )


def streaming() -> Iterator[on.AnyEvent]:
    """Yield what each chunk of each stream brings: five events on its way through."""
    for seq in range(CHUNKS):
        for request in STREAMS:
            now = 0.01 * seq
            talker, vocoder = TaskKey(request, TALKER, 0), TaskKey(request, VOCODER, 0)
            frames = PayloadRef(SHARED_MEMORY, f"{request}.f{seq}", 200_000)
            audio = PayloadRef(INLINE, f"{request}.a{seq}", 9600)
            done = seq + 1
            yield on.ChunkProduced(now=now, task=talker, seq=seq, payload=frames, length=16)
            yield on.InputConsumed(now=now, task=vocoder, edge=FRAMES.id, up_to=done)
            yield on.PayloadDone(now=now, holder=vocoder, payload=frames)
            yield on.ChunkProduced(now=now, task=vocoder, seq=seq, payload=audio, length=4800)
            yield on.ConsumerDrained(now=now, request=request, output=AUDIO, up_to=done)


def main() -> None:
    """Print the best of five runs of the router, and of the metrics that observe it."""
    routed: list[float] = []
    observed: dict[bool, list[float]] = {True: [], False: []}
    number = 0
    for _ in range(5):
        router, metrics = Router(DEPLOYMENT), Metrics(1)
        for event in beginning():
            router.handle(event)
        events = list(streaming())
        number = len(events)
        begin = time.process_time()
        answers = [(event, router.handle(event)) for event in events]
        routed.append((time.process_time() - begin) / number)
        for is_chunk, costs in observed.items():
            pairs = [p for p in answers if isinstance(p[0], on.ChunkProduced) is is_chunk]
            begin = time.process_time()
            for event, commands in pairs:
                metrics.observe(event, commands)
            costs.append((time.process_time() - begin) / len(pairs))
    best = min(routed)
    print(f"router: {1 / best:,.0f} events/s, {best * 1e9:,.0f} ns each ({number:,} events)")
    for is_chunk, what in ((True, "chunk"), (False, "other")):
        print(f"metrics: {min(observed[is_chunk]) * 1e9:,.0f} ns per {what} event")


if __name__ == "__main__":
    main()
