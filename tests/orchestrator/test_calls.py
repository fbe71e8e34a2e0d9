"""Calls through the shell, over real sockets: what is asked reaches replicas, what they say the caller."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import msgspec
import pytest

from stretto.engine import RpcResult
from stretto.errors import DeadlineExceeded, EngineDead, StageError
from stretto.messages import MAX_CALL_BYTES, PROTOCOL_VERSION, link
from stretto.messages import channel as wire
from stretto.transport.connection import Connection, connect_unix
from stretto.types import CallId
from tests.orchestrator.world import running

if TYPE_CHECKING:
    from pathlib import Path

CALL = CallId("1.1-call-1")


async def test_a_call_reaches_the_replicas_and_their_answers_the_caller(tmp_path: Path) -> None:
    """Arguments and results travel as they are; a request goes on beside them."""
    async with running(tmp_path) as world:
        a, b = await world.launcher.get("a"), await world.launcher.get("b")
        calling = asyncio.ensure_future(world.channel.call("look", arguments={"at": 1}))
        (call,) = await a.wait_for(link.Call)
        assert call == link.Call(CALL, "look", "control", b"\x81\xa2at\x01")
        stream = world.channel.submit(pipeline="line", inputs={"text": {"text": "hi"}})
        await a.wait_for(link.Open)
        await b.wait_for(link.Call)
        a.send(link.CallAnswered(call.call, b"\x01"))
        b.send(link.CallAnswered(call.call, b"", StageError("no").failure("b")))
        results = await calling
        assert results[a.replica] == RpcResult(status="ok", value=1)
        assert (results[b.replica].status, str(results[b.replica].error)) == ("error", "no")
        await stream.aclose()


async def test_row_M5_late_answers_of_replicas_are_dropped(tmp_path: Path) -> None:
    """The caller has had its `DeadlineExceeded`; the replica did nothing wrong."""
    async with running(tmp_path) as world:
        a = await world.launcher.get("a")
        with pytest.raises(DeadlineExceeded, match="a/0#1"):
            await world.channel.call("look", stages=["a"], timeout_s=0.01)
        (call,) = await a.wait_for(link.Call)
        a.send(link.CallAnswered(call.call, b"\x01"))
        calling = asyncio.ensure_future(world.channel.call("look", stages=["a"]))
        _, again = await a.wait_for(link.Call, 2)
        a.send(link.CallAnswered(again.call, b"\x02"))
        assert (await calling)[a.replica].value == 2
        assert world.orchestrator.statistics().counters.late == 1
        assert world.orchestrator.statistics().counters.replica_deaths == 0


@pytest.mark.parametrize(
    "answer",
    [
        link.CallAnswered(CallId("1.1-call-7"), b"\x01"),
        link.CallAnswered(CALL, bytes(MAX_CALL_BYTES + 1)),
    ],
    ids=["unknown", "too large"],
)
async def test_a_replica_that_answers_what_it_must_not_is_replaced(
    tmp_path: Path, answer: link.CallAnswered
) -> None:
    """The caller hears that it died."""
    async with running(tmp_path) as world:
        a = await world.launcher.get("a")
        calling = asyncio.ensure_future(world.channel.call("look", stages=["a"]))
        await a.wait_for(link.Call)
        a.send(answer)
        assert (await calling)[a.replica].status == "died"


@pytest.mark.parametrize(
    "call",
    [
        wire.Call(0, "look", (), b"\x80", 1.0),
        wire.Call(1, "look", (), bytes(MAX_CALL_BYTES + 1), 1.0),
        wire.Call(1, "look", (), b"\x80", 0.0),
        wire.Call(1, "look", (), b"\x80", float("nan")),
    ],
    ids=["number", "arguments", "no time", "no number"],
)
async def test_an_api_process_that_calls_wrongly_is_hung_up_on(
    tmp_path: Path, call: wire.Call
) -> None:
    """The protocol is broken; others are not disturbed."""
    async with running(tmp_path) as world:
        await world.launcher.get("a")
        closed = asyncio.Event()

        def on_frame(_: object, __: object, ___: object) -> None:
            """Hear nothing."""

        def on_closed(_: object, __: str) -> None:
            closed.set()

        decoder = msgspec.msgpack.Decoder(list[wire.Down])
        second: Connection[wire.Down] = await connect_unix(
            world.channel_path, lambda: Connection(decoder, on_frame, on_closed)
        )
        second.send(wire.Hello(PROTOCOL_VERSION, world.run, os.getpid(), "second"))
        second.send(call)
        async with asyncio.timeout(5):
            await closed.wait()
        assert world.channel.is_open


async def test_row_M5_a_crash_of_the_orchestrator_ends_every_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`EngineDead` at every waiter."""
    async with running(tmp_path) as world:
        a = await world.launcher.get("a")
        calling = [asyncio.ensure_future(world.channel.call("look")) for _ in range(2)]
        await a.wait_for(link.Call, 2)
        router = world.orchestrator.dispatcher.router

        def break_down(_: object) -> None:
            raise RuntimeError("a bug")

        monkeypatch.setattr(router, "handle", break_down)
        a.send(link.CallAnswered(CALL, b"\x01"))
        for each in calling:
            with pytest.raises(EngineDead, match="a bug"):
                await each
