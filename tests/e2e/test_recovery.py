"""Replicas die or freeze at any moment of a stream, and the listener does not notice."""

from __future__ import annotations

import asyncio
import json
import random
from typing import TYPE_CHECKING, cast

import msgspec
import pytest

from stretto.config.loading import load_settings
from stretto.core.graph import Limits
from stretto.engine import Engine
from stretto.errors import InvalidRequest, PoisonRequest
from tests.e2e.engines import (
    Heard,
    Script,
    all_idle,
    all_ready,
    coming,
    engine_of,
    in_time,
    listen,
    process_of,
    scripted,
)

if TYPE_CHECKING:
    from stretto.config.settings import Settings

pytestmark = pytest.mark.e2e

SAMPLES = 10 * 480
SLOW: Script = {"tone": {"chunks": 10, "delay_s": 0.03}, "relay": {}}
TEXT = (
    "The kettle sang before dawn. Nobody had asked it to! Was it the wind, or the old stove? "
    "By seven the whole house smelled of bread, and the cat had taken the warm chair."
)


@pytest.mark.parametrize("victim", ["relay/0", "tone/0", "tone/1"])
async def test_row_F2_a_replayed_stage_costs_no_request(victim: str) -> None:
    """Eight streams on two replicas, one of which is killed in mid-stream: all are exact."""
    async with engine_of(scripted(Limits(respawn_min_s=0.01), tone=2)) as engine:
        heards = [Heard() for _ in range(8)]
        async with asyncio.TaskGroup() as tasks:
            for n, heard in enumerate(heards):
                tasks.create_task(listen(engine, str(n), SLOW, heard))
            async with asyncio.timeout(10):
                for heard in heards:
                    await heard.has_begun.wait()
            process_of(victim).kill()
        for n, heard in enumerate(heards):
            assert heard.error is None
            assert heard.samples(str(n)) == SAMPLES
        await all_idle(engine)


@pytest.mark.parametrize("at", range(10))
async def test_a_task_goes_on_wherever_its_replica_dies(at: int) -> None:
    """The first attempt kills its replica instead of making chunk `at`; the second one goes on there."""
    async with engine_of(scripted(Limits(respawn_min_s=0.01))) as engine:
        heard = await listen(engine, "at", {"tone": {"kill_at": at, "faulty_attempts": 1}})
        assert heard.error is None
        assert heard.samples("at") == SAMPLES


async def test_row_F8_new_chunks_keep_a_request_from_being_poison() -> None:
    """Three deaths in a row without a chunk between them end it; a chunk resets the count."""
    async with engine_of(scripted(Limits(respawn_min_s=0.01))) as engine:
        heard = await listen(engine, "poison", {"tone": {"kill_at": 4}})
        assert isinstance(heard.error, PoisonRequest)
        assert heard.samples("poison") == 4 * 480


async def test_row_F9_a_frozen_replica_is_evicted_and_its_tasks_go_on() -> None:
    """SIGSTOP under a stream: no more work, then evicted; the stream is exact and nobody else waits."""
    settings = scripted(Limits(respawn_min_s=0.01), progress_timeout_s=1.5, tone=2)
    async with engine_of(settings) as engine:
        heards = [Heard() for _ in range(4)]
        suspected = coming(engine, lambda state: state.state == "suspect")
        dead = coming(engine, lambda state: state.state == "dead")
        async with asyncio.TaskGroup() as tasks:
            for n, heard in enumerate(heards):
                tasks.create_task(listen(engine, str(n), SLOW, heard))
            async with asyncio.timeout(10):
                for heard in heards:
                    await heard.has_begun.wait()
            process_of("tone/1").suspend()
            await in_time(suspected)
            heard = await listen(engine, "meanwhile", SLOW)
            assert (heard.error, heard.samples("meanwhile")) == (None, SAMPLES)
            assert not dead.done()
        assert "no progress for 1.5 s" in (await in_time(dead)).detail
        for n, heard in enumerate(heards):
            assert (heard.error, heard.samples(str(n))) == (None, SAMPLES)
        await all_ready(engine)


async def test_a_replica_whose_step_hangs_is_evicted() -> None:
    """Its loop reacts, but its computation does not end; the next attempt is another's."""
    settings = scripted(Limits(respawn_min_s=0.01), progress_timeout_s=0.6)
    settings = msgspec.structs.replace(
        settings,
        stages=tuple(
            msgspec.structs.replace(
                stage,
                backend="tests.e2e.backends:Impatient"
                if stage.id == "tone"
                else "tests.e2e.backends:Patient",
            )
            for stage in settings.stages
        ),
    )
    async with engine_of(settings) as engine:
        script: Script = {"tone": {"hang_at": 3, "faulty_attempts": 1}, "relay": {}}
        heard = await listen(engine, "hangs", script)
        assert (heard.error, heard.samples("hangs")) == (None, SAMPLES)


