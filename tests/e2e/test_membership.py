"""Stages change their size and replicas are replaced while streams run."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import httpx2
import pytest

from stretto.errors import InvalidRequest, StrettoError
from stretto.types import IncarnationNumber, ReplicaId, StageId
from tests.e2e.engines import (
    Heard,
    Script,
    all_idle,
    all_ready,
    engine_of,
    listen,
    scripted,
)
from tests.e2e.serving import serving

pytestmark = pytest.mark.e2e

SAMPLES = 10 * 480


def script(delay_s: float) -> Script:
    """Return a script whose ten chunks come at this pace."""
    return {"tone": {"chunks": 10, "delay_s": delay_s}, "relay": {}}


async def test_situation_N5_a_planned_leave_costs_no_request() -> None:
    """Scaled 3 -> 1 -> 3 under streams of 0.1 to 1 s: all are exact, and the number is reached."""
    async with engine_of(scripted(tone=3)) as engine:
        heards = [Heard() for _ in range(24)]
        async with asyncio.TaskGroup() as tasks:
            for n, heard in enumerate(heards):
                delay_s = 0.01 + 0.09 * (n % 4) / 3
                tasks.create_task(listen(engine, str(n), script(delay_s), heard))
            async with asyncio.timeout(10):
                for heard in heards[:4]:
                    await heard.has_begun.wait()
            await engine.scale("tone", 1)
            await heards[4].has_begun.wait()
            await engine.scale("tone", 3)
        for n, heard in enumerate(heards):
            assert (heard.error, heard.samples(str(n))) == (None, SAMPLES)
        await all_ready(engine)
        await all_idle(engine)
        (tone,) = [view for view in engine.readiness.stages if view.stage == "tone"]
        assert (tone.ready, tone.target) == (3, 3)


async def test_situation_N2_a_stage_without_replicas_waits_for_its_first() -> None:
    """Not ready with none, ready and serving with one, not ready again when that has left."""
    async with engine_of(scripted(tone=0)) as engine:
        assert not engine.readiness.is_ready
        waiting = asyncio.create_task(listen(engine, "waits"))
        await engine.scale("tone", 1)
        heard = await waiting
        assert (heard.error, heard.samples("waits")) == (None, SAMPLES)
        assert engine.readiness.is_ready
        await engine.scale("tone", 0)
        await listen(engine, "x", {"relay": {"fail_at": 0}})  # a round trip
        assert not engine.readiness.is_ready


async def test_a_replacement_starts_before_the_old_one_leaves() -> None:
    """A stream that runs there is not touched; the next one finds the successor."""
    async with engine_of(scripted()) as engine:
        heard = Heard()
        running = asyncio.create_task(listen(engine, "old", script(0.1), heard))
        await heard.has_begun.wait()
        (old,) = [
            s.replica for v in engine.readiness.stages for s in v.replicas if v.stage == "tone"
        ]
        await engine.drain(old, replace=True)
        again = await listen(engine, "new")
        assert (again.error, again.samples("new")) == (None, SAMPLES)
        await running
        assert (heard.error, heard.samples("old")) == (None, SAMPLES)
        with pytest.raises(InvalidRequest, match="gone or leaves"):
            await engine.drain(old)


async def test_impossible_orders_are_refused() -> None:
    """They name what is possible, and the engine goes on."""
    async with engine_of(scripted()) as engine:
        with pytest.raises(InvalidRequest, match="this server has: relay, tone"):
            await engine.scale("vocoder", 2)
        with pytest.raises(InvalidRequest, match="0 to 256"):
            await engine.scale("tone", 1000)
        with pytest.raises(StrettoError):
            await engine.drain(ReplicaId(StageId("tone"), 7, IncarnationNumber(1)))
        assert (await listen(engine, "on")).samples("on") == SAMPLES


def stretto(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a verb as an operator does."""
    command = [sys.executable, "-m", "stretto", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


def test_operators_scale_and_drain_a_server() -> None:
    """By command line and by HTTP with the admin key; `ps` and `/ready` show the new number."""
    with serving("scripted", environment={"STRETTO_SERVER__ADMIN_KEY": "k"}) as server:
        (run,) = {path.name.split("-")[2] for path in server.run_directories()}
        done = stretto("scale", "tone=2", "relay=2", "--run", run)
        assert (done.returncode, done.stderr) == (0, "")
        assert "tone: 2 replicas wanted" in done.stdout
        done = stretto("drain", "tone/0", "--replace", "--run", run)
        assert done.returncode == 0, done.stderr
        done = stretto("scale", "tone=many", "--run", run)
        assert (done.returncode, "write STAGE=N" in done.stderr) == (2, True)
        done = stretto("scale", "vocoder=1", "--run", run)
        assert (done.returncode, "this server has: relay, tone" in done.stderr) == (1, True)
        answer = httpx2.post(
            f"{server.url}/admin/scale",
            json={"stage": "tone", "replicas": 3},
            headers={"authorization": "Bearer k"},
        )
        assert answer.status_code == 202
        stages = httpx2.get(f"{server.url}/ready").json()["stages"]
        targets = {stage: view["target"] for stage, view in stages.items()}
        assert targets == {"relay": 2, "tone": 3}
        listed = json.loads(stretto("ps", "--json", "--run", run).stdout)
        assert {
            s["stage"]: s["target"] for s in listed[0]["status"]["statistics"]["stages"]
        } == targets
