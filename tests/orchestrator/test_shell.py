"""The shell over real sockets: what replicas and API processes say becomes what the router decides."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
import pytest

from stretto.core import events as on
from stretto.core.eventlog import replay
from stretto.core.graph import Limits
from stretto.errors import EngineDead, InternalError, ReplicaLost
from stretto.messages import link
from stretto.transport.codec import encode
from stretto.types import SHARED_MEMORY, ChannelId, PayloadRef, ReplicaId, TaskKey
from tests.orchestrator.world import A, B, World, running, two_stages
from tests.support.fake_replica import FakeLauncher, FakeReplica

if TYPE_CHECKING:
    from pathlib import Path


async def _open_task(world: World, stage: str, incarnation: int = 1) -> tuple[FakeReplica, TaskKey]:
    replica = await world.launcher.get(stage, incarnation=incarnation)
    opened = await replica.wait_for(link.Open)
    return replica, opened[-1].task


async def test_a_chunk_travels_through_both_stages_to_the_client(tmp_path: Path) -> None:
    """The bytes that stage a produced reach stage b, and those of b reach the client, in order."""

    def payload(value: int) -> bytes:
        return b"".join(bytes(buffer) for buffer in encode({"n": value}).buffers)

    async with running(tmp_path) as world:
        stream = world.channel.submit(pipeline="line", inputs={"text": {"text": "hi"}})
        a, task_a = await _open_task(world, "a")
        a.produce(task_a, 0, payload(1))
        b, task_b = await _open_task(world, "b")
        await b.wait_for(link.Feed)
        assert b.bodies[task_b, 0] == payload(1)
        b.produce(task_b, 0, payload(10))
        b.produce(task_b, 1, payload(11))
        a.end(task_a)
        await b.wait_for(link.CloseInput)
        b.end(task_b)
        chunks = [chunk async for chunk in stream]
        assert [chunk.values.get("n") for chunk in chunks if chunk.values] == [10, 11]
        assert stream.timings is not None
        assert [stage.stage for stage in stream.timings.stages] == [A, B]


async def test_all_chunks_of_a_turn_are_one_frame(tmp_path: Path) -> None:
    """Thirty-two chunks in one frame go on to the client in one frame: one write per wake-up."""
    async with running(tmp_path) as world:
        _stream = world.channel.submit(pipeline="line", inputs={"text": {"text": "hi"}})
        a, task_a = await _open_task(world, "a")
        b = await world.launcher.get("b")
        before = b.connection.statistics().frames_in_total if b.connection else 0
        for seq in range(8):
            a.produce(task_a, seq)
        await b.wait_for(link.Feed, 8)
        assert b.connection is not None
        assert b.connection.statistics().frames_in_total - before == 1


async def test_row_E12_a_dead_replica_is_noticed_once_and_replaced(tmp_path: Path) -> None:
    """Link EOF and process exit are one death; the request that had no output is repeated elsewhere."""
    async with running(tmp_path, two_stages(Limits(respawn_min_s=0.01))) as world:
        stream = world.channel.submit(pipeline="line", inputs={"text": {"text": "hi"}})
        a, task_a = await _open_task(world, "a")
        a.die()
        world.launcher.exit(a.replica, "killed by SIGKILL")
        successor, again = await _open_task(world, "a", incarnation=2)
        assert again == task_a._replace(attempt=1)
        assert world.launcher.stopped == [a.replica]
        assert world.orchestrator.statistics().counters.replica_deaths == 1
        successor.end(again)
        b, task_b = await _open_task(world, "b")
        b.end(task_b)
        assert [chunk async for chunk in stream if chunk.values] == []


async def test_a_death_after_output_is_one_typed_error(tmp_path: Path) -> None:
    """A client that has heard something gets `ReplicaLost` with the replica's name."""
    async with running(tmp_path) as world:
        stream = world.channel.submit(pipeline="line", inputs={"text": {"text": "hi"}})
        a, task_a = await _open_task(world, "a")
        a.produce(task_a, 0)
        await _open_task(world, "b")
        a.die()
        with pytest.raises(ReplicaLost, match="a/0#1"):
            _ = [chunk async for chunk in stream]


@pytest.mark.parametrize(
    "wrong",
    [
        "seq",
        "unknown task",
        "ready twice",
        "foreign file",
        "hello twice",
        "no slots",
    ],
)
async def test_row_E15_a_replica_that_breaks_the_protocol_is_evicted(
    tmp_path: Path, wrong: str
) -> None:
    """A bad message costs its sender its place; the engine and the other stage go on."""
    launcher = FakeLauncher(autoready=wrong != "no slots")
    async with running(tmp_path, launcher=launcher) as world:
        a = await launcher.get("a")
        if wrong == "no slots":
            a.hello()
            a.ready(slots=0)
        else:
            _stream = world.channel.submit(pipeline="line", inputs={"text": {"text": "hi"}})
            _, task = await _open_task(world, "a")
            stranger = task._replace(attempt=7)
            file = PayloadRef(SHARED_MEMORY, "b-0-1.1", 100_000)
            {
                "seq": lambda: a.produce(task, 5),
                "unknown task": lambda: a.produce(stranger, 0),
                "ready twice": a.ready,
                "foreign file": lambda: a.send(link.Produced(task, 0, file, 0, 1, "data", 0.0)),
                "hello twice": a.hello,
            }[wrong]()
        await a.wait_closed()
        await launcher.get("a", incarnation=2)
        assert world.channel.is_open


