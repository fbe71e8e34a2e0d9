"""An engine whose orchestrator is a thread of the program: real replicas, nothing left behind."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
import uvloop

from stretto.engine import Engine
from tests.e2e.engines import Heard, Script, all_ready, listen, process_of, scripted

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.usefixtures("leak_check")]

uvloop.new_event_loop().close()  # libuv's one pipe per process is no leak of the first test

SLOW: Script = {"tone": {"chunks": 100, "delay_s": 0.01}}


@pytest.fixture
async def engine(leak_check: None) -> AsyncIterator[Engine]:
    """A running engine."""
    async with Engine.from_pipeline(scripted(tone=2), topology="thread") as engine:
        await all_ready(engine)
        yield engine


async def test_many_streams_are_exact(engine: Engine) -> None:
    """Every sample of every stream arrives, in order."""
    texts = [f"stream number {number} says a few words" for number in range(16)]
    heard = await asyncio.gather(*(listen(engine, text) for text in texts))
    assert [each.error for each in heard] == [None] * 16
    assert all(each.samples(text) > 0 for text, each in zip(texts, heard, strict=True))


async def test_a_replica_that_dies_costs_nothing_in_a_thread_either(engine: Engine) -> None:
    """Its streams go on elsewhere, each whole; the engine lives on."""
    heard = [Heard() for _ in range(6)]
    tasks = [
        asyncio.ensure_future(listen(engine, f"text {n} " * 20, SLOW, each))
        for n, each in enumerate(heard)
    ]
    for each in heard:
        await each.has_begun.wait()
    process_of("tone/0").kill()
    await asyncio.gather(*tasks)
    for n, each in enumerate(heard):
        assert each.error is None
        assert each.samples(f"text {n} " * 20) == heard[0].samples("text 0 " * 20)
    assert (await listen(engine, "afterwards")).error is None


async def test_row_E25_the_thread_sleeps_when_there_is_nothing_to_do(engine: Engine) -> None:
    """In a second without requests it is not woken once."""
    await listen(engine, "warm up")
    thread = next(t for t in threading.enumerate() if t.name.startswith("stretto-orchestrator"))
    status = Path(f"/proc/self/task/{thread.native_id}/status")

    def switches() -> int:
        lines = status.read_text().splitlines()
        return int(next(x for x in lines if x.startswith("voluntary_ctxt_switches")).split()[1])

    async with asyncio.timeout(20):
        before = -1
        while before != (before := switches()):  # what the last request has left to do
            await _quiet(0.2)
    await _quiet(1.0)
    assert switches() == before


async def _quiet(duration_s: float) -> None:
    """Let time pass: that nothing happens meanwhile is what is under test."""
    done = asyncio.Event()
    asyncio.get_running_loop().call_later(duration_s, done.set)
    await done.wait()


PROGRAM = """
import asyncio, sys
from stretto import Engine

async def main():
    async with Engine.from_pipeline("scripted", topology="thread") as engine:
        print("ready", flush=True)
        await asyncio.Event().wait()

try:
    asyncio.run(main())
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
async def test_no_replica_outlives_its_program(number: signal.Signals) -> None:
    """Ctrl-C ends it in order and quickly; SIGKILL takes the replicas along."""
    program = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, stdout=asyncio.subprocess.PIPE
    )
    assert program.stdout is not None
    async with asyncio.timeout(20):
        assert await program.stdout.readline() == b"ready\n"
        replicas = psutil.Process(program.pid).children(recursive=True)
        assert len(replicas) == 2
        program.send_signal(number)
        code = await program.wait()
    assert code == (130 if number == signal.SIGINT else -signal.SIGKILL)
    left = await asyncio.to_thread(psutil.wait_procs, replicas, 5)
    assert left[1] == []
    # What a killed program leaves in the file system is removed by the next start of any engine.
    async with Engine.from_pipeline("scripted", topology="thread") as engine:
        assert (await listen(engine, "next")).error is None
