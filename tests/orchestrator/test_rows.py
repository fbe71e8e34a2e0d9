"""Rows of the contract that concern links, over real sockets."""

from __future__ import annotations

import asyncio
import logging
import math
from typing import TYPE_CHECKING

import pytest

from stretto.core import events as on
from stretto.core.graph import Limits
from stretto.messages import link
from stretto.orchestrator import links
from stretto.types import SHARED_MEMORY, ChannelId, PayloadRef
from tests.orchestrator.world import B, World, running, two_stages
from tests.support.fake_replica import FakeReplica

if TYPE_CHECKING:
    from pathlib import Path

    from stretto.core.commands import ReplicaState
    from stretto.types import TaskKey

QUICK = Limits(respawn_min_s=0.01)


async def opened(world: World, stage: str, incarnation: int = 1) -> tuple[FakeReplica, TaskKey]:
    """Wait until a stage has got a task; return who got it, and the task."""
    replica = await world.launcher.get(stage, incarnation=incarnation)
    return replica, (await replica.wait_for(link.Open))[-1].task


async def settled() -> None:
    """Let everything that is due on the loop happen."""
    loop = asyncio.get_running_loop()
    for _ in range(20):
        turn = loop.create_future()
        loop.call_soon(turn.set_result, None)
        await turn


async def test_row_E5_an_evicted_replica_is_written_to_no_more(tmp_path: Path) -> None:
    """Its connection is closed, so what it still says reaches nobody."""
    async with running(tmp_path, two_stages(QUICK)) as world:
        _stream = world.channel.submit(pipeline="line", inputs={"text": {"text": "hi"}})
        a, task = await opened(world, "a")
        world.launcher.exit(a.replica, "killed")
        await world.launcher.get("a", incarnation=2)
        await a.wait_closed()
        heard = len(a.received)
        a.produce(task, 0)
        await (await world.launcher.get("a", incarnation=2)).wait_for(link.Open)
        assert len(a.received) == heard
        assert world.orchestrator.statistics().counters.replica_deaths == 1


async def test_row_E6_events_are_handled_one_by_one_in_order(tmp_path: Path) -> None:
    """What comes up while one is handled waits behind what is there already."""
    async with running(tmp_path) as world:
        dispatcher = world.orchestrator.dispatcher
        first, second = dispatcher.inbox(), dispatcher.inbox()
        order: list[str] = []
        depth = 0
        all_seen = asyncio.Event()

        def done(name: str) -> on.PayloadDone:
            ref = PayloadRef(SHARED_MEMORY, "x", 1)
            return on.PayloadDone(now=0, holder=ChannelId(name), payload=ref)

        class Recorder:
            def observe(self, event: object, commands: object, error: str | None = None) -> None:
                nonlocal depth
                if not isinstance(event, on.PayloadDone):
                    return
                depth += 1
                order.append(str(event.holder))
                if event.holder == "f0":
                    dispatcher.post(done("came up"), first)
                    assert order == ["f0"], "handled inside another one"
                depth -= 1
                assert depth == 0
                if len(order) == 203:
                    all_seen.set()

            def flush(self) -> None:
                pass

        dispatcher.add_observer(Recorder())
        for number in range(101):
            dispatcher.post(done(f"f{number}"), first)
            dispatcher.post(done(f"s{number}"), second)
        async with asyncio.timeout(5):
            await all_seen.wait()
        assert [name for name in order if name[0] == "f"] == [f"f{n}" for n in range(101)]
        assert [name for name in order if name[0] == "s"] == [f"s{n}" for n in range(101)]
        assert order[:65] == [f"f{n}" for n in range(64)] + ["s0"]
        assert order[-1] != "came up"


