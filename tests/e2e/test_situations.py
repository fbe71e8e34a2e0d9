"""What operators of such servers have suffered, in real processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, cast

import httpx2
import msgspec
import psutil
import pytest
from openai import APITimeoutError, OpenAI

from stretto.core.graph import Limits
from stretto.errors import InvalidRequest, PayloadLost, ReplicaLost, StageError, StrettoError
from stretto.orchestrator.answers import Status
from tests.e2e.engines import (
    Heard,
    Script,
    all_idle,
    all_ready,
    coming,
    engine_of,
    in_time,
    listen,
    nothing_open,
    process_of,
    scripted,
)
from tests.e2e.serving import Server, serving

if TYPE_CHECKING:
    from collections.abc import Generator

    from stretto.config.settings import Settings
    from stretto.engine import Engine

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SAMPLES = 10 * 480
SLOW: Script = {"tone": {"chunks": 10, "delay_s": 0.03}, "relay": {}}
QUICK = Limits(respawn_min_s=0.01)


def changed(settings: Settings, stage: str, **changes: object) -> Settings:
    """Return settings with another stage."""
    stages = tuple(
        msgspec.structs.replace(each, **changes) if each.id == stage else each
        for each in settings.stages
    )
    return msgspec.structs.replace(settings, stages=stages)


def assert_exact(heard: Heard, text: str) -> None:
    """All of it came, once and in order."""
    assert (heard.error, heard.samples(text)) == (None, SAMPLES)


LARGE: Script = {
    "relay": {"mode": "count", "chunks": 4, "bytes": 200_000},
    "tone": {"mode": "echo"},
}
"""The first stage makes chunks that are too large for a frame; the second one passes them on."""


@pytest.mark.parametrize("budget_bytes", [0, 256 * 1024])
async def test_situation_A2_without_room_in_shared_memory_chunks_go_another_way(
    budget_bytes: int,
) -> None:
    """With room for none or for one of the chunks under way, every stream is exact all the same."""
    settings = scripted()
    for stage in ("relay", "tone"):
        settings = changed(settings, stage, shared_memory_bytes=budget_bytes)
    async with engine_of(settings) as engine:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(listen(engine, str(n), LARGE)) for n in range(4)]
        for n, task in enumerate(running):
            assert (task.result().error, task.result().samples(str(n))) == (None, 4 * 100_000)
        await nothing_open(engine)


async def test_situation_A2_a_chunk_that_is_gone_fails_its_request_at_once() -> None:
    """Its file vanishes before the next stage has opened it: that request is told, by name, no other."""
    async with engine_of(scripted()) as engine:
        relay, tone = process_of("relay/0"), process_of("tone/0")
        tone.suspend()
        running = asyncio.create_task(listen(engine, "gone", LARGE))
        # The second request passes the relay after the first one's chunks.
        assert isinstance((await listen(engine, "x", {"relay": {"fail_at": 0}})).error, StageError)
        files = {Path(each.path) for each in relay.memory_maps()}
        lost = [path for path in files if path.name.startswith("relay-0-1.")]
        assert lost
        for path in lost:
            path.unlink()
        tone.resume()
        async with asyncio.timeout(10):
            heard = await running
        assert isinstance(heard.error, PayloadLost)
        assert heard.error.where.startswith("tone/0")
        assert_exact(await listen(engine, "after"), "after")
        await nothing_open(engine)


async def test_situation_A5_a_request_that_produces_nothing_costs_its_own_slot_only() -> None:
    """One without output among twenty on four slots: it ends well, and the others are exact."""
    settings = changed(scripted(), "tone", slots=4)
    async with engine_of(settings) as engine:
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(
                    listen(engine, str(n), {"tone": {"bare_terminal": True}} if n == 7 else None)
                )
                for n in range(21)
            ]
        for n, task in enumerate(running):
            if n == 7:
                assert (task.result().error, task.result().audio) == (None, b"")
            else:
                assert_exact(task.result(), str(n))
        await nothing_open(engine)


PIPELINE = """
version: 1
name: odd
inputs: [text]
outputs: {{audio: tone}}
stages:
  tone:
    backend: scripted
    options: {{script: {script}}}
    inputs: {{text: {{from: request.text}}}}
