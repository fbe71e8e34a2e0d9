"""A thread hands messages to a coroutine: our hand-off beside janus, interleaved in one process.

`python -m scripts.measure.handoff [ROUNDS]` prints, on uvloop, the time from put to get of single messages
(p50, p99), until the last of a burst of 256 was got, and messages per second flat-out, with ratios to
janus; beside them a floor, the least that can hand a message over at all.
"""

from __future__ import annotations

import asyncio
import gc
import os
import statistics
import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Protocol

import janus
import uvloop

from stretto.transport.handoff import HandOff
from stretto.transport.parking import Parking

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

SPARSE = 1_000
SPARSE_GAP_S = 0.001
BURSTS = 50
BURST = 256
BURST_GAP_S = 0.005
FLAT = 100_000


class Arm(Protocol):
    """One way to hand over."""

    def put(self, sent_ns: int, /) -> object:
        """Push, from the producer's thread."""
        ...

    def get(self) -> Awaitable[int]:
        """Wait for the next message, on the loop."""
        ...

    async def aclose(self) -> None:
        """Leave nothing."""
        ...


class Ours:
    """`stretto.transport.handoff.HandOff`."""

    def __init__(self) -> None:
        self._queue: HandOff[int] = HandOff()
        self.put = self._queue.put_nowait
        self.get = self._queue.get

    async def aclose(self) -> None:
        """Close."""
        self._queue.close()


class Floor:
    """The least there can be: a deque and an eventfd. It has no end, no bound, and one reader."""

    def __init__(self) -> None:
        self._items: deque[int] = deque()
        self._fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._parking: Parking | None = None
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._wake)

    def put(self, sent_ns: int, /) -> None:
        """Push, and write whether it is needed or not."""
        self._items.append(sent_ns)
        os.eventfd_write(self._fd, 1)

    def _wake(self) -> None:
        os.eventfd_read(self._fd)
        parking, self._parking = self._parking, None
        if parking is not None:
            parking.release()

    async def get(self) -> int:
        """Wait."""
        while not self._items:
            self._parking = Parking(self._loop)
            await self._parking
        return self._items.popleft()

    async def aclose(self) -> None:
        """Close."""
        self._loop.remove_reader(self._fd)
        os.close(self._fd)


class Janus:
    """`janus.Queue`, its synchronous face to its asynchronous one."""

    def __init__(self) -> None:
        self._queue: janus.Queue[int] = janus.Queue()
        self.put = self._queue.sync_q.put_nowait
        self.get = self._queue.async_q.get

    async def aclose(self) -> None:
        """Close."""
        await self._queue.aclose()


ARMS: dict[str, Callable[[], Arm]] = {"ours": Ours, "floor": Floor, "janus": Janus}


async def timed(arm: Arm, groups: int, size: int, gap_s: float) -> list[float]:
    """Return for each group of messages the time in µs from its first put to its last get."""

    def produce() -> None:
        pause = threading.Event()
        for _ in range(groups):
            pause.wait(gap_s)
            sent_ns = time.perf_counter_ns()
            for _ in range(size):
                arm.put(sent_ns)

    took: list[float] = []
    thread = threading.Thread(target=produce)
    thread.start()
    for _ in range(groups):
        for _ in range(size - 1):
            await arm.get()
        sent_ns = await arm.get()
        took.append((time.perf_counter_ns() - sent_ns) / 1000)
    thread.join()
    return took


async def flat_out(arm: Arm) -> float:
    """Return messages per second when the producer never pauses."""

    def produce() -> None:
        for _ in range(FLAT):
            arm.put(0)

    thread = threading.Thread(target=produce)
    started = time.perf_counter()
    thread.start()
    for _ in range(FLAT):
        await arm.get()
    elapsed = time.perf_counter() - started
    thread.join()
    return FLAT / elapsed


async def one_round(make: Callable[[], Arm]) -> tuple[float, float, float, float]:
    """Return sparse p50 and p99, the burst's end (all µs), and messages per second."""
    arm = make()
    try:
        await timed(arm, 50, 1, SPARSE_GAP_S)  # warm-up
        delays = sorted(await timed(arm, SPARSE, 1, SPARSE_GAP_S))
        burst = statistics.median(await timed(arm, BURSTS, BURST, BURST_GAP_S))
        rate = await flat_out(arm)
    finally:
        await arm.aclose()
    return delays[len(delays) // 2], delays[len(delays) * 99 // 100], burst, rate


async def main(rounds: int) -> None:
    """Interleave the arms and print medians and ratios."""
    results: dict[str, list[tuple[float, float, float, float]]] = {name: [] for name in ARMS}
    for _ in range(rounds):
        for name, make in ARMS.items():
            gc.collect()
            results[name].append(await one_round(make))
    medians = {
        name: [statistics.median(column) for column in zip(*rows, strict=True)]
        for name, rows in results.items()
    }
    print(f"{'':8}{'sparse p50 µs':>15}{'p99 µs':>10}{'burst of 256 µs':>18}{'messages/s':>14}")
    for name, (p50, p99, burst, rate) in medians.items():
        print(f"{name:8}{p50:15.1f}{p99:10.1f}{burst:18.1f}{rate:14,.0f}")
    for name in ("ours", "floor"):
        ratios = [a / b for a, b in zip(medians[name], medians["janus"], strict=True)]
        print("{:8}{:14.2f}x{:9.2f}x{:17.2f}x{:13.1f}x".format(name, *ratios))


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 5))
