"""Repeats the channel's conformance suite on both topologies and says what failed or hung.

`python -m scripts.measure.channel [REPETITIONS]`
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from typing import TYPE_CHECKING, cast

from stretto.testing import ChannelSuite, ProcessTopology, ThreadTopology

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

HANG_S = 60.0
"""A check that takes longer hangs; each has far shorter waits of its own."""


class Thread(ChannelSuite):
    """The orchestrator in a thread."""

    topology = ThreadTopology()


class Process(ChannelSuite):
    """The orchestrator in a process."""

    topology = ProcessTopology()


def checks(suite: ChannelSuite) -> dict[str, Callable[[], Awaitable[None]]]:
    """Return a suite's checks by name."""
    return {
        name: cast("Callable[[], Awaitable[None]]", getattr(suite, name))
        for name in sorted(dir(suite))
        if name.startswith("test_")
    }


async def repeat(check: Callable[[], Awaitable[None]], repetitions: int) -> list[str]:
    """Return what went wrong, one line per repetition that did."""
    wrong: list[str] = []
    for number in range(repetitions):
        try:
            async with asyncio.timeout(HANG_S):
                await check()
        except (AssertionError, TimeoutError) as error:
            wrong.append(f"repetition {number}: {type(error).__name__} {error}")
    return wrong


def main(repetitions: int) -> int:
    """Run everything; return the exit code."""
    logging.getLogger("stretto").setLevel(logging.CRITICAL + 1)  # it is made to crash
    failed = 0
    for suite in (Thread(), Process()):
        started = time.monotonic()
        found = checks(suite)
        for name, check in found.items():
            for line in asyncio.run(repeat(check, repetitions)):
                failed += 1
                print(f"{type(suite).__name__}.{name}: {line}", flush=True)
        elapsed_s = time.monotonic() - started
        print(
            f"{type(suite).__name__}: {len(found)} checks x {repetitions} in {elapsed_s:.0f} s",
            flush=True,
        )
    print(f"{failed} failed or hung")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 100))
