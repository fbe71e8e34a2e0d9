"""Whether memory grows with the length of one stream: resident memory per 1,000 tiny chunks.

`python -m scripts.measure.tiny_chunks [CHUNKS] [process|thread]`
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from typing import Literal, cast

import psutil

from stretto.engine import Engine

WARM_UP = 0.2
"""The share of the stream before the first look."""


def resident_kib() -> dict[str, float]:
    """Return the resident memory of this process and of its children, by name."""
    own = psutil.Process()
    found = {"client": own.memory_info().rss / 1024}
    for child in own.children(recursive=True):
        found[" ".join(child.cmdline()[2:])] = child.memory_info().rss / 1024
    return found


async def slopes(
    chunks: int, topology: Literal["process", "thread"] = "process"
) -> tuple[dict[str, float], float]:
    """Return KiB per 1,000 chunks of each process after the warm-up, and chunks per second."""
    script = {"tone": {"chunks": chunks, "bytes": 2}}
    before: dict[str, float] = {}
    seen = 0
    async with Engine.from_pipeline("scripted", topology=topology) as engine:
        began = time.perf_counter()
        async for chunk in engine.generate(text="long", options={"script": json.dumps(script)}):
            seen += not chunk.final
            if seen == int(chunks * WARM_UP) and not before:
                gc.collect()
                before = resident_kib()
        elapsed_s = time.perf_counter() - began
        gc.collect()
        after = resident_kib()
    assert seen == chunks
    thousands = chunks * (1 - WARM_UP) / 1000
    return {name: (after[name] - before[name]) / thousands for name in before}, chunks / elapsed_s


def main() -> None:
    """Print one line per process."""
    chunks = int(sys.argv[1]) if len(sys.argv) > 1 else 500_000
    topology = cast("Literal['process', 'thread']", (sys.argv[2:] or ["process"])[0])
    found, rate = asyncio.run(slopes(chunks, topology))
    for name, slope in found.items():
        print(f"{name:48}{slope:8.3f} KiB per 1,000 chunks")
    print(f"{chunks} chunks, {rate:,.0f}/s")


if __name__ == "__main__":
    main()