"""


@contextlib.contextmanager
def serving_script(folder: Path, script: str) -> Generator[Server]:
    """Serve one stage that does what a script says."""
    (folder / "odd.yaml").write_text(PIPELINE.format(script=script))
    with serving("odd.yaml", "--drain-timeout", "0", cwd=folder) as server:
        yield server


def test_situation_A15_many_long_requests_do_not_hold_up_the_api(tmp_path: Path) -> None:
    """While twenty of them are read, computed on one core and encoded, health is answered at once."""
    with (
        serving_script(tmp_path, "{cost_s: 0.03, chunks: 5, bytes: 9600}") as server,
        httpx2.Client(base_url=server.url, timeout=60) as client,
        ThreadPoolExecutor(20) as pool,
    ):
        body = {"input": "word " * 800, "response_format": "mp3"}
        speaking = [pool.submit(client.post, "/v1/audio/speech", json=body) for _ in range(20)]
        took: list[float] = []
        while not all(each.done() for each in speaking):
            began = time.monotonic()
            assert client.get("/health").status_code == 200
            took.append(time.monotonic() - began)
        assert [each.result().status_code for each in speaking] == [200] * 20
        assert len(took) >= 10
        assert max(took) < 1.0


def test_situation_B13_a_client_that_gives_up_and_tries_again_leaves_one_copy_at_most(
    tmp_path: Path,
) -> None:
    """The SDK waits half a second, three times, for an answer that takes five: none is left behind."""
    with (
        serving_script(tmp_path, "{first_delay_s: 5.0}") as server,
        OpenAI(base_url=server.base_url, api_key="x", timeout=0.5, max_retries=2) as client,
    ):
        with pytest.raises(APITimeoutError):
            client.audio.speech.create(model="odd", voice="alloy", input="x")
        health = httpx2.get(f"{server.url}/health").json()
        assert health["requests_in_flight"] <= 1


async def test_situation_B14_aborts_of_anything_at_any_time_harm_nobody() -> None:
    """Known, ended, unknown and repeated ids between traffic that stays exact."""
    chance = random.Random(14)  # noqa: S311 - which id comes when does not matter
    async with engine_of(scripted()) as engine:

        async def fuzz() -> None:
            for _ in range(300):
                name = chance.choice(["1.1-1", "1.1-3", "1.1-999999", "7.7-1", "nonsense", "1.1-0"])
                assert isinstance(await engine.abort(name), bool)

        for round_ in range(3):
            names = [f"{round_} {n}" for n in range(6)]
            done = [await listen(engine, "ended first")]
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(listen(engine, name)) for name in names]
                tasks.create_task(fuzz())
            done += [task.result() for task in running]
            for heard, name in zip(done, ["ended first", *names], strict=True):
                if heard.error is None:
                    assert_exact(heard, name)
        await nothing_open(engine)


async def test_situation_B15_a_producer_that_never_waits_can_be_stopped() -> None:
    """A hundred thousand tiny chunks without a pause; its reader leaves after ten."""
    settings = changed(scripted(), "tone", backend="scripted-stream")
    async with engine_of(settings) as engine:
        script = json.dumps({"tone": {"chunks": 100_000, "bytes": 2}, "relay": {}})
        stream = engine.generate(text="endless", options={"script": script})
        for _ in range(10):
            await anext(stream)
        async with asyncio.timeout(5):
            assert await engine.abort(stream)
            await nothing_open(engine)


async def test_situation_C3_a_batch_keeps_the_results_that_are_not_concerned() -> None:
    """Six at once on two replicas that can't replay: only those of the dead one are errors."""
    async with engine_of(scripted(QUICK, recovery="retry", tone=2)) as engine:
        heards = [Heard() for _ in range(6)]
        batch = [
            asyncio.create_task(listen(engine, str(n), SLOW, heard))
            for n, heard in enumerate(heards)
        ]
        async with asyncio.timeout(10):
            for heard in heards:
                await heard.has_begun.wait()
        process_of("tone/0").kill()
        await asyncio.gather(*batch)
        assert sum(isinstance(heard.error, ReplicaLost) for heard in heards) == 3
        for n, heard in enumerate(heards):
            if heard.error is None:
                assert_exact(heard, str(n))
        assert_exact(await listen(engine, "again"), "again")


