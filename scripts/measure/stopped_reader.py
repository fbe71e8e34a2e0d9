"""What a client that stops reading costs: resident memory of each process over a while.

`python -m scripts.measure.stopped_reader [SECONDS] [process|thread]`
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from typing import Literal, cast

import msgspec

from scripts.measure.tiny_chunks import resident_kib
from stretto.config.loading import load_settings
from stretto.engine import Engine

READ = 200
DAY_S = 86_400.0


async def growth(
    seconds: float, topology: Literal["process", "thread"] = "process"
) -> tuple[dict[str, float], int]:
    """Return by how much each process grew, as a ratio, and how many chunks came meanwhile."""
    settings = load_settings(["scripted"], environ={})
    limits = msgspec.structs.replace(
        settings.orchestrator.limits, slow_client_timeout_s=DAY_S, request_timeout_s=DAY_S
    )
    orchestrator = msgspec.structs.replace(settings.orchestrator, limits=limits)
    settings = msgspec.structs.replace(settings, orchestrator=orchestrator)
    script = {"tone": {"chunks": 100_000_000, "bytes": 4800}}
    async with Engine.from_pipeline(settings, topology=topology) as engine:
        stream = engine.generate(text="endless", options={"script": json.dumps(script)})
        for _ in range(READ):
            await anext(stream)
        await _pass_time(0.5)  # the window fills up
        gc.collect()
        before, had = resident_kib(), _received(engine)
        await _pass_time(seconds)
        gc.collect()
        after, has = resident_kib(), _received(engine)
        await anext(stream)
    return {name: after[name] / before[name] for name in before}, has - had


def _received(engine: Engine) -> int:
    found = engine.statistics()
    assert found is not None
    return found.received_total


async def _pass_time(seconds: float) -> None:
    """Let time pass: what happens meanwhile is what is measured."""
    done = asyncio.Event()
    asyncio.get_running_loop().call_later(seconds, done.set)
    await done.wait()


def main() -> None:
    """Print one line per process."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
    topology = cast("Literal['process', 'thread']", (sys.argv[2:] or ["process"])[0])
    found, came = asyncio.run(growth(seconds, topology))
    for name, ratio in found.items():
        print(f"{name:48}{(ratio - 1) * 100:+8.2f} %")
    print(f"{came} chunks came in {seconds:g} s without a reader")


if __name__ == "__main__":
    main()
