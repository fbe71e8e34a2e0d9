"""Collective calls to real replicas, beside real requests, through deaths and time-outs."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
import psutil
import pytest

from stretto.errors import DeadlineExceeded, EngineDead, InvalidRequest, ReplicaLost
from stretto.types import IncarnationNumber, ReplicaId, StageId
from tests.e2e.engines import (
    Heard,
    Script,
    all_idle,
    coming,
    engine_of,
    in_time,
    listen,
    process_of,
    scripted,
)

if TYPE_CHECKING:
    from stretto.engine import RpcResult

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

RELAY, TONE = StageId("relay"), StageId("tone")
SLOW: Script = {"tone": {"chunks": 10, "delay_s": 0.05}, "relay": {}}
LONG: Script = {"tone": {"chunks": 40, "delay_s": 0.05}, "relay": {}}


def replica(stage: StageId, slot: int = 0, incarnation: int = 1) -> ReplicaId:
    """Return a replica's identity."""
    return ReplicaId(stage, slot, IncarnationNumber(incarnation))


def counts(result: RpcResult) -> dict[str, float | bool]:
    """Return what `statistics` gives."""
    return msgspec.convert(result.value, dict[str, float | bool])


async def test_row_M5_calls_are_answered_beside_the_traffic() -> None:
    """A slow call delays no request; each replica answers for itself; what does not exist is named."""
    async with engine_of(scripted(relay=1, tone=2)) as engine:
        slow = asyncio.ensure_future(
            engine.collective_rpc("wait", arguments={"seconds": 60}, timeout_s=60)
        )
        heards = await asyncio.gather(*(listen(engine, f"text {n}", SLOW) for n in range(4)))
        assert not any(heard.error for heard in heards)
        found = await engine.collective_rpc("ping")
        assert {each: result.value for each, result in found.items()} == {
            replica(RELAY): "pong",
            replica(TONE, 0): "pong",
            replica(TONE, 1): "pong",
        }
        assert not slow.done()
        counted = await engine.collective_rpc("statistics", stages=["tone"])
        assert sum(counts(result)["steps"] for result in counted.values()) >= 40
        slow.cancel()
        with pytest.raises(InvalidRequest, match="methods are ping, statistics"):
            await engine.collective_rpc("pnig")
        with pytest.raises(InvalidRequest, match="relay, tone"):
            await engine.collective_rpc("ping", stages=["tome"])


async def test_row_M5_time_outs_and_deaths_reach_the_caller_who_waits() -> None:
    """A time-out is the caller's alone; a death is one replica's result; the others answer."""
    async with engine_of(scripted(relay=1, tone=2)) as engine:
        with pytest.raises(DeadlineExceeded, match="relay/0#1"):
            await engine.collective_rpc(
                "wait", stages=["relay"], arguments={"seconds": 30}, timeout_s=0.3
            )
        waiting = asyncio.ensure_future(
            engine.collective_rpc("wait", stages=["tone"], arguments={"seconds": 2})
        )
        await engine.collective_rpc("ping", stages=["tone"])
        process_of("tone/0").kill()
        results = await waiting
        assert [result.status for result in results.values()] == ["died", "ok"]
        assert isinstance(results[replica(TONE)].error, ReplicaLost)
        killed = await engine.collective_rpc("kill", stages=["relay"])
        assert killed[replica(RELAY)].status == "died"


async def test_row_M5_the_engines_death_ends_every_wait() -> None:
    """SIGKILL of the orchestrator: every caller gets `EngineDead`, and the next life answers."""
    async with engine_of(scripted()) as engine:
        waiting = [
            asyncio.ensure_future(engine.collective_rpc("wait", arguments={"seconds": 30}))
            for _ in range(3)
        ]
        await engine.collective_rpc("ping")
        psutil.Process().children()[0].kill()
        for each in waiting:
            with pytest.raises(EngineDead):
                await each
        await all_idle(engine)
        assert len(await engine.collective_rpc("ping")) == 2


async def test_an_exclusive_call_lets_running_requests_end_and_new_ones_wait() -> None:
    """Nobody hears a difference: the audio of all is whole."""
    async with engine_of(scripted()) as engine:
        before = Heard()
        running = asyncio.ensure_future(listen(engine, "before", LONG, before))
        async with asyncio.timeout(10):
            await before.has_begun.wait()
        calling = asyncio.ensure_future(
            engine.collective_rpc("compute", stages=["tone"], arguments={"seconds": 0.2})
        )
        await in_time(coming(engine, lambda state: state.state == "calling"))
        assert not running.done()
        after = await listen(engine, "after", SLOW)
        assert running.done()
        assert calling.done()
        assert {result.status for result in (await calling).values()} == {"ok"}
        for text, heard, chunks in (("before", before, 40), ("after", after, 10)):
            assert heard.error is None
            assert heard.samples(text) == chunks * 480


async def test_replicas_sleep_until_they_are_woken() -> None:
    """A request waits meanwhile; calls are answered."""
    async with engine_of(scripted()) as engine:
        results = await engine.collective_rpc("sleep")
        assert {result.status for result in results.values()} == {"ok"}
        heard = asyncio.ensure_future(listen(engine, "hello"))
        counted = await engine.collective_rpc("statistics")
        for result in counted.values():
            assert (counts(result)["is_asleep"], counts(result)["tasks"]) == (True, 0)
        assert not heard.done()
        await engine.collective_rpc("wake")
        assert (await heard).error is None


async def test_a_profile_of_a_stage_at_work_names_what_it_did() -> None:
    """Started and stopped while requests run."""
    async with engine_of(scripted()) as engine:
        await engine.collective_rpc("profile_start", stages=["tone"])
        await listen(engine, "hello", SLOW)
        results = await engine.collective_rpc("profile_stop", stages=["tone"])
        assert "scripted.py" in str(results[replica(TONE)].value)