async def test_situation_C6_an_exit_without_error_is_a_death_too() -> None:
    """Exit code 0 in mid-stream: the task goes on elsewhere, and no zombie is left."""
    async with engine_of(scripted(QUICK)) as engine:
        script: Script = {"tone": {"exit_at": 3, "exit_code": 0, "faulty_attempts": 1}, "relay": {}}
        assert_exact(await listen(engine, "x", script), "x")
        orchestrator = psutil.Process().children()[0]
        zombies = [p for p in orchestrator.children() if p.status() == psutil.STATUS_ZOMBIE]
        assert zombies == []


async def test_situation_C7_each_replacement_is_used() -> None:
    """The only replica of a stage is killed ten times: each next request succeeds, without a restart."""
    async with engine_of(scripted(QUICK)) as engine:
        for n in range(10):
            process_of("tone/0").kill()
            assert_exact(await listen(engine, str(n)), str(n))


async def test_situation_C10_unreachable_for_a_while_is_not_dead() -> None:
    """Stopped until it is suspect, then let go on: nothing is lost, nobody is evicted, and it works again."""
    async with engine_of(scripted(progress_timeout_s=6.0, tone=2)) as engine:
        heards = [Heard() for _ in range(4)]
        suspected = coming(engine, lambda state: state.state == "suspect")
        async with asyncio.TaskGroup() as tasks:
            for n, heard in enumerate(heards):
                tasks.create_task(listen(engine, str(n), SLOW, heard))
            async with asyncio.timeout(10):
                for heard in heards:
                    await heard.has_begun.wait()
            process = process_of("tone/1")
            process.suspend()
            await in_time(suspected)
            process.resume()
        for n, heard in enumerate(heards):
            assert_exact(heard, str(n))
        await all_ready(engine)
        status = msgspec.json.decode(await engine.ask("status"), type=Status)
        assert status.statistics.counters.replica_deaths == 0


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ({"tone": {"fail_at": 2}}, StageError),
        ({"tone": {"mode": "nonsense"}}, InvalidRequest),
        ({"relay": {"fail_at": 0}}, StageError),
    ],
)
async def test_situation_C11_one_bad_input_does_not_kill_a_shared_stage(
    script: Script, error: type[StrettoError]
) -> None:
    """Whatever fails, in whichever stage: the other nineteen are exact and no process is replaced."""
    async with engine_of(scripted()) as engine:
        pids = [process_of(name).pid for name in ("relay/0", "tone/0")]
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(listen(engine, str(n), script if n == 7 else None))
                for n in range(20)
            ]
        for n, task in enumerate(running):
            if n == 7:
                assert isinstance(task.result().error, error)
            else:
                assert_exact(task.result(), str(n))
        assert [process_of(name).pid for name in ("relay/0", "tone/0")] == pids


async def test_situation_C12_pressure_beyond_the_slots_waits_and_no_memory_fails_one() -> None:
    """64 clients on four slots, some of whom leave, some of whose texts need too much memory."""
    settings = changed(scripted(), "tone", slots=4, backend="tests.e2e.backends:Fragile")
    async with engine_of(settings) as engine:
        pid = process_of("tone/0").pid

        async def client(n: int) -> None:
            if n % 8 == 1:
                stream = engine.generate(text=str(n))
                with contextlib.suppress(StrettoError):
                    async with contextlib.aclosing(stream):
                        await anext(stream)
            elif n % 8 == 2:
                heard = await listen(engine, f"big {n}")
                assert isinstance(heard.error, StageError)
            else:
                assert_exact(await listen(engine, str(n)), str(n))

        async with asyncio.TaskGroup() as tasks:
            for n in range(64):
                tasks.create_task(client(n))
        assert process_of("tone/0").pid == pid
        await all_idle(engine)
        status = msgspec.json.decode(await engine.ask("status"), type=Status)
        counted = status.statistics.counters
        ended = counted.finished + counted.failed + counted.cancelled
        assert (counted.received, counted.accepted) == (counted.accepted + counted.rejected, ended)


