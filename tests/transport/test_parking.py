"""Where a task waits: it runs on at once, a cancellation reaches it, and nothing wakes it twice."""

from __future__ import annotations

import asyncio
import contextvars
from asyncio import tasks
from typing import TYPE_CHECKING, Any

import pytest
import uvloop

from stretto.transport.parking import Parking

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    MakeTask = Callable[[Coroutine[Any, Any, str]], asyncio.Task[str]]

NAME: contextvars.ContextVar[str] = contextvars.ContextVar("NAME", default="nobody")


def in_c(coroutine: Coroutine[Any, Any, str]) -> asyncio.Task[str]:
    """Make a task of the interpreter's fast kind."""
    return asyncio.Task(coroutine)


def in_python(coroutine: Coroutine[Any, Any, str]) -> asyncio.Task[str]:
    """Make a task of the kind that debuggers and other interpreters use."""
    make: MakeTask = vars(tasks)["_PyTask"]
    return make(coroutine)


@pytest.fixture(params=[in_c, in_python])
def make_task(request: pytest.FixtureRequest) -> MakeTask:
    """Both kinds of task that a loop can run."""
    return request.param


async def turn() -> None:
    """Let everything that is due on the loop happen, outside this task."""
    done = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(done.set_result, None)
    await done


async def released(parking: Parking) -> list[str]:
    """Release from a callback; return what had happened before the callback returned."""
    seen: list[str] = []

    def release() -> None:
        parking.release()
        seen.extend(EVENTS)

    asyncio.get_running_loop().call_soon(release)
    await turn()
    return seen


EVENTS: list[str] = []


async def waits(parking: Parking) -> str:
    """Wait, and tell how it ended, and in whose context."""
    NAME.set("the reader")
    try:
        await parking
    except asyncio.CancelledError:
        EVENTS.append("cancelled")
        raise
    EVENTS.append(NAME.get())
    return "done"


@pytest.fixture(autouse=True)
def _no_events() -> None:
    EVENTS.clear()


async def test_a_released_task_runs_before_the_callback_returns(make_task: MakeTask) -> None:
    """That is its reason to exist; its context is its own, and it runs once."""
    parking = Parking(asyncio.get_running_loop())
    task = make_task(waits(parking))
    await turn()
    assert not parking.done()
    assert await released(parking) == ["the reader"]
    assert await released(parking) == ["the reader"]
    assert parking.done()
    assert await task == "done"
    assert NAME.get() == "nobody"


async def test_a_cancelled_task_is_not_released(make_task: MakeTask) -> None:
    """Whoever would release it gives nothing away."""
    parking = Parking(asyncio.get_running_loop())
    task = make_task(waits(parking))
    await turn()
    task.cancel()
    parking.release()
    assert EVENTS == []
    await asyncio.wait([task])
    assert task.cancelled()
    assert EVENTS == ["cancelled"]
    assert not parking.cancel()


async def test_a_task_that_is_not_there_yet_is_left_alone() -> None:
    """Releasing an empty place does nothing; who comes later waits."""
    parking = Parking(asyncio.get_running_loop())
    parking.release()
    assert not parking.cancel()
    task = in_c(waits(parking))
    await turn()
    assert not task.done()
    await released(parking)
    assert await task == "done"


async def test_a_deadline_ends_a_wait(make_task: MakeTask) -> None:
    """`asyncio.timeout` cancels what waits here like any other task."""

    async def with_deadline() -> str:
        try:
            async with asyncio.timeout(0):
                await Parking(asyncio.get_running_loop())
        except TimeoutError:
            return "too late"
        return "not too late"

    assert await make_task(with_deadline()) == "too late"


def test_it_works_on_uvloop() -> None:
    """The loop that production uses."""

    async def main() -> None:
        parking = Parking(asyncio.get_running_loop())
        task = in_c(waits(parking))
        await turn()
        assert await released(parking) == ["the reader"]
        assert await task == "done"

    uvloop.run(main())