def speech() -> Settings:
    """Return the `speech` pipeline with two replicas a stage."""
    settings = load_settings(["speech"], environ={})
    stages = tuple(msgspec.structs.replace(stage, replicas=2) for stage in settings.stages)
    return msgspec.structs.replace(settings, stages=stages)


async def spoken(engine: Engine, seed: int, begun: asyncio.Event) -> bytes:
    """Return the audio of one request."""
    audio = b""
    async for chunk in engine.generate(text=TEXT, options={"seed": seed}):
        piece = chunk.values.get("audio", b"")
        assert isinstance(piece, (bytes, memoryview))
        audio += bytes(piece)
        if audio:
            begun.set()
    return audio


async def test_speech_is_byte_identical_whoever_dies_and_whenever() -> None:
    """Each of four replicas is killed at a random moment of a stream, alone and after another one."""
    chance = random.Random(4)  # noqa: S311 - which moment does not matter, only that it varies
    async with engine_of(speech()) as engine:
        expected = await spoken(engine, 7, asyncio.Event())
        for victim in ("talker/0", "vocoder/0", "vocoder/1", "talker/1"):
            begun = [asyncio.Event() for _ in range(3)]
            async with asyncio.TaskGroup() as tasks:
                streams = [tasks.create_task(spoken(engine, 7, event)) for event in begun]
                async with asyncio.timeout(20):
                    await begun[chance.randrange(3)].wait()
                process_of(victim).kill()
            assert [stream.result() == expected for stream in streams] == [True] * 3, victim
            await all_ready(engine)


async def test_row_M8_speech_of_a_text_that_is_still_being_written() -> None:
    """The same bytes as of the whole text, whatever the pieces, also when the talker dies meanwhile."""
    async with engine_of(speech()) as engine:
        whole = await spoken(engine, 7, asyncio.Event())
        for size, victim in ((1, None), (23, "talker/0"), (60, "talker/1")):
            stream = engine.generate(options={"seed": 7}, open_inputs=("text",))
            pieces = [TEXT[at : at + size] for at in range(0, len(TEXT), size)]
            early = len(pieces) * 2 // 3
            for piece in (*pieces[:early], ""):
                stream.append(text=piece)
            first = await anext(stream)
            audio = bytes(cast("bytes", first.values["audio"]))
            if victim is not None:
                process_of(victim).kill()
            for piece in pieces[early:]:
                stream.append(text=piece)
                await asyncio.sleep(0)  # each in a frame of its own
            stream.close_input("text")
            async for chunk in stream:
                audio += bytes(cast("bytes", chunk.values.get("audio", b"")))
            assert audio == whole, (size, victim)
            await all_ready(engine)


async def test_row_M8_segments_keep_their_own_values_and_order() -> None:
    """Each piece may carry values of its own; a closed input takes no more."""
    async with engine_of(scripted()) as engine:
        script = json.dumps({"relay": {"mode": "echo"}, "tone": {"mode": "upper"}})
        stream = engine.generate(options={"script": script}, open_inputs=("text",))
        for number, word in enumerate(("one", "two", "three")):
            stream.append(text={"text": word, "segment": number})
        stream.close_input("text")
        stream.close_input("text")
        with pytest.raises(InvalidRequest, match="not open"):
            stream.append(text="four")
        heard = [dict(chunk.values) async for chunk in stream if chunk.values]
        assert heard == [
            {"text": "ONE", "segment": 0},
            {"text": "TWO", "segment": 1},
            {"text": "THREE", "segment": 2},
        ]
        with pytest.raises(InvalidRequest, match="open are: none"):
            stream.append(text="late")


async def test_row_E7_the_same_seed_gives_the_same_bytes_in_every_topology() -> None:
    """An orchestrator in a process and one in a thread route the same; the bytes are equal."""
    heard: list[bytes] = []
    for topology in ("process", "thread"):
        async with Engine.from_pipeline("speech", topology=topology) as engine:
            heard += [await spoken(engine, 3, asyncio.Event()) for _ in range(2)]
    assert len(set(heard)) == 1


async def test_row_E21_metrics_reach_the_operator_and_no_stage() -> None:
    """A chunk of nothing but metrics is absorbed; those that ride on output leave it as it is."""
    async with engine_of(scripted()) as engine:
        heard = await listen(engine, "measured", {"tone": {"reports": True}})
        assert (heard.error, heard.samples("measured")) == (None, SAMPLES)
        text = await engine.ask("metrics")
        assert 'stretto_replica_reported{name="made",replica="0",stage="tone"} 10.0' in text
        assert 'stretto_replica_reported{name="running",replica="0",stage="tone"} 0.0' in text


async def test_row_E23_the_end_says_why_each_stage_ended() -> None:
    """The backend's reason, which rides on its last chunk."""
    async with engine_of(scripted()) as engine:
        script = json.dumps({"tone": {"finish_reason": "length"}, "relay": {}})
        stream = engine.generate(text="x", options={"script": script})
        async for _ in stream:
            pass
        assert stream.timings is not None
        ended = {each.stage: each.finish_reason for each in stream.timings.stages}
        assert ended == {"tone": "length", "relay": ""}