async def test_situation_C14_a_compute_thread_that_gives_up_costs_its_replica_only() -> None:
    """`SystemExit` out of a step: the process goes, its tasks go on elsewhere."""
    settings = changed(scripted(QUICK, tone=2), "tone", backend="tests.e2e.backends:Fragile")
    async with engine_of(settings) as engine:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(listen(engine, text)) for text in ("quit", "a", "b", "c")]
        for task, text in zip(running, ("quit", "a", "b", "c"), strict=True):
            assert_exact(task.result(), text)
        await all_ready(engine)


async def leftovers(engine: Engine) -> tuple[int, int, dict[str, int], int]:
    """Return what is held after one round trip: tasks, threads, descriptors of each process, payloads."""
    await nothing_open(engine)
    status = msgspec.json.decode(await engine.ask("status"), type=Status)
    here = psutil.Process()
    processes = [here, *here.children(recursive=True)]
    descriptors = {" ".join(each.cmdline()): each.num_fds() for each in processes}
    held = status.statistics.held_payloads
    return len(asyncio.all_tasks()), threading.active_count(), descriptors, held


async def test_situations_D2_D4_D5_nothing_is_left_of_a_mixture_of_requests() -> None:
    """Finished, failed, refused, aborted, never sent: every map is empty, and descriptors are as before."""
    async with engine_of(scripted()) as engine:
        await listen(engine, "warm")
        before = await leftovers(engine)

        async def one(n: int) -> None:
            match n % 5:
                case 0:
                    assert_exact(await listen(engine, str(n)), str(n))
                case 1:
                    await listen(engine, str(n), {"tone": {"fail_at": 1}})
                case 2:
                    stream = engine.generate(text=str(n))
                    async with contextlib.aclosing(stream):
                        await anext(stream)
                case 3:
                    with pytest.raises(InvalidRequest):
                        engine.generate(text=cast("str", object()))
                case _:
                    with pytest.raises(InvalidRequest):
                        await anext(engine.generate(words="no such input"))

        for start in range(0, 400, 20):
            async with asyncio.TaskGroup() as tasks:
                for n in range(start, start + 20):
                    tasks.create_task(one(n))
        after = await leftovers(engine)
        assert len(after[2]) >= 4, "these processes, the orchestrator's and the replicas'"
        assert after == before


async def test_situation_N1_a_replica_that_joins_under_load_gets_work() -> None:
    """Clients never pause; the newcomer serves some of their next requests."""
    async with engine_of(scripted()) as engine:
        served: set[int] = set()
        has_newcomer = asyncio.Event()

        async def client(n: int) -> None:
            while not has_newcomer.is_set():
                stream = engine.generate(text=str(n), options={"script": json.dumps(SLOW)})
                async for _ in stream:
                    pass
                assert stream.timings is not None
                replica = stream.timings.stages[-1].replica
                assert replica is not None
                served.add(replica.slot)
                if replica.slot == 1:
                    has_newcomer.set()

        async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
            for n in range(8):
                tasks.create_task(client(n))
            await engine.scale("tone", 2)
        assert served == {0, 1}


@pytest.mark.parametrize("victim", ["first", "second"])
async def test_situation_A14_all_processes_of_a_replica_go_together(victim: str) -> None:
    """Two processes meet at every step and one is ended: both go, and the streams go on elsewhere."""
    settings = changed(scripted(QUICK, tone=2), "tone", backend="tests.e2e.backends:Paired")
    async with engine_of(settings) as engine:
        heards = [Heard() for _ in range(4)]
        dead = coming(engine, lambda state: state.state == "dead")
        async with asyncio.TaskGroup() as tasks:
            for n, heard in enumerate(heards):
                tasks.create_task(listen(engine, str(n), SLOW, heard))
            async with asyncio.timeout(10):
                for heard in heards:
                    await heard.has_begun.wait()
            first = process_of("tone/0")
            (second,) = first.children()
            {"first": first, "second": second}[victim].terminate()
            assert (await in_time(dead)).replica.slot == 0
        assert psutil.wait_procs([first, second], timeout=5)[1] == []
        for n, heard in enumerate(heards):
            assert_exact(heard, str(n))
        await all_ready(engine)
