"""How soon the death of a replica is noticed under eight streams, and what it costs.

.venv/bin/python -m scripts.measure.kills [PIPELINE] [ROUNDS]
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING

import psutil
import uvloop

from stretto.config.loading import load_settings
from stretto.engine import Engine
from stretto.errors import StrettoError

if TYPE_CHECKING:
    from stretto.core.commands import ReplicaState

STREAMS = 8
TEXT = "She opened the old wooden door slowly. The cold morning light filled the empty room. " * 4
SCRIPT = '{"tone": {"chunks": 50, "delay_s": 0.01}, "relay": {}}'


async def stream(engine: Engine, outcomes: Counter[str], *, is_first: asyncio.Event) -> None:
    """Run one request and count how it ended."""
    try:
        async for _ in engine.generate(text=TEXT, options={"seed": 1, "script": SCRIPT}):
            is_first.set()
        outcomes["complete"] += 1
    except StrettoError as error:
        outcomes[type(error).__name__] += 1
    is_first.set()


def pid_of(replica: str) -> int:
    """Return the process that serves `stage/slot`."""
    return next(
        child.pid
        for child in psutil.Process().children(recursive=True)
        if child.cmdline()[-1:] == [replica]
    )


async def measure(pipeline: str, rounds: int) -> tuple[list[float], Counter[str]]:
    """Kill each replica in turn under load; return the delays of the notices and the outcomes."""
    delays: list[float] = []
    outcomes: Counter[str] = Counter()
    async with Engine.from_pipeline(load_settings([pipeline], environ={})) as engine:
        noticed: dict[str, asyncio.Future[float]] = {}

        def look(state: ReplicaState) -> None:
            name = f"{state.replica.stage}/{state.replica.slot}"
            if state.state in ("dead", "parked") and name in noticed and not noticed[name].done():
                noticed[name].set_result(time.monotonic())

        names = [f"{view.stage}/0" for view in engine.readiness.stages]
        for n in range(rounds):
            name = names[n % len(names)]
            firsts = [asyncio.Event() for _ in range(STREAMS)]
            async with asyncio.TaskGroup() as tasks:
                for first in firsts:
                    tasks.create_task(stream(engine, outcomes, is_first=first))
                await firsts[0].wait()
                future = noticed[name] = asyncio.get_running_loop().create_future()
                unsubscribe = engine.subscribe(look)
                process = psutil.Process(pid_of(name))
                killed_at = time.monotonic()
                process.kill()
                delays.append(await future - killed_at)
                unsubscribe()
                del noticed[name]
            await engine.wait_ready()
    return delays, outcomes


def main() -> None:
    """Print the distribution of the delays and the outcomes."""
    pipeline = sys.argv[1] if len(sys.argv) > 1 else "speech"
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 20  # noqa: PLR2004 - the third word
    delays, outcomes = uvloop.run(measure(pipeline, rounds))
    delays.sort()
    print(
        f"{pipeline}: {rounds} kills under {STREAMS} streams; noticed after "
        f"median {statistics.median(delays) * 1e3:.1f} ms, "
        f"p95 {delays[int(len(delays) * 0.95) - 1] * 1e3:.1f} ms, "
        f"worst {delays[-1] * 1e3:.1f} ms"
    )
    print(f"requests: {dict(outcomes)}")


if __name__ == "__main__":
    main()
