"""The façade: over a fake orchestrator, and with an orchestrator and replicas of its own."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import psutil
import pytest

from stretto.backends.scripted import check_counter_audio, tag_of
from stretto.config.loading import load_settings
from stretto.engine import Engine, EngineState, Stream
from stretto.errors import Cancelled, ConfigError, EngineDead, InvalidRequest, StartFailed
from stretto.messages import channel as wire
from stretto.transport import codec
from stretto.transport.listening import socket_base
from stretto.transport.run_directory import SHARED_MEMORY_BASE
from stretto.types import InputName, PipelineName
from tests.engine.conftest import RUN
from tests.support.fake_orchestrator import (
    AUDIO,
    SPEECH,
    TALKER,
    VOCODER,
    FakeOrchestrator,
    FakePeer,
    replica,
    wait_until,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from stretto.config.settings import Settings

END_S = 15.0
SAMPLES = 10 * 480  # what the scripted pipeline makes unless told otherwise


@pytest.fixture
async def connected(
    path: str, orchestrator: FakeOrchestrator
) -> AsyncIterator[tuple[Engine, FakePeer]]:
    """An engine connected to a fake orchestrator, and its other end."""
    engine = Engine.connect(path, run=RUN)
    engine.start()
    peer = await orchestrator.accept()
    await engine.wait_ready()
    yield engine, peer
    await engine.aclose()


async def test_inputs_are_plain_values_or_mappings(connected: tuple[Engine, FakePeer]) -> None:
    """A plain value travels under its input's name, and the only pipeline needs no name."""
    engine, peer = connected
    engine.generate(text="Hello", outputs=["audio"], label="mine")
    sent = await peer.next(wire.Submit)
    assert (sent.pipeline, sent.outputs, sent.label) == ("speech", ("audio",), "mine")
    assert codec.decode(peer.bodies[sent.number]) == {"text": "Hello"}
    engine.generate(text={"text": "Hello", "language": "en"})
    sent = await peer.next(wire.Submit)
    assert codec.decode(peer.bodies[sent.number]) == {"text": "Hello", "language": "en"}


async def test_abort_takes_a_stream_or_its_id(connected: tuple[Engine, FakePeer]) -> None:
    """Both name the request; the answer says whether something was stopped."""
    engine, peer = connected
    for number, by_id in ((1, True), (2, False)):
        stream = engine.generate(text="Hello")
        aborting = asyncio.ensure_future(engine.abort(stream.request if by_id else stream))
        assert await peer.next(wire.Abort) == wire.Abort(number, acknowledge=True)
        peer.send(wire.AbortAcknowledged(number, stopped=True), wire.Cancelled(number))
        assert await aborting
        with pytest.raises(Cancelled):
            await anext(stream)


async def test_a_pipeline_must_be_named_if_there_are_several(
    path: str, orchestrator: FakeOrchestrator
) -> None:
    """The error lists them."""
    engine = Engine.connect(path, run=RUN)
    engine.start()
    peer = await orchestrator.accept(welcome=False)
    other = wire.PipelineInfo(PipelineName("draw"), (InputName("text"),), ((AUDIO, VOCODER),))
    peer.welcome(pipelines=(SPEECH, other))
    await engine.wait_ready()
    with pytest.raises(InvalidRequest, match="speech, draw"):
        engine.generate(text="Hello")
    assert [info.name for info in engine.pipelines] == ["speech", "draw"]
    await engine.aclose()


async def test_an_engine_outside_its_life_refuses(path: str) -> None:
    """Before the start and after the end there is nothing to ask."""
    engine = Engine.connect(path, run=RUN)
    assert (engine.state, engine.pipelines, engine.statistics()) == (EngineState.STARTING, (), None)
    assert not engine.readiness.is_ready
    with pytest.raises(EngineDead, match="async with"):
        engine.generate(text="Hello")
    await engine.aclose()
    await engine.aclose()
    with pytest.raises(EngineDead, match="closed"):
        engine.start()


async def test_an_engine_that_is_not_there_does_not_start(path: str) -> None:
    """Connecting to nothing is a failed start with the path in it."""
    engine = Engine.connect(path, run=RUN)
    with pytest.raises(StartFailed, match="No engine listens"):
        async with engine:
            pass
    assert engine.state is EngineState.GONE


async def test_a_progress_subscriber_sees_replicas(connected: tuple[Engine, FakePeer]) -> None:
    """What is there at first, then each change."""
    engine, peer = connected
    seen: list[tuple[str, str]] = []
    stop = engine.subscribe(lambda state: seen.append((state.replica.stage, state.state)))
    peer.send(wire.ReplicaNotice(replica(TALKER, "dead")))
    await wait_until(lambda: len(seen) == 3)
    stop()
    assert seen == [("talker", "ready"), ("vocoder", "ready"), ("talker", "dead")]


# ---- with processes of its own


