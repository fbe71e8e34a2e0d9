"""Replicas, the orchestrator and clients that go away, in real processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from typing import cast

import msgspec
import psutil
import pytest

from stretto.core.graph import Limits
from stretto.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineDead,
    PoisonRequest,
    ReplicaLost,
    StageError,
)
from tests.e2e.engines import (
    Heard,
    Script,
    all_idle,
    coming,
    engine_of,
    in_time,
    listen,
    nothing_open,
    process_of,
    scripted,
)

pytestmark = pytest.mark.e2e

SAMPLES = 10 * 480
SLOW: Script = {"tone": {"chunks": 10, "delay_s": 0.05}, "relay": {}}


def assert_whole(heard: Heard, text: str) -> None:
    """All of a request's audio came, once and in order."""
    assert heard.error is None
    assert heard.samples(text) == SAMPLES


async def until_heard(heards: list[Heard]) -> None:
    """Wait until each request has brought audio, or has ended."""
    async with asyncio.timeout(10):
        for heard in heards:
            await heard.has_begun.wait()


async def test_situation_C1_replicas_die_in_turn_and_the_service_goes_on() -> None:
    """Each death costs at most the requests bound there; the engine's process stays the same."""
    async with engine_of(scripted(recovery="retry", relay=1, tone=2)) as engine:
        orchestrator = psutil.Process().children()[0].pid
        for name in ("relay/0", "tone/0", "tone/1"):
            heards = [Heard() for _ in range(8)]
            victim = process_of(name)
            async with asyncio.TaskGroup() as tasks:
                for n, heard in enumerate(heards):
                    tasks.create_task(listen(engine, f"{name} {n}", SLOW, heard))
                await until_heard(heards)
                victim.kill()
            for n, heard in enumerate(heards):
                if heard.error is None:
                    assert_whole(heard, f"{name} {n}")
                else:
                    assert isinstance(heard.error, ReplicaLost)
                    assert name in heard.error.where
                    assert heard.samples(f"{name} {n}") < SAMPLES
            assert any(heard.error for heard in heards) == name.startswith("tone")
            await all_idle(engine)
            assert_whole(await listen(engine, "again"), "again")
        assert psutil.Process().children()[0].pid == orchestrator


async def test_situation_C2_survivors_are_exact_and_everything_is_released() -> None:
    """Six requests on two replicas: those of the dead one fail through the common way out."""
    async with engine_of(scripted(recovery="retry", tone=2)) as engine:
        heards = [Heard() for _ in range(6)]
        victim = process_of("tone/0")
        async with asyncio.TaskGroup() as tasks:
            for n, heard in enumerate(heards):
                tasks.create_task(listen(engine, str(n), SLOW, heard))
            await until_heard(heards)
            victim.kill()
        lost = [heard for heard in heards if heard.error]
        assert len(lost) == 3
        for n, heard in enumerate(heards):
            if heard not in lost:
                assert_whole(heard, str(n))
        await all_idle(engine)
        assert_whole(await listen(engine, "after"), "after")


async def test_a_request_that_nobody_has_heard_of_is_repeated() -> None:
    """A death before the first chunk costs the client nothing but time."""
    async with engine_of(scripted(Limits(respawn_min_s=0.01))) as engine:
        victim = process_of("tone/0")
        victim.suspend()
        stream = engine.generate(text="hi")
        # The second request passes the relay after the first one: when it has failed there, the
        # first one's chunk has been dispatched to the suspended replica.
        assert isinstance((await listen(engine, "x", {"relay": {"fail_at": 0}})).error, StageError)
        victim.kill()
        audio = b"".join([bytes(cast("bytes", c.values.get("audio", b""))) async for c in stream])
        assert_whole(Heard(audio), "hi")
        assert stream.timings is not None
        assert [stage.attempts for stage in stream.timings.stages] == [1, 2]


async def test_a_death_is_noticed_within_milliseconds() -> None:
    """The notice of a SIGKILL comes by EOF, not by any period."""
    async with engine_of(scripted(Limits(respawn_min_s=0.01))) as engine:
        delays: list[float] = []
        for _ in range(5):
            dead = coming(engine, lambda state: state.state == "dead")
            victim = process_of("tone/0")
            killed_at = time.monotonic()
            victim.kill()
            await in_time(dead)
            delays.append(time.monotonic() - killed_at)
            await all_idle(engine)
            await listen(engine, "work between deaths keeps the breaker closed")
        # The bound is generous, since other work may share the cores; a period of polling would show.
        assert sorted(delays)[2] < 0.25


async def test_a_poisonous_request_ends_alone() -> None:
    """A request that kills every replica it meets is given up after three deaths."""
    async with engine_of(scripted(Limits(respawn_min_s=0.01))) as engine:
        heard = await listen(engine, "poison", {"tone": {"kill_at": 0}})
        assert isinstance(heard.error, PoisonRequest)
        await all_idle(engine)
        assert_whole(await listen(engine, "good"), "good")


async def test_a_stage_exception_fails_its_request_only() -> None:
    """Twenty requests, one of which breaks: the others are exact and no process is replaced."""
    async with engine_of(scripted()) as engine:
        before = process_of("tone/0").pid
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(
                    listen(engine, str(n), {"tone": {"fail_at": 3}} if n == 7 else None)
                )
                for n in range(20)
            ]
        for n, task in enumerate(running):
            if n == 7:
                assert isinstance(task.result().error, StageError)
                assert task.result().samples("7") == 3 * 480
            else:
                assert_whole(task.result(), str(n))
        assert process_of("tone/0").pid == before


