"""Questions to the orchestrator: answered in any order, bounded, and ended with the channel."""

from __future__ import annotations

import asyncio

import pytest

from stretto.engine.channel import MAX_ASKS, Channel
from stretto.errors import (
    DeadlineExceeded,
    EngineDead,
    Failure,
    FailureKind,
    InvalidRequest,
    Overloaded,
)
from stretto.messages import channel as wire
from tests.support.fake_orchestrator import FakePeer, in_time, wait_until

Pair = tuple[Channel, FakePeer]


async def test_answers_find_their_questions_in_any_order(pair: Pair) -> None:
    """Each waits for its own number."""
    channel, peer = pair
    first = asyncio.ensure_future(channel.ask("status"))
    second = asyncio.ensure_future(channel.ask("story", "mine"))
    asked = [await peer.next(wire.Ask) for _ in range(2)]
    assert [(ask.topic, ask.argument) for ask in asked] == [("status", ""), ("story", "mine")]
    peer.send(wire.Answer(asked[1].number, "two"), wire.Answer(asked[0].number, "one"))
    assert await in_time(asyncio.gather(first, second)) == ["one", "two"]
    assert channel.statistics().waiting_asks == 0


async def test_a_question_without_an_answer_fails_with_its_reason(pair: Pair) -> None:
    """The orchestrator's own words."""
    channel, peer = pair
    asking = asyncio.ensure_future(channel.ask("story", "nobody"))
    number = (await peer.next(wire.Ask)).number
    failure = Failure(kind=FailureKind.INVALID_REQUEST, detail="no request 'nobody'")
    peer.send(wire.Answer(number, "", failure))
    with pytest.raises(InvalidRequest, match="nobody"):
        await in_time(asking)


@pytest.mark.parametrize("how", ["crash", "closing", "own"])
async def test_row_Q9_a_question_ends_with_the_channel(pair: Pair, how: str) -> None:
    """With `EngineDead`, in the turn in which the channel ends, whichever side ends it."""
    channel, peer = pair
    asking = [asyncio.ensure_future(channel.ask("status")) for _ in range(3)]
    for _ in asking:
        await peer.next(wire.Ask)
    if how == "own":
        await channel.aclose()
    elif how == "closing":
        peer.send(wire.Closing())
    else:
        peer.crash()
    for each in asking:
        with pytest.raises(EngineDead):
            await in_time(each)
    with pytest.raises(EngineDead):
        await channel.ask("status")


async def test_a_late_answer_is_dropped_and_counted(pair: Pair) -> None:
    """Whoever asked has gone on."""
    channel, peer = pair
    with pytest.raises(DeadlineExceeded):
        await channel.ask("metrics", timeout_s=0.001)
    number = (await peer.next(wire.Ask)).number
    peer.send(wire.Answer(number, "late"))
    await wait_until(lambda: channel.statistics().dropped_late_total == 1)
    assert channel.is_open


async def test_questions_are_bounded(pair: Pair) -> None:
    """One too many is refused at once; the others are not disturbed."""
    channel, peer = pair
    asking = [asyncio.ensure_future(channel.ask("status")) for _ in range(MAX_ASKS)]
    await peer.next(wire.Ask)
    with pytest.raises(Overloaded):
        await channel.ask("status")
    await channel.aclose()
    results = await asyncio.gather(*asking, return_exceptions=True)
    assert {type(result) for result in results} == {EngineDead}


async def test_reports_travel_without_an_answer(pair: Pair) -> None:
    """For the metrics."""
    channel, peer = pair
    message = wire.HttpDone("/v1/audio/speech", 200, 0.5, 0.06)
    channel.report(message)
    assert await peer.next(wire.HttpDone) == message