@pytest.fixture
def no_remains() -> Iterator[None]:
    """No process, socket directory or payload directory outlives the test."""

    def directories() -> set[str]:
        mine = f"stretto-{os.getuid()}-*"
        return {
            str(p) for base in (socket_base(), SHARED_MEMORY_BASE) for p in Path(base).glob(mine)
        }

    def ours() -> set[str]:
        return {path for path in directories() if owner(path) == os.getpid()}

    def owner(path: str) -> int:
        try:
            return int((Path(path) / "owner").read_text() or 0)
        except OSError:
            return 0

    yield
    assert ours() == set()
    assert psutil.Process().children(recursive=True) == []


def scripted(**changes: object) -> Settings:
    """Return the scripted pipeline; `changes` are of the last stage's script."""
    settings = load_settings(["scripted"], environ={})
    relay, tone = settings.stages
    tone = msgspec.structs.replace(tone, options={"script": {"mode": "count", **changes}})
    return msgspec.structs.replace(settings, stages=(relay, tone))


async def audio(stream: Stream) -> bytes:
    """Read a stream to its end."""
    pieces = [chunk.values.get("audio") async for chunk in stream]
    return b"".join(piece for piece in pieces if isinstance(piece, bytes))


@pytest.mark.slow
@pytest.mark.usefixtures("no_remains")
async def test_an_engine_with_its_own_processes_from_start_to_end() -> None:
    """It speaks, survives a reader that leaves and an orchestrator that dies, and leaves nothing behind."""
    async with asyncio.timeout(4 * END_S), Engine.from_pipeline("scripted") as engine:
        heard = await audio(engine.generate(text="Hello"))
        assert check_counter_audio(heard, tag_of("Hello")) == SAMPLES

        async for _ in engine.generate(text="Hello"):
            break
        stream = engine.generate(text="Hello")
        await anext(stream)
        await engine.abort(stream)
        await wait_until(lambda: not any_open(engine))

        endless = {"script": '{"tone": {"chunks": 1000000, "delay_s": 0.01}}'}
        stream = engine.generate(text="Hello", options=endless)
        await anext(stream)
        (orchestrator,) = psutil.Process().children()
        orchestrator.send_signal(signal.SIGKILL)
        with pytest.raises(EngineDead):
            await audio(stream)
        await engine.wait_ready()
        stream = engine.generate(text="again")
        assert stream.request.startswith("2.")
        assert check_counter_audio(await audio(stream), tag_of("again")) == SAMPLES
    await engine.aclose()


def any_open(engine: Engine) -> bool:
    """Say whether the engine's channel still knows a request."""
    counters = engine.statistics()
    assert counters is not None
    return counters.open_requests + counters.abandoned_requests + counters.waiting_aborts > 0


@pytest.mark.slow
@pytest.mark.usefixtures("no_remains")
async def test_an_exception_in_the_block_ends_the_engine() -> None:
    """Whatever leaves the block, the processes go, and running streams do not hold that up."""
    endless = scripted(chunks=1_000_000, delay_s=0.01)

    async def use() -> None:
        async with Engine.from_pipeline(endless) as engine:
            await anext(engine.generate(text="Hello"))
            raise KeyError

    async with asyncio.timeout(END_S):
        with pytest.raises(KeyError):
            await use()


@pytest.mark.slow
@pytest.mark.usefixtures("no_remains")
async def test_cancelling_a_start_ends_the_engine() -> None:
    """Ctrl-C while loading cancels the task; nothing is left."""
    slow = msgspec.structs.replace(
        (settings := scripted()),
        stages=tuple(
            msgspec.structs.replace(stage, options={**stage.options, "load_s": 60.0})
            for stage in settings.stages
        ),
    )

    async def use() -> None:
        async with Engine.from_pipeline(slow):
            pass

    using = asyncio.ensure_future(use())
    async with asyncio.timeout(END_S):
        while len(psutil.Process().children(recursive=True)) < 3:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.01)
        using.cancel()
        with pytest.raises(asyncio.CancelledError):
            await using


@pytest.mark.slow
@pytest.mark.usefixtures("no_remains")
async def test_a_stage_that_can_not_load_fails_the_start_with_its_reason() -> None:
    """The error names the stage and what it said."""
    settings = scripted()
    broken = msgspec.structs.replace(settings.stages[1], backend="no_such_module:Backend")
    settings = msgspec.structs.replace(settings, stages=(settings.stages[0], broken))
    async with asyncio.timeout(2 * END_S):
        with pytest.raises(StartFailed, match=r"tone.*no_such_module"):
            async with Engine.from_pipeline(settings):
                pass


def test_an_unknown_pipeline_is_refused_before_anything_starts() -> None:
    """The error offers what was probably meant."""
    with pytest.raises(ConfigError, match="scripted"):
        Engine.from_pipeline("scriptet", environ={})