async def test_situation_A1_a_silent_stage_is_named_and_neighbours_do_not_notice() -> None:
    """A chunk that never comes ends its request with a deadline error; eight others are exact."""
    async with engine_of(scripted(chunk_timeout_s=1.0)) as engine:
        silent: Script = {"tone": {"silent_after": 1}, "relay": {}}
        began = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            bad = tasks.create_task(listen(engine, "bad", silent))
            good = [tasks.create_task(listen(engine, str(n))) for n in range(8)]
        error = bad.result().error
        assert isinstance(error, DeadlineExceeded)
        assert "tone/0" in error.where
        assert time.monotonic() - began < 5
        for n, task in enumerate(good):
            assert_whole(task.result(), str(n))
        await all_idle(engine)


@pytest.mark.parametrize("count", [0, 3])
async def test_situation_A4_a_bare_terminal_still_ends_the_stream(count: int) -> None:
    """A final stage without a payload: one terminal after the data, and then the end."""
    script = {"chunks": count, "bare_terminal": not count}
    async with engine_of(scripted()) as engine:
        finals: list[bool] = []
        options = {"script": json.dumps({"tone": script})}
        stream = engine.generate(text="x", options=options)
        finals = [chunk.final async for chunk in stream]
        assert finals == [False] * count + [True]
        assert stream.timings is not None


async def test_situation_A7_death_is_latched_and_a_new_epoch_serves() -> None:
    """SIGKILL of the orchestrator: waiters fail, submissions fail at once, then the next life works."""
    async with engine_of(scripted()) as engine:
        heards = [Heard() for _ in range(4)]
        async with asyncio.TaskGroup() as tasks:
            for n, heard in enumerate(heards):
                tasks.create_task(listen(engine, str(n), SLOW, heard))
            await until_heard(heards)
            psutil.Process().children()[0].kill()
        assert all(isinstance(heard.error, EngineDead) for heard in heards)
        for n in range(10):
            began = time.monotonic()
            heard = await listen(engine, f"late {n}")
            assert heard.error is None or isinstance(heard.error, EngineDead)
            assert time.monotonic() - began < 1
        async with asyncio.timeout(15):
            await engine.wait_ready()
        assert_whole(await listen(engine, "back"), "back")


async def test_situation_B1_a_client_that_leaves_frees_the_slot() -> None:
    """Closing the stream stops every stage: with one slot, the next request starts at once."""
    settings = scripted()
    settings = msgspec.structs.replace(
        settings,
        stages=tuple(msgspec.structs.replace(stage, slots=1) for stage in settings.stages),
    )
    async with engine_of(settings) as engine:
        endless: Script = {"tone": {"chunks": 100_000, "delay_s": 0.01}, "relay": {}}
        heard = Heard()
        running = asyncio.create_task(listen(engine, "endless", endless, heard))
        await until_heard([heard])
        waiting = asyncio.create_task(listen(engine, "next"))
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        async with asyncio.timeout(2):
            assert_whole(await waiting, "next")


async def test_situation_B5_aborts_at_random_progress_leave_nothing() -> None:
    """Hundreds of requests given up at different moments: every map is empty afterwards."""
    async with engine_of(scripted()) as engine:

        async def give_up(n: int) -> None:
            stream = engine.generate(text=str(n))
            async with contextlib.aclosing(stream):
                seen = 0
                async for _ in stream:
                    seen += 1
                    if seen > n % 9:
                        return

        for start in range(0, 400, 20):
            async with asyncio.TaskGroup() as tasks:
                for n in range(start, start + 20):
                    tasks.create_task(give_up(n))
        await nothing_open(engine)
        assert_whole(await listen(engine, "after"), "after")


async def test_an_abort_says_whether_it_stopped_anything() -> None:
    """The stream of an aborted request ends with `Cancelled` after what had come before."""
    async with engine_of(scripted()) as engine:
        stream = engine.generate(
            text="x", options={"script": '{"tone": {"chunks": 100000, "delay_s": 0.01}}'}
        )
        await anext(aiter(stream))
        assert await engine.abort(stream)
        with pytest.raises(Cancelled):
            async for _ in stream:
                pass
        assert not await engine.abort(stream)


@pytest.mark.parametrize("extra", [-1, 0, 1])
async def test_situation_E3_totals_on_a_chunk_boundary_are_exact(extra: int) -> None:
    """Each sample comes once, whether the output ends on, before or behind a chunk's boundary."""
    async with engine_of(scripted()) as engine:
        for chunks in range(1, 20):
            heard = await listen(engine, "e3", {"tone": {"chunks": chunks + extra, "bytes": 96}})
            assert heard.error is None
            assert heard.samples("e3") == 48 * (chunks + extra)


async def test_row_M7_companions_run_together() -> None:
    """Neither starts alone; both are exact, and the leader ends last."""
    async with engine_of(scripted()) as engine:
        leader = engine.generate(text="with", companions=1)
        assert (await listen(engine, "another")).samples("another") == SAMPLES
        companion = engine.generate(text="without", companion_of=leader)
        for stream, text in ((companion, "without"), (leader, "with")):
            audio = b"".join(
                [bytes(cast("bytes", c.values.get("audio", b""))) async for c in stream]
            )
            assert_whole(Heard(audio), text)
