"""Replicas that join over TCP: they serve, are lost, and come back."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

from stretto.engine import Engine
from stretto.transport import SHARED_MEMORY_BASE
from tests.e2e.engines import Heard, Script, all_idle, coming, engine_of, in_time, listen, scripted
from tests.e2e.joining import TOKEN, VARIABLE, joinable, joining, proxy_to
from tests.e2e.serving import Server, serving

pytestmark = pytest.mark.e2e

SAMPLES = 10 * 480
TEXT = (
    "The kettle sang before dawn. Nobody had asked it to! Was it the wind, or the old stove? "
    "By seven the whole house smelled of bread, and the cat had taken the warm chair."
)


def script(delay_s: float) -> Script:
    """Return a script whose ten chunks come at this pace."""
    return {"tone": {"chunks": 10, "delay_s": delay_s}, "relay": {}}


async def test_situation_N2_a_stage_without_replicas_serves_when_one_has_joined() -> None:
    """The request that waited is served; what the stage is meant to have stays 0."""
    settings = joinable(scripted(tone=0))
    async with engine_of(settings) as engine:
        waiting = asyncio.create_task(listen(engine, "waits"))
        with joining(settings.orchestrator.join_address, "tone") as joined:
            heard = await waiting
            assert (heard.error, heard.samples("waits")) == (None, SAMPLES)
            (view,) = [view for view in engine.readiness.stages if view.stage == "tone"]
            assert (view.target, view.ready) == (0, 1)
            await all_idle(engine)
            gone = coming(engine, lambda s: s.replica.stage == "tone" and s.state == "stopped")
            assert joined.stop(signal.SIGTERM) == 0, joined.lines
            await in_time(gone)
            assert not engine.readiness.is_ready


async def test_a_signal_lets_it_finish_what_it_has() -> None:
    """The stream that runs there is not touched; the process ends when it is done."""
    settings = joinable(scripted(tone=0))
    async with engine_of(settings) as engine:
        with joining(settings.orchestrator.join_address, "tone") as joined:
            heard = Heard()
            running = asyncio.create_task(listen(engine, "runs", script(0.1), heard))
            await heard.has_begun.wait()
            code = await asyncio.to_thread(joined.stop, signal.SIGINT)
            await running
            assert (code, heard.error, heard.samples("runs")) == (0, None, SAMPLES)


@pytest.mark.parametrize(
    ("stage", "token", "code", "text"),
    [
        ("tone", "another token altogether", 2, "token is not this server's"),
        ("vocoder", None, 1, "no stage 'vocoder'; this server has: relay, tone"),
    ],
)
async def test_who_may_not_join_is_told_why(
    stage: str, token: str | None, code: int, text: str
) -> None:
    """In one line, and it does not try again; the engine goes on."""
    settings = joinable(scripted())
    async with engine_of(settings) as engine:
        given = {} if token is None else {"token": token}
        with joining(settings.orchestrator.join_address, stage, **given) as joined:
            assert await asyncio.to_thread(joined.ended) == code, joined.lines
            assert text in joined.lines[-1]
        await all_idle(engine)


async def test_row_M2_a_lost_link_costs_no_request_and_the_model_stays() -> None:
    """Cut in mid-stream, the task is replayed at the new incarnation: the audio is byte-identical."""
    settings = joinable(scripted(tone=0))
    async with (
        engine_of(settings) as engine,
        proxy_to(settings.orchestrator.join_address) as proxy,
    ):
        with joining(proxy.address, "tone") as joined:
            for cut in (1, 2):
                heard = Heard()
                running = asyncio.create_task(listen(engine, f"{cut}", script(0.1), heard))
                await heard.has_begun.wait()
                proxy.cut()
                await asyncio.to_thread(joined.wait_line, "lost the link", cut)
                await proxy.restore()
                await running
                assert (heard.error, heard.samples(f"{cut}")) == (None, SAMPLES)
                await asyncio.to_thread(joined.wait_line, f"as tone/0#{cut + 1}")
            await all_idle(engine)
            answers = await engine.collective_rpc("statistics", stages=["tone"])
            assert len(answers) == 1
            assert joined.process.poll() is None


async def test_row_M2_large_payloads_outlive_the_link_on_which_they_were_told_of() -> None:
    """What was made before the cut is still pulled; what was made and not told of is made again."""
    settings = joinable(scripted(tone=0))
    large: Script = {"tone": {"chunks": 10, "bytes": 400_000, "delay_s": 0.05}, "relay": {}}
    async with (
        engine_of(settings) as engine,
        proxy_to(settings.orchestrator.join_address) as proxy,
    ):
        with joining(proxy.address, "tone") as joined:
            heards = [Heard() for _ in range(4)]
            async with asyncio.TaskGroup() as tasks:
                for n, heard in enumerate(heards):
                    tasks.create_task(listen(engine, f"{n}", large, heard))
                await heards[0].has_begun.wait()
                proxy.cut()
                await asyncio.to_thread(joined.wait_line, "lost the link")
                await proxy.restore()
            for n, heard in enumerate(heards):
                assert (heard.error, heard.samples(f"{n}")) == (None, 10 * 200_000)
            await all_idle(engine)


async def test_situation_C7_one_that_dies_is_replaced_by_one_that_joins() -> None:
    """What it held goes on at the newcomer, which takes over its place."""
    settings = joinable(scripted(tone=0))
    address = settings.orchestrator.join_address
    async with engine_of(settings) as engine:
        heard = Heard()
        running = asyncio.create_task(listen(engine, "dies", script(0.1), heard))
        with joining(address, "tone") as first:
            await heard.has_begun.wait()
            first.process.kill()
            with joining(address, "tone") as second:
                await running
                assert (heard.error, heard.samples("dies")) == (None, SAMPLES)
                await asyncio.to_thread(second.wait_line, "as tone/0#2")
                await all_idle(engine)


async def test_a_drained_one_does_not_come_back() -> None:
    """Its process ends well, although nobody has sent it a signal."""
    settings = joinable(scripted(tone=1))
    address = settings.orchestrator.join_address
    async with engine_of(settings) as engine:
        ready = coming(engine, lambda s: str(s.replica) == "tone/1#1" and s.state == "ready")
        with joining(address, "tone") as joined:
            state = await in_time(ready)
            await engine.drain(state.replica)
            assert await asyncio.to_thread(joined.ended) == 0
        await all_idle(engine)


async def test_it_waits_for_a_server_that_is_not_there_yet() -> None:
    """It says so once, and leaves at a signal."""
    settings = joinable(scripted())
    with joining(settings.orchestrator.join_address, "tone") as joined:
        await asyncio.to_thread(joined.wait_line, "Connection refused; trying again")
        assert await asyncio.to_thread(joined.stop, signal.SIGTERM) == 0


LARGE = 5 * 200_000
"""Samples of a stream whose chunks are too large for the orchestrator to relay."""


@pytest.mark.parametrize("stages", [("tone",), ("relay",), ("relay", "tone")])
async def test_large_payloads_go_from_host_to_host(stages: tuple[str, ...]) -> None:
    """From a replica that has joined to the client and to others, and to it: all by pulling."""
    settings = joinable(scripted(relay=int("relay" not in stages), tone=int("tone" not in stages)))
    address = settings.orchestrator.join_address
    text = "a text of 200,000 characters, " + "x" * 200_000
    large: Script = {"tone": {"chunks": 5, "bytes": 400_000}, "relay": {"mode": "echo"}}
    with contextlib.ExitStack() as running:
        joined = [running.enter_context(joining(address, stage)) for stage in stages]
        async with Engine.from_pipeline(settings) as engine:
            heards = await asyncio.gather(*(listen(engine, text, large) for _ in range(4)))
            for heard in heards:
                assert (heard.error, heard.samples(text)) == (None, LARGE)
            await all_idle(engine)
            stored = [list(each.glob("*-joined-*")) for each in own_directories()]
            assert len(stored) == len(stages)
            assert all(stored), "released files are kept for the next payloads"
            for each in joined:
                assert await asyncio.to_thread(each.stop, signal.SIGTERM) == 0
    assert own_directories() == []


def own_directories() -> list[Path]:
    """Return the directories for payload files of all processes that have joined."""
    return list(Path(SHARED_MEMORY_BASE).glob(f"stretto-{os.getuid()}-joined-*"))


def pcm(server: Server) -> bytes:
    """Return the audio of one request over HTTP."""
    body = {"model": "tts-1", "voice": "alloy", "input": TEXT, "response_format": "pcm"}
    answer = httpx2.post(f"{server.base_url}/audio/speech", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.content


def test_situation_N7_speech_of_a_vocoder_that_has_joined_is_byte_identical() -> None:
    """Over HTTP, from another process's models; also after the orchestrator has died and begun anew."""
    environment = {VARIABLE: TOKEN, "STRETTO_ORCHESTRATOR__JOIN_ADDRESS": "127.0.0.1:0"}
    with serving(environment=environment) as server:
        address = server.wait_line(r"replicas may join at (\S+)").group(1)
        (run,) = {path.name.split("-")[2] for path in server.run_directories()}
        expected = pcm(server)
        with joining(address, "vocoder") as joined:
            server.wait_line(r"\[vocoder/1\] ready")
            assert cli("scale", "vocoder=0", "--run", run) == 0
            assert pcm(server) == expected
            server.processes("run_orchestrator")[0].kill()
            joined.wait_line("joined", 2)
            server.wait_line("ready again")
            assert cli("scale", "vocoder=0", "--run", run) == 0
            assert pcm(server) == expected
            assert joined.stop(signal.SIGTERM) == 0
        assert TOKEN not in server.log


def cli(*arguments: str) -> int:
    """Run a verb as an operator does; return its exit code."""
    command = [sys.executable, "-m", "stretto", *arguments]
    return subprocess.run(command, capture_output=True, timeout=30, check=False).returncode


async def test_it_joins_an_orchestrator_in_a_thread_too() -> None:
    """The door is the same; its socket is closed with the engine."""
    settings = joinable(scripted(tone=0))
    async with Engine.from_pipeline(settings, topology="thread") as engine:
        with joining(settings.orchestrator.join_address, "tone"):
            heard = await listen(engine, "in a thread", {"tone": {"bytes": 400_000}, "relay": {}})
            assert (heard.error, heard.samples("in a thread")) == (None, 2_000_000)
