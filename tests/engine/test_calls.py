"""Collective calls at the client's end: answered in any order, bounded in time, ended with the channel."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING

import msgspec
import pytest

from stretto.engine import RpcResult
from stretto.errors import (
    DeadlineExceeded,
    EngineDead,
    Failure,
    FailureKind,
    InvalidRequest,
    Overloaded,
    ReplicaLost,
)
from stretto.messages import MAX_CALL_BYTES, MAX_CALL_TIMEOUT_S
from stretto.messages import channel as wire
from stretto.types import IncarnationNumber, ReplicaId
from tests.support.fake_orchestrator import TALKER, VOCODER, in_time, wait_until

if TYPE_CHECKING:
    from stretto.engine.channel import Channel
    from tests.support.fake_orchestrator import FakePeer

    Pair = tuple[Channel, FakePeer]

T0 = ReplicaId(TALKER, 0, IncarnationNumber(1))
V0 = ReplicaId(VOCODER, 0, IncarnationNumber(1))


def good(replica: ReplicaId, value: object) -> wire.CallResult:
    """Return a value from a replica."""
    return wire.CallResult(replica, "ok", msgspec.msgpack.encode(value))


async def test_row_M5_answers_find_their_calls_in_any_order(pair: Pair) -> None:
    """Each waits for its own number; what crosses the wire is what was asked."""
    channel, peer = pair
    first = asyncio.ensure_future(channel.call("ping"))
    second = asyncio.ensure_future(
        channel.call("echo", stages=["talker"], arguments={"value": [1, "a"]}, timeout_s=3)
    )
    asked = [await peer.next(wire.Call) for _ in range(2)]
    assert [(call.number, call.method, call.stages) for call in asked] == [
        (1, "ping", ()),
        (2, "echo", (TALKER,)),
    ]
    assert msgspec.msgpack.decode(asked[1].arguments) == {"value": [1, "a"]}
    assert asked[1].timeout_s == 3.0
    assert channel.statistics().waiting_calls == 2
    peer.send(wire.CallAnswered(2, (good(T0, "two"),)), wire.CallAnswered(1, (good(V0, None),)))
    assert await in_time(asyncio.gather(first, second)) == [
        {V0: RpcResult(status="ok")},
        {T0: RpcResult(status="ok", value="two")},
    ]
    assert channel.statistics().waiting_calls == 0


async def test_row_M5_calls_questions_and_requests_have_numbers_of_their_own(pair: Pair) -> None:
    """All of number 1 at the same time, and each gets what is its own."""
    channel, peer = pair
    stream = channel.submit(pipeline="speech", inputs={"text": {"text": "hi"}})
    calling = asyncio.ensure_future(channel.call("ping"))
    asking = asyncio.ensure_future(channel.ask("status"))
    numbers = [(await peer.next(kind)).number for kind in (wire.Submit, wire.Call)]
    assert [*numbers, (await peer.next(wire.Ask)).number] == [1, 1, 1]
    peer.send(wire.CallAnswered(1, (good(T0, "mine"),)), wire.Answer(1, "yours"))
    assert (await in_time(calling))[T0].value == "mine"
    assert await in_time(asking) == "yours"
    assert channel.statistics().open_requests == 1
    await stream.aclose()


async def test_each_replica_has_its_own_outcome(pair: Pair) -> None:
    """One that died does not hide what another has answered."""
    channel, peer = pair
    calling = asyncio.ensure_future(channel.call("ping"))
    await peer.next(wire.Call)
    gone = Failure(kind=FailureKind.REPLICA_LOST, detail="exit 9", where=str(T0))
    peer.send(wire.CallAnswered(1, (wire.CallResult(T0, "died", failure=gone), good(V0, "pong"))))
    results = await in_time(calling)
    assert (results[T0].status, results[V0].value) == ("died", "pong")
    error = results[T0].error
    assert isinstance(error, ReplicaLost)
    assert error.where == str(T0)


async def test_a_call_that_failed_as_a_whole_raises(pair: Pair) -> None:
    """The orchestrator's own words."""
    channel, peer = pair
    calling = asyncio.ensure_future(channel.call("ping"))
    await peer.next(wire.Call)
    full = Failure(kind=FailureKind.OVERLOADED, detail="64 calls wait")
    peer.send(wire.CallAnswered(1, (), full))
    with pytest.raises(Overloaded, match="64 calls"):
        await in_time(calling)


@pytest.mark.parametrize("how", ["crash", "closing", "own"])
async def test_row_M5_and_row_Q9_a_call_ends_with_the_channel(pair: Pair, how: str) -> None:
    """Every waiter gets `EngineDead`, whichever side ends the channel, and so does a later call."""
    channel, peer = pair
    calling = [asyncio.ensure_future(channel.call("ping")) for _ in range(3)]
    for _ in calling:
        await peer.next(wire.Call)
    if how == "own":
        await channel.aclose()
    elif how == "closing":
        peer.send(wire.Closing())
    else:
        peer.crash()
    for each in calling:
        with pytest.raises(EngineDead):
            await in_time(each)
    with pytest.raises(EngineDead):
        await channel.call("ping")
    assert channel.statistics().waiting_calls == 0


async def test_row_M5_an_orchestrator_that_hangs_does_not_hold_a_call(pair: Pair) -> None:
    """`DeadlineExceeded` comes from this side then; the answer, when it comes, is dropped and counted."""
    channel, peer = pair
    with pytest.raises(DeadlineExceeded, match="did not answer"):
        await channel.call("ping", timeout_s=0.001)
    number = (await peer.next(wire.Call)).number
    peer.send(wire.CallAnswered(number, (good(T0, "late"),)))
    await wait_until(lambda: channel.statistics().dropped_late_total == 1)
    assert channel.is_open


@pytest.mark.parametrize("timeout_s", [0, -1, math.nan, math.inf, MAX_CALL_TIMEOUT_S + 1])
async def test_a_strange_time_out_is_refused(pair: Pair, timeout_s: float) -> None:
    """Nothing is sent."""
    channel, _ = pair
    with pytest.raises(InvalidRequest, match="timeout_s"):
        await channel.call("ping", timeout_s=timeout_s)
    assert channel.statistics().waiting_calls == 0


@pytest.mark.parametrize("value", [object(), bytes(MAX_CALL_BYTES), 2**70, "\ud800"])
async def test_arguments_that_cannot_be_sent_are_refused(pair: Pair, value: object) -> None:
    """What msgpack does not know, and too much of it; the next call has the next number."""
    channel, peer = pair
    with pytest.raises(InvalidRequest, match="arguments"):
        await channel.call("echo", arguments={"value": value})
    calling = asyncio.ensure_future(channel.call("ping"))
    assert (await peer.next(wire.Call)).number == 1
    peer.send(wire.CallAnswered(1, ()))
    assert await in_time(calling) == {}


async def test_a_name_that_is_no_text_is_refused(pair: Pair) -> None:
    """Before it meets a socket or a log."""
    channel, _ = pair
    with pytest.raises(InvalidRequest, match="name"):
        await channel.call("\ud800")


@pytest.mark.parametrize("stages", ["talker", []])
async def test_stages_are_a_list_of_names(pair: Pair, stages: object) -> None:
    """A text alone would be a list of letters, and an empty list a call of everything."""
    channel, _ = pair
    with pytest.raises(InvalidRequest, match="stages"):
        await channel.call("ping", stages=stages)  # pyright: ignore[reportArgumentType] - on purpose