async def test_a_stranger_with_the_wrong_nonce_is_refused(tmp_path: Path) -> None:
    """A process that was not started for a place can't take it."""
    launcher = FakeLauncher(autoready=False)
    async with running(tmp_path, launcher=launcher):
        a = await launcher.get("a")
        a.hello(nonce="guessed")
        await a.wait_closed()


async def test_situation_E7_a_flood_on_one_link_does_not_starve_another(tmp_path: Path) -> None:
    """One turn takes at most 64 events of a link, so the other link's single chunk is not last."""
    order: list[str] = []
    all_seen = asyncio.Event()
    async with running(tmp_path) as world:
        dispatcher = world.orchestrator.dispatcher
        flood, quiet = dispatcher.inbox(), dispatcher.inbox()

        class Recorder:
            def observe(self, event: object, commands: object, error: str | None = None) -> None:
                if isinstance(event, on.PayloadDone):
                    order.append(str(event.holder))
                if len(order) == 1001:
                    all_seen.set()

            def flush(self) -> None:
                pass

        dispatcher.add_observer(Recorder())
        ref = PayloadRef(SHARED_MEMORY, "x", 1)
        for _ in range(1000):
            dispatcher.post(on.PayloadDone(now=0, holder=ChannelId("flood"), payload=ref), flood)
        dispatcher.post(on.PayloadDone(now=0, holder=ChannelId("quiet"), payload=ref), quiet)
        async with asyncio.timeout(5):
            await all_seen.wait()
        assert order.index("quiet") == 64


async def test_shutdown_says_closing_to_every_channel(tmp_path: Path) -> None:
    """A shutdown that was asked for is no crash: streams end with `EngineDead`, replicas are stopped."""
    async with running(tmp_path, two_stages(Limits())) as world:
        second = await world.connect()
        a = await world.launcher.get("a")
        world.orchestrator.shut_down()
        async with asyncio.timeout(5):
            assert await world.ended == 0
            assert "shut down" in str(await world.channel.closed)
            assert "shut down" in str(await second.closed)
        await a.wait_closed()
        assert set(world.launcher.stopped) == {ReplicaId(A, 0, a.replica.incarnation), (B, 0, 1)}


async def test_row_E15_a_crash_of_the_router_is_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unknown error out of the router ends the engine: one fatal message, then closed (row Q4)."""
    async with running(tmp_path) as world:
        stream = world.channel.submit(pipeline="line", inputs={"text": {"text": "hi"}})
        a, task = await _open_task(world, "a")
        monkeypatch.setattr(world.orchestrator.dispatcher.router, "handle", _raise_runtime_error)
        a.produce(task, 0)
        with pytest.raises(EngineDead, match="crashed: no idea"):
            _ = [chunk async for chunk in stream]
        async with asyncio.timeout(5):
            assert await world.ended == 1


def _raise_runtime_error(_: object) -> None:
    raise RuntimeError("no idea")


async def test_row_E15_an_invalid_transition_breaks_one_request_only(tmp_path: Path) -> None:
    """A message that the router refuses fails the request it names; the next one works."""
    async with running(tmp_path) as world:
        stream = world.channel.submit(pipeline="line", inputs={"text": {"text": "hi"}})
        a, task = await _open_task(world, "a")
        edge = (await a.wait_for(link.Feed))[0].edge
        a.send(link.Consumed(task, edge, 99))
        with pytest.raises(InternalError, match="bug in Stretto"):
            _ = [chunk async for chunk in stream]
        assert world.channel.is_open


async def test_the_event_log_replays(tmp_path: Path) -> None:
    """The log of a life gives the same commands again, and holds no text of the user's."""
    log = tmp_path / "events.jsonl"
    settings = two_stages()
    settings = msgspec.structs.replace(
        settings, orchestrator=msgspec.structs.replace(settings.orchestrator, event_log=str(log))
    )
    async with running(tmp_path, settings) as world:
        _stream = world.channel.submit(pipeline="line", inputs={"text": {"text": "a secret"}})
        a, task = await _open_task(world, "a")
        a.produce(task, 0, b"a secret too")
        await _open_task(world, "b")
    lines = log.read_bytes().splitlines(keepends=True)
    _, divergence = replay(lines)
    assert divergence is None
    assert len(lines) > 10
    assert b"secret" not in log.read_bytes()
