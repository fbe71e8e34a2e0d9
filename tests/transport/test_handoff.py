"""The hand-off between threads: nothing is lost, nobody is left waiting, nobody is woken for nothing."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from stretto.errors import DeadlineExceeded, EngineDead, InvalidRequest, Overloaded
from stretto.transport.handoff import ITEMS_PER_TURN, HandOff

if TYPE_CHECKING:
    from collections.abc import Callable

WAIT_S = 5.0


async def turns(number: int = 3) -> None:
    """Let everything that is due on the loop happen."""
    loop = asyncio.get_running_loop()
    for _ in range(number):
        turn = loop.create_future()
        loop.call_soon(turn.set_result, None)
        await turn


def in_thread(call: Callable[[], object]) -> object:
    """Return what a call returns, or the exception that it raises, in a thread of its own."""
    results: list[object] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception as error:  # noqa: BLE001 - it is the result
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(WAIT_S)
    return results[0] if results else "it did not return"


def descriptors() -> int:
    """Return how many eventfds this process holds."""
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]  # noqa: PTH208
    return sum(
        os.readlink(link) == "anon_inode:[eventfd]"  # noqa: PTH115
        for link in links
        if Path(link).is_symlink()
    )


async def test_row_Q1_any_thread_puts_before_there_is_a_reader() -> None:
    """The pushing side needs no loop, and nothing of what it puts early is lost."""
    queue: HandOff[int] = HandOff()
    threads = [threading.Thread(target=queue.put_nowait, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert sorted([await queue.get() for _ in range(8)]) == list(range(8))


async def test_a_burst_costs_one_wake_up() -> None:
    """Only the first put of a burst writes to the descriptor."""
    queue: HandOff[int] = HandOff()
    batches: list[list[int]] = []
    queue.listen(batches.append, lambda: None)
    for number in range(ITEMS_PER_TURN):
        queue.put_nowait(number)
    await turns()
    assert batches == [list(range(ITEMS_PER_TURN))]
    queue.close()
    await turns()


async def test_a_flood_is_taken_in_bounded_turns() -> None:
    """Other callbacks run between two batches of what listens, and between two series of reads."""
    queue: HandOff[int] = HandOff()
    total = 3 * ITEMS_PER_TURN + 1
    for number in range(total):
        queue.put_nowait(number)
    ticks = 0
    loop = asyncio.get_running_loop()

    def tick() -> None:
        nonlocal ticks
        ticks += 1
        loop.call_soon(tick)

    tick()
    assert [await queue.get() for _ in range(total)] == list(range(total))
    assert ticks >= 3

    heard: HandOff[int] = HandOff()
    batches: list[int] = []
    all_heard = asyncio.Event()

    def hear(items: list[int]) -> None:
        batches.append(len(items))
        if sum(batches) == total:
            all_heard.set()

    for number in range(total):
        heard.put_nowait(number)
    heard.listen(hear, lambda: None)
    async with asyncio.timeout(WAIT_S):
        await all_heard.wait()
    assert batches == [ITEMS_PER_TURN] * 3 + [1]
    heard.close()


async def test_row_Q2_another_loop_gets_a_typed_error_at_once() -> None:
    """The awaiting face belongs to the loop that used it first."""
    queue: HandOff[int] = HandOff()
    queue.put_nowait(1)
    assert await queue.get() == 1

    async def elsewhere() -> None:
        await queue.get()

    error = in_thread(lambda: asyncio.run(elsewhere()))
    assert isinstance(error, InvalidRequest)
    assert error.code == "wrong_event_loop"
    queue.close()


async def test_threads_and_a_loop_do_not_read_side_by_side() -> None:
    """The face is chosen by the first read."""
    queue: HandOff[int] = HandOff()
    queue.put_nowait(1)
    assert in_thread(lambda: queue.get_blocking(WAIT_S)) == 1
    with pytest.raises(InvalidRequest):
        await queue.get()


async def test_row_Q3_a_parked_read_returns_a_message_or_raises() -> None:
    """A read parks when nothing is there, and is never answered with nothing."""
    queue: HandOff[int] = HandOff()
    reading = asyncio.ensure_future(queue.get())
    await turns()
    assert not reading.done()
    queue.put_nowait(0)
    assert await reading == 0
    reading = asyncio.ensure_future(queue.get())
    await turns()
    queue.close()
    with pytest.raises(EngineDead):
        await reading


@pytest.mark.parametrize("face", ["get", "listen", "get_blocking"])
async def test_row_Q7_what_was_put_stays_readable_after_the_end(face: str) -> None:
    """The end comes after the last message, on every face, also if nobody had read before."""
    queue: HandOff[int] = HandOff()
    for number in range(3):
        queue.put_nowait(number)
    queue.close(last=[3])
    seen: list[int] = []
    closed = asyncio.Event()
    if face == "listen":
        queue.listen(seen.extend, closed.set)
        async with asyncio.timeout(WAIT_S):
            await closed.wait()
    elif face == "get":
        seen = [await queue.get() for _ in range(4)]
    else:
        seen = [queue.get_blocking(WAIT_S) for _ in range(4)]
    assert seen == [0, 1, 2, 3]


async def test_row_Q9_closed_is_one_type_at_every_read() -> None:
    """Both faces raise `EngineDead`, again and again, each time as an exception of its own."""
    queue: HandOff[int] = HandOff()
    queue.close(EngineDead("gone", code="engine_crashed"))
    seen: list[EngineDead] = []
    for _ in range(2):
        with pytest.raises(EngineDead, match="gone") as caught:
            await queue.get()
        seen.append(caught.value)
    assert seen[0] is not seen[1]
    assert {error.code for error in seen} == {"engine_crashed"}

    threaded: HandOff[int] = HandOff()
    threaded.close()
    for _ in range(2):
        assert isinstance(in_thread(lambda: threaded.get_blocking(WAIT_S)), EngineDead)


async def test_row_Q14_a_late_put_is_swallowed_and_counted() -> None:
    """Clean-up code may push after the end."""
    queue: HandOff[int] = HandOff()
    queue.close()
    assert not queue.put_nowait(1)
    assert queue.late_total == 1
    with pytest.raises(EngineDead):
        await queue.get()


async def test_row_Q16_closing_is_idempotent_and_keeps_the_first_reason() -> None:
    """A second close changes nothing."""
    queue: HandOff[int] = HandOff()
    queue.close(EngineDead("first"))
    queue.close(EngineDead("second"), last=[1])
    with pytest.raises(EngineDead, match="first"):
        await queue.get()


async def test_situation_A9_closing_wakes_blocked_producers_and_joiners() -> None:
    """Four threads in `put` and two tasks in `wait_taken` all end with a typed error."""
    queue: HandOff[int] = HandOff(max_items=1)
    queue.put_nowait(0)
    outcomes: list[Exception] = []

    def produce() -> None:
        try:
            queue.put(1)
        except EngineDead as error:
            outcomes.append(error)

    threads = [threading.Thread(target=produce, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    joiners = [asyncio.ensure_future(queue.wait_taken()) for _ in range(2)]
    await turns()
    queue.close()
    async with asyncio.timeout(1.0):
        results = await asyncio.gather(*joiners, return_exceptions=True)
    for thread in threads:
        thread.join(1.0)
    assert [type(result) for result in results] == [EngineDead, EngineDead]
    assert [type(outcome) for outcome in outcomes] == [EngineDead] * 4
    assert await queue.get() == 0
    with pytest.raises(EngineDead):
        await queue.get()


def test_row_Q16_closing_wakes_every_blocked_reader() -> None:
    """Threads that wait for a message all learn of the end."""
    queue: HandOff[int] = HandOff()
    outcomes: list[Exception] = []

    def read() -> None:
        try:
            queue.get_blocking()
        except EngineDead as error:
            outcomes.append(error)

    threads = [threading.Thread(target=read, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    queue.close()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(outcomes) == 4


def test_each_blocked_reader_gets_a_message_of_one_burst() -> None:
    """The one wake-up of a burst is passed on from reader to reader."""
    queue: HandOff[int] = HandOff()
    got: list[int] = []
    threads = [
        threading.Thread(target=lambda: got.append(queue.get_blocking(WAIT_S)), daemon=True)
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for number in range(4):
        queue.put_nowait(number)
    for thread in threads:
        thread.join(WAIT_S)
    assert sorted(got) == [0, 1, 2, 3]


def test_a_blocking_read_has_a_deadline() -> None:
    """It says so by a typed error."""
    queue: HandOff[int] = HandOff()
    with pytest.raises(DeadlineExceeded):
        queue.get_blocking(0.001)


async def test_a_bounded_hand_off_refuses_blocks_and_lets_the_last_words_in() -> None:
    """`put_nowait` never waits, `put` waits for room, and `close` ignores the bound."""
    queue: HandOff[int] = HandOff(max_items=2)
    queue.put_nowait(0)
    queue.put_nowait(1)
    with pytest.raises(Overloaded):
        queue.put_nowait(2)
    with pytest.raises(DeadlineExceeded):
        queue.put(2, timeout_s=0.001)
    thread = threading.Thread(target=queue.put, args=(2, WAIT_S))
    thread.start()
    assert await queue.get() == 0
    assert [await queue.get() for _ in range(2)] == [1, 2]
    thread.join(WAIT_S)
    queue.put_nowait(3)
    queue.put_nowait(4)
    queue.close(last=[5])
    assert [await queue.get() for _ in range(3)] == [3, 4, 5]


async def test_a_joiner_sleeps_until_the_last_message_is_taken() -> None:
    """It returns when the reader has taken everything, from whatever thread."""
    queue: HandOff[int] = HandOff()
    await queue.wait_taken()  # nothing waits: at once
    queue.put_nowait(0)
    queue.put_nowait(1)
    joining = asyncio.ensure_future(queue.wait_taken())
    assert await queue.get() == 0
    await turns()
    assert not joining.done()
    assert await queue.get() == 1
    async with asyncio.timeout(WAIT_S):
        await joining
    queue.close()


@pytest.mark.parametrize("later", range(6))
async def test_a_cancelled_read_loses_nothing(later: int) -> None:
    """Whether it was parked, had been told to look, or had the message: somebody gets it."""
    queue: HandOff[int] = HandOff()
    first, second = (asyncio.ensure_future(queue.get()) for _ in range(2))
    await turns()
    queue.put_nowait(1)
    await turns(later)
    first.cancel()
    await asyncio.wait([first])
    if first.cancelled():
        async with asyncio.timeout(WAIT_S):
            assert await second == 1
    else:
        assert first.result() == 1
        second.cancel()
        await asyncio.wait([second])


async def test_paused_delivery_waits_with_messages_and_the_end() -> None:
    """What listens hears nothing until it is resumed, then everything in order."""
    queue: HandOff[int] = HandOff()
    heard: list[object] = []
    queue.listen(heard.extend, lambda: heard.append("closed"))
    queue.pause()
    queue.pause()
    queue.put_nowait(1)
    queue.close(last=[2])
    await turns()
    assert heard == []
    queue.resume()
    await turns()
    assert heard == [1, 2, "closed"]
    queue.resume()
    await turns()
    assert heard == [1, 2, "closed"]


@pytest.mark.parametrize("face", ["get", "listen", "get_blocking", "nobody"])
async def test_no_descriptor_outlives_the_end(face: str) -> None:
    """The eventfd goes when the end was seen, or with the hand-off itself."""
    gc.collect()
    before = descriptors()
    queue: HandOff[int] = HandOff()
    assert descriptors() == before + 1
    if face == "listen":
        queue.listen(lambda _: None, lambda: None)
    elif face == "get":
        queue.put_nowait(1)
        await queue.get()
    elif face == "get_blocking":
        queue.put_nowait(1)
        queue.get_blocking(WAIT_S)
    queue.close()
    await turns()
    assert descriptors() == before
    unread: HandOff[int] = HandOff()
    del unread
    assert descriptors() == before


@pytest.mark.slow
async def test_puts_that_race_with_the_end_are_delivered_or_counted() -> None:
    """Each message is seen or counted as late, and no put writes to a descriptor that is gone."""
    for _ in range(200):
        queue: HandOff[int] = HandOff()
        taken = 0
        start = threading.Barrier(3)

        def produce(queue: HandOff[int] = queue, start: threading.Barrier = start) -> None:
            start.wait(WAIT_S)
            for number in range(50):
                queue.put_nowait(number)

        threads = [threading.Thread(target=produce) for _ in range(2)]
        for thread in threads:
            thread.start()
        start.wait(WAIT_S)
        try:
            while True:
                await queue.get()
                taken += 1
                if taken == 20:
                    queue.close()
        except EngineDead:
            pass
        for thread in threads:
            thread.join(WAIT_S)
        assert taken + queue.late_total == 100


class Between(deque[int]):
    """A queue into which somebody puts, and closes it, right after a reader has found it empty."""

    def __init__(self, handed: HandOff[int]) -> None:
        super().__init__()
        self._handed = handed
        self._is_armed = True

    def _someone_puts(self) -> None:
        if self._is_armed:
            self._is_armed = False
            self._handed.put_nowait(7)
            self._handed.close()

    def __len__(self) -> int:
        """Return the length as it was; then somebody puts."""
        length = super().__len__()
        if not length:
            self._someone_puts()
        return length

    def popleft(self) -> int:
        """Return the first; where there is none, somebody puts right after."""
        try:
            return super().popleft()
        except IndexError:
            self._someone_puts()
            raise


@pytest.mark.parametrize("face", ["get", "get_blocking"])
async def test_row_Q7_what_was_put_between_two_looks_of_a_reader_is_not_lost(face: str) -> None:
    """The reader sees an empty queue, then a closed one: what came in between was before the end."""
    handed: HandOff[int] = HandOff()
    handed._items = Between(handed)  # pyright: ignore[reportPrivateUsage] # noqa: SLF001 - the moment itself
    if face == "get":
        assert await handed.get() == 7
        with pytest.raises(EngineDead):
            await handed.get()
    else:
        assert handed.get_blocking(WAIT_S) == 7
        with pytest.raises(EngineDead):
            handed.get_blocking(WAIT_S)
    assert handed.late_total == 0


async def test_every_place_that_became_free_wakes_a_producer() -> None:
    """A listener takes four at once and pauses: all who waited for room get in."""
    queue: HandOff[int] = HandOff(max_items=4)
    got: list[int] = []

    def take(items: list[int]) -> None:
        got.extend(items)
        queue.pause()

    for number in range(4):
        queue.put_nowait(number)
    threads = [threading.Thread(target=queue.put, args=(10 + n, WAIT_S)) for n in range(3)]
    for thread in threads:
        thread.start()
    while vars(queue)["_blocked"] < 3:  # that they wait shows nowhere else
        await asyncio.to_thread(threading.Event().wait, 0.001)
    queue.listen(take, lambda: None)
    async with asyncio.timeout(WAIT_S):
        for thread in threads:
            await asyncio.to_thread(thread.join, WAIT_S)
    assert not any(thread.is_alive() for thread in threads)
    assert got == [0, 1, 2, 3]
    queue.close()
    queue.abandon()