@pytest.mark.parametrize("error", [RuntimeError("no idea"), MemoryError(), RecursionError()])
async def test_row_E15_and_row_E19_any_exception_on_a_link_costs_that_replica_only(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    """It is logged with stage, slot and incarnation; the request is repeated elsewhere."""
    async with running(tmp_path, two_stages(QUICK)) as world:
        _stream = world.channel.submit(pipeline="line", inputs={"text": {"text": "hi"}})
        a, task = await opened(world, "a")

        def broken(*_: object) -> None:
            monkeypatch.undo()
            raise error

        monkeypatch.setattr(links.Links, "_event", broken)
        with caplog.at_level(logging.ERROR):
            a.produce(task, 0)
            _, again = await opened(world, "a", incarnation=2)
        assert again.attempt == 1
        assert "a/0#1" in caplog.text
        assert world.channel.is_open
        assert world.orchestrator.statistics().counters.replica_deaths == 1


async def test_row_E19_cancellation_is_no_failure_of_a_replica(tmp_path: Path) -> None:
    """Whoever cancels the orchestrator hears that; no replica is said to have died."""
    told: list[ReplicaState] = []

    async def cancel() -> None:
        async with running(tmp_path) as world:
            await opened_idle(world)
            world.channel.subscribe(told.append)
            world.ended.cancel()
            await asyncio.wait([world.ended])
            assert world.orchestrator.statistics().counters.replica_deaths == 0
            assert [state for state in told if state.state == "dead"] == []

    with pytest.raises(asyncio.CancelledError):
        await cancel()


async def opened_idle(world: World) -> None:
    """Wait until both stages are ready."""
    await world.launcher.get("a")
    await world.launcher.get("b")
    await world.channel.wait_ready()


async def test_row_E18_nothing_is_left_of_replicas_that_went(tmp_path: Path) -> None:
    """Thirty deaths: as many tasks on the loop as before, in debug mode without a warning."""
    asyncio.get_running_loop().set_debug(True)
    limits = Limits(respawn_min_s=0.001, respawn_max_s=0.001, breaker_deaths=1000)
    async with running(tmp_path, two_stages(limits)) as world:
        await opened_idle(world)
        await settled()
        before = len(asyncio.all_tasks())
        for incarnation in range(1, 31):
            b = await world.launcher.get("b", incarnation=incarnation)
            b.die()
            world.launcher.exit(b.replica, "gone")
            await world.launcher.get("b", incarnation=incarnation + 1)
            del world.launcher.replicas[b.replica]
        await settled()
        assert len(asyncio.all_tasks()) == before


async def test_row_E20_shutting_down_wakes_a_sleeping_engine(tmp_path: Path) -> None:
    """It has no timer that could; it ends within turns of the loop, not after one."""
    async with running(tmp_path) as world:
        await opened_idle(world)
        assert world.orchestrator.dispatcher.router.next_deadline() is None
        world.orchestrator.shut_down()
        async with asyncio.timeout(2):
            assert await world.ended == 0


async def test_row_M9_notices_come_in_order_and_a_loss_once(tmp_path: Path) -> None:
    """Stage, slot and incarnation of each; the death of one is told once, then its successor's life."""
    async with running(tmp_path, two_stages(QUICK)) as world:
        told: list[tuple[int, str]] = []
        is_back = asyncio.Event()

        def note(state: ReplicaState) -> None:
            if state.replica.stage == B:
                told.append((state.replica.incarnation, state.state))
                if told[-1] == (2, "ready"):
                    is_back.set()

        await opened_idle(world)
        await settled()
        world.channel.subscribe(note)
        b = await world.launcher.get("b")
        world.launcher.exit(b.replica, "gone")
        b.die()
        async with asyncio.timeout(5):
            await is_back.wait()
        assert told == [(1, "dead"), (2, "starting"), (2, "loading"), (2, "ready")]


async def test_row_E8_what_holds_nothing_is_dropped_and_what_holds_anything_is_not(
    tmp_path: Path,
) -> None:
    """Statistics alone and an end alone are handled; an empty frame wakes nobody."""
    async with running(tmp_path) as world:
        seen: list[str] = []
        has_ended = asyncio.Event()

        class Recorder:
            def observe(self, event: object, commands: object, error: str | None = None) -> None:
                seen.append(type(event).__name__)
                if isinstance(event, on.TaskFinished):
                    has_ended.set()

            def flush(self) -> None:
                pass

        _stream = world.channel.submit(pipeline="line", inputs={"text": {"text": "hi"}})
        a, task = await opened(world, "a")
        await settled()
        world.orchestrator.dispatcher.add_observer(Recorder())
        assert a.connection is not None
        a.connection.flush()
        await settled()
        assert seen == []
        a.send(link.Reported(1, 3, {"kv_use": 0.5}))
        a.connection.flush()
        a.end(task)
        async with asyncio.timeout(5):
            await has_ended.wait()
        assert seen == ["StatsReported", "TaskFinished"]
        (reported,) = world.orchestrator.statistics().stages[0].reported
        assert (reported.running, reported.waiting, reported.values) == (1, 3, {"kv_use": 0.5})


async def test_row_E8_a_metric_that_is_no_number_costs_its_replica(tmp_path: Path) -> None:
    """The event log could not say it."""
    async with running(tmp_path, two_stages(QUICK)) as world:
        a = await world.launcher.get("a")
        a.send(link.Reported(0, 0, {"x": math.nan}))
        await world.launcher.get("a", incarnation=2)


async def test_row_E8_too_many_metrics_cost_their_replica(tmp_path: Path) -> None:
    """A label of the metrics is memory for ever, so their number is bounded."""
    async with running(tmp_path, two_stages(QUICK)) as world:
        a = await world.launcher.get("a")
        a.send(link.Reported(0, 0, {str(number): 0.0 for number in range(33)}))
        await world.launcher.get("a", incarnation=2)


async def test_situation_N6_a_second_process_of_the_same_identity_is_refused(
    tmp_path: Path,
) -> None:
    """It knows the nonce, but its place is taken; the first one goes on."""
    async with running(tmp_path) as world:
        _stream = world.channel.submit(pipeline="line", inputs={"text": {"text": "hi"}})
        a, task = await opened(world, "a")
        double = FakeReplica(a.spec)
        await double.connect()
        double.hello()
        await double.wait_closed()
        a.produce(task, 0)
        await opened(world, "b")
        assert world.orchestrator.statistics().counters.replica_deaths == 0
