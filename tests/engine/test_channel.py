"""The client's end of the channel against a real socket: rows Q of the contract."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import TYPE_CHECKING

import pytest

from stretto.engine.channel import ABSENT, CLOSED, CRASHED, Channel
from stretto.errors import (
    Cancelled,
    EngineDead,
    Failure,
    FailureKind,
    InvalidRequest,
    Overloaded,
    PayloadLost,
    ReplicaLost,
    StageError,
    StartFailed,
)
from stretto.messages import PROTOCOL_VERSION
from stretto.messages import channel as wire
from stretto.transport import codec
from stretto.transport.payload_store import PayloadWriter
from stretto.types import RequestId
from tests.engine.conftest import RUN
from tests.support.fake_orchestrator import (
    AUDIO,
    TALKER,
    TIMINGS,
    VOCODER,
    WAIT_S,
    FakeOrchestrator,
    FakePeer,
    replica,
    wait_until,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable
    from pathlib import Path

    from stretto.engine.stream import OutputChunk, Stream

Pair = tuple[Channel, FakePeer]


async def submit(pair: Pair) -> tuple[Stream, int]:
    """Submit a request and wait until the other end has it."""
    channel, peer = pair
    stream = channel.submit(
        pipeline="speech", inputs={"text": {"text": "Hello"}}, outputs=("audio",)
    )
    message = await peer.next(wire.Submit)
    return stream, message.number


async def read(stream: Stream) -> OutputChunk:
    """Read one chunk, with a bound."""
    async with asyncio.timeout(WAIT_S):
        return await anext(stream)


def no_open_requests(channel: Channel) -> bool:
    """Say whether nothing is left of any request."""
    counters = channel.statistics()
    return (counters.open_requests, counters.abandoned_requests, counters.waiting_aborts) == (
        0,
        0,
        0,
    )


async def test_a_request_goes_out_and_its_chunks_come_back_in_order(pair: Pair) -> None:
    """Inputs and options travel in the body, chunks carry values and facts, and the end has timings."""
    channel, peer = pair
    stream = channel.submit(
        pipeline="speech",
        inputs={"text": {"text": "Hello"}},
        outputs=("audio",),
        options={"seed": 7},
        timeout_s=9.0,
        label="mine",
    )
    sent = await peer.next(wire.Submit)
    split = sent.inputs[0][1].size_bytes
    assert codec.decode(peer.bodies[1][:split]) == {"text": "Hello"}
    assert codec.decode(peer.bodies[1][split:]) == {"seed": 7}
    assert (sent.pipeline, sent.outputs, sent.timeout_s, sent.label) == (
        "speech",
        ("audio",),
        9.0,
        "mine",
    )
    assert stream.request == "1.1-1"

    for seq in range(3):
        peer.output(1, seq, {"audio": bytes([seq, 0])})
    peer.output(1, 3)
    peer.finish(1)
    chunks = [chunk async for chunk in stream]
    assert [chunk.values.get("audio") for chunk in chunks] == [b"\0\0", b"\1\0", b"\2\0", None]
    assert [chunk.final for chunk in chunks] == [False, False, False, True]
    assert chunks[0].timings == TIMINGS
    assert stream.timings == TIMINGS
    assert no_open_requests(channel)
    with pytest.raises(StopAsyncIteration):
        await read(stream)


async def test_row_Q3_a_read_parks_until_there_is_news(pair: Pair) -> None:
    """A read of an empty stream waits without spinning and returns what comes, never `None`."""
    stream, number = await submit(pair)
    reading = asyncio.ensure_future(anext(stream))
    await wait_until(lambda: isinstance(pair[1].received[-1], wire.Submit))
    assert not reading.done()
    pair[1].output(number, 0, {"audio": b"ab"})
    async with asyncio.timeout(WAIT_S):
        assert (await reading).values == {"audio": b"ab"}


async def test_row_Q4_a_crash_delivers_outputs_then_the_fatal_message(pair: Pair) -> None:
    """After `Fatal`, what was sent before is read first, and every open stream ends in the same turn."""
    channel, peer = pair
    first, number = await submit(pair)
    second, _ = await submit(pair)
    peer.output(number, 0, {"audio": b"ab"})
    peer.send(
        wire.Fatal(Failure(kind=FailureKind.INTERNAL_ERROR, detail="router broke")), wire.Closing()
    )
    with pytest.raises(EngineDead, match="router broke"):
        await read(second)
    assert (await read(first)).values == {"audio": b"ab"}
    with pytest.raises(EngineDead, match="router broke"):
        await read(first)
    assert no_open_requests(channel)


async def test_row_Q5_a_killed_orchestrator_delivers_complete_frames_and_this_side_says_so(
    pair: Pair,
) -> None:
    """An end without notice is a crash: chunks first, then one `EngineDead` made by this side."""
    channel, peer = pair
    stream, number = await submit(pair)
    peer.output(number, 0, {"audio": b"ab"})
    peer.crash()
    death = await channel.closed
    assert death.code == CRASHED
    assert (await read(stream)).values == {"audio": b"ab"}
    with pytest.raises(EngineDead, match="without notice"):
        await read(stream)


async def test_row_Q6_a_clean_end_is_not_called_a_crash(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    """`Closing` without `Fatal` wakes the reader with `EngineDead` and logs nothing."""
    channel, peer = pair
    stream, _ = await submit(pair)
    reading = asyncio.ensure_future(anext(stream))
    peer.send(wire.Closing())
    peer.connection.close()
    with pytest.raises(EngineDead, match="shut down"):
        await reading
    assert (await channel.closed).code == CLOSED
    assert not caplog.records


async def test_row_Q7_queued_chunks_stay_readable_after_the_end(pair: Pair) -> None:
    """The end is the last thing that is read, however early it arrived."""
    channel, peer = pair
    stream, number = await submit(pair)
    for seq in range(20):
        peer.output(number, seq, {"audio": b"ab"})
    peer.send(wire.Closing())
    await channel.closed
    for seq in range(20):
        assert (await read(stream)).seq == seq
    with pytest.raises(EngineDead):
        await read(stream)


async def test_row_Q9_every_later_read_raises_the_same_type(pair: Pair) -> None:
    """A dead stream raises `EngineDead` at each read, and never looks like a good end."""
    stream, _ = await submit(pair)
    pair[1].crash()
    for _ in range(3):
        with pytest.raises(EngineDead):
            await read(stream)


async def test_row_Q9_an_abort_that_waits_for_its_answer_gets_engine_dead(pair: Pair) -> None:
    """Death ends whoever waits for an acknowledgement."""
    stream, _ = await submit(pair)
    aborting = asyncio.ensure_future(pair[0].abort(stream.request))
    await pair[1].next(wire.Abort)
    pair[1].crash()
    with pytest.raises(EngineDead):
        await aborting
    assert no_open_requests(pair[0])


async def test_situation_A7_death_is_latched_for_later_requests(pair: Pair) -> None:
    """After the end, submit and abort fail at once."""
    channel, peer = pair
    peer.crash()
    await channel.closed
    for _ in range(10):
        with pytest.raises(EngineDead):
            channel.submit(pipeline="speech", inputs={})
    with pytest.raises(EngineDead):
        await channel.abort(RequestId("1.1-1"))
    with pytest.raises(EngineDead):
        await channel.wait_ready()


async def test_row_Q12_a_failure_with_a_number_ends_that_request_only(pair: Pair) -> None:
    """One request's failure leaves its neighbour running."""
    first, number = await submit(pair)
    second, other = await submit(pair)
    pair[1].fail(number, Failure(kind=FailureKind.STAGE_ERROR, detail="broke", where="talker"))
    pair[1].output(other, 0, {"audio": b"ab"})
    with pytest.raises(StageError, match="broke") as caught:
        await read(first)
    assert caught.value.where == "talker"
    assert (await read(second)).seq == 0


async def test_row_Q12_unknown_numbers_are_counted_and_dropped(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    """Messages about requests that nobody knows change nothing but a counter."""
    channel, peer = pair
    peer.output(99, 0, {"audio": b"ab"})
    peer.finish(98)
    peer.send(wire.AbortAcknowledged(97, stopped=False))
    await wait_until(lambda: channel.statistics().dropped_unknown_total == 3)
    assert not caplog.records
    assert channel.is_open


async def test_row_Q13_whatever_breaks_the_channel_ends_every_wait(pair: Pair) -> None:
    """A message that can't be understood closes the channel; reads and aborts get `EngineDead`."""
    channel, peer = pair
    first, _ = await submit(pair)
    second, _ = await submit(pair)
    waits: list[Awaitable[object]] = [
        asyncio.ensure_future(read(first)),
        asyncio.ensure_future(read(second)),
        asyncio.ensure_future(channel.abort(second.request)),
    ]
    await peer.next(wire.Abort)
    peer.connection.send(wire.Hello(PROTOCOL_VERSION, RUN, 0, "an answer that is none"))
    found = await asyncio.gather(*waits, return_exceptions=True)
    assert [type(each) for each in found] == [EngineDead] * 3
    assert no_open_requests(channel)


async def test_row_Q14_what_is_sent_after_the_end_is_swallowed(pair: Pair) -> None:
    """Reading and leaving a stream of a dead channel returns credit to nobody, without an error."""
    channel, peer = pair
    stream, number = await submit(pair)
    for seq in range(8):
        peer.output(number, seq, {"audio": b"ab"})
    peer.crash()
    await channel.closed
    for seq in range(6):
        assert (await read(stream)).seq == seq
    await stream.aclose()
    with pytest.raises(Cancelled):
        await read(stream)


async def test_row_Q15_a_stopped_reader_grants_nothing_and_still_gets_its_end(pair: Pair) -> None:
    """Without reads no credit flows; the terminal needs none and comes behind the full inbox."""
    channel, peer = pair
    stream, number = await submit(pair)
    for seq in range(8):
        peer.output(number, seq, {"audio": b"ab"})
    peer.finish(number)
    await wait_until(lambda: channel.statistics().open_requests == 0)
    assert not [message for message in peer.received if isinstance(message, wire.Drained)]
    assert len([chunk async for chunk in stream]) == 8


async def test_credits_return_at_half_the_window(pair: Pair) -> None:
    """A reader with a full inbox grants once per half window, not once per chunk."""
    channel, peer = pair
    stream, number = await submit(pair)
    for seq in range(8):
        peer.output(number, seq, {"audio": b"ab"})
    await wait_until(lambda: channel.statistics().received_total == 8)
    for _ in range(7):
        await read(stream)
    assert await peer.next(wire.Drained) == wire.Drained(number, AUDIO, 4)
    await read(stream)
    assert await peer.next(wire.Drained) == wire.Drained(number, AUDIO, 8)


async def test_credits_return_by_bytes_too(pair: Pair) -> None:
    """Half a window of bytes is reason enough to grant."""
    channel, peer = pair
    stream, number = await submit(pair)
    for seq in range(2):
        peer.output(number, seq, {"audio": bytes(600 * 1024)})
    await wait_until(lambda: channel.statistics().received_total == 2)
    await read(stream)
    assert (await peer.next(wire.Drained)).up_to == 1


async def test_credits_return_before_the_reader_waits(pair: Pair) -> None:
    """A reader that is about to wait gives back the credit for what it has taken."""
    stream, number = await submit(pair)
    pair[1].output(number, 0, {"audio": b"ab"})
    await read(stream)
    reading = asyncio.ensure_future(anext(stream))
    assert await pair[1].next(wire.Drained) == wire.Drained(number, AUDIO, 1)
    pair[1].finish(number)
    with pytest.raises(StopAsyncIteration):
        await reading


async def test_row_Q16_order_is_kept_per_request(pair: Pair) -> None:
    """Two interleaved requests each see their own chunks in order."""
    first, one = await submit(pair)
    second, two = await submit(pair)
    for seq in range(6):
        for number in (one, two):
            pair[1].output(number, seq, {"audio": bytes([number, seq])})
    for number in (one, two):
        pair[1].finish(number)
    for stream, number in ((first, one), (second, two)):
        assert [chunk.values["audio"] async for chunk in stream] == [
            bytes([number, s]) for s in range(6)
        ]


async def test_row_Q16_closing_this_side_wakes_everyone_and_may_be_repeated(pair: Pair) -> None:
    """`aclose` ends readers and waiters, and a second call does nothing."""
    channel, peer = pair
    peer.send(wire.ReplicaNotice(replica(TALKER, "dead")))
    stream, _ = await submit(pair)
    await wait_until(lambda: not channel.readiness.is_ready)
    reading = asyncio.ensure_future(anext(stream))
    waiting = asyncio.ensure_future(channel.wait_ready())
    await asyncio.sleep(0)
    await channel.aclose()
    await channel.aclose()
    for task in (reading, waiting):
        with pytest.raises(EngineDead):
            await task
    async with asyncio.timeout(WAIT_S):
        await peer.is_gone.wait()


async def test_row_Q17_submitting_never_waits_for_the_other_side(pair: Pair) -> None:
    """Requests are taken while the orchestrator reads nothing, and a refusal is the stream's first news."""
    channel, peer = pair
    peer.connection.pause_reading()
    streams = [
        channel.submit(pipeline="speech", inputs={"text": {"text": "x" * 4096}}) for _ in range(300)
    ]
    assert channel.statistics().open_requests == 300
    peer.connection.resume_reading()
    await peer.next(wire.Submit)
    refusal = Failure(
        kind=FailureKind.OVERLOADED, detail="full", code="queue_full", retry_after_s=2.0
    )
    peer.send(wire.Rejected(1, refusal))
    with pytest.raises(Overloaded) as caught:
        await read(streams[0])
    assert (caught.value.code, caught.value.retry_after_s) == ("queue_full", 2.0)


async def test_row_Q2_another_loop_gets_a_typed_error_at_once(pair: Pair) -> None:
    """A stream and a channel belong to one event loop."""
    channel, _ = pair
    stream, _ = await submit(pair)
    found: list[BaseException] = []

    async def elsewhere() -> None:
        for attempt in (lambda: anext(stream), lambda: channel.abort(stream.request)):
            try:
                await attempt()
            except InvalidRequest as error:
                found.append(error)
        try:
            channel.submit(pipeline="speech", inputs={})
        except InvalidRequest as error:
            found.append(error)

    thread = threading.Thread(target=lambda: asyncio.run(elsewhere()))
    thread.start()
    await asyncio.to_thread(thread.join)
    assert [error.code for error in found if isinstance(error, InvalidRequest)] == [
        "wrong_event_loop"
    ] * 3


async def test_two_readers_of_one_stream_are_refused(pair: Pair) -> None:
    """The second concurrent read raises; the first goes on."""
    stream, number = await submit(pair)
    reading = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    with pytest.raises(InvalidRequest) as caught:
        await read(stream)
    assert caught.value.code == "concurrent_read"
    pair[1].output(number, 0, {"audio": b"ab"})
    assert (await reading).seq == 0


async def test_situation_E8_a_cancelled_read_loses_nothing(pair: Pair) -> None:
    """Reads cancelled around the moment of delivery leave every chunk in place, in order."""
    stream, number = await submit(pair)
    total = 400
    seen: list[int] = []
    for seq in range(total):
        reading = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        pair[1].output(number, seq, {"audio": b"ab"})
        if seq % 3:
            await wait_until(lambda expected=seq: pair[0].statistics().received_total > expected)
        reading.cancel()  # before delivery, between delivery and wake-up, or at once after it
        try:
            seen.append((await reading).seq)
        except asyncio.CancelledError:
            seen.append((await read(stream)).seq)
    assert seen == list(range(total))


async def test_leaving_a_stream_aborts_the_request_and_late_news_are_dropped(pair: Pair) -> None:
    """`aclose` sends one abort; outputs and the terminal that were under way leave nothing behind."""
    channel, peer = pair
    stream, number = await submit(pair)
    peer.output(number, 0, {"audio": b"ab"})
    await read(stream)
    await stream.aclose()
    await stream.aclose()
    assert await peer.next(wire.Abort) == wire.Abort(number, acknowledge=False)
    assert channel.statistics().abandoned_requests == 1
    peer.output(number, 1, {"audio": b"ab"})
    peer.send(wire.Cancelled(number))
    await wait_until(lambda: no_open_requests(channel))
    counters = channel.statistics()
    assert (counters.dropped_late_total, counters.dropped_unknown_total) == (1, 0)
    with pytest.raises(Cancelled):
        await read(stream)


async def test_a_stream_that_was_let_go_of_is_aborted(pair: Pair) -> None:
    """Breaking out of `async for` and dropping the stream stops the request."""
    channel, peer = pair
    peer_saw = asyncio.ensure_future(peer.next(wire.Abort))

    async def one_chunk() -> None:
        async for _ in channel.submit(pipeline="speech", inputs={"text": {"text": "Hello"}}):
            break

    reading = asyncio.ensure_future(one_chunk())
    await wait_until(lambda: channel.statistics().submitted_total == 1)
    peer.output(1, 0, {"audio": b"ab"})
    await reading
    del reading
    gc.collect()
    assert (await peer_saw).number == 1


async def test_a_finished_stream_is_not_aborted(pair: Pair) -> None:
    """Closing a stream that was read to its end sends nothing."""
    stream, number = await submit(pair)
    pair[1].finish(number)
    async with stream:
        assert [chunk async for chunk in stream] == []
    _, after = await submit(pair)
    assert after == number + 1
    assert not [message for message in pair[1].received if isinstance(message, wire.Abort)]


async def test_an_abort_by_id_ends_the_reader_and_is_acknowledged_once(pair: Pair) -> None:
    """The reader gets what came before and then `Cancelled`; two aborts share one question."""
    channel, peer = pair
    stream, number = await submit(pair)
    peer.output(number, 0, {"audio": b"ab"})
    answers = asyncio.gather(channel.abort(stream.request), channel.abort(stream.request))
    assert await peer.next(wire.Abort) == wire.Abort(number, acknowledge=True)
    peer.send(wire.AbortAcknowledged(number, stopped=True), wire.Cancelled(number))
    assert await answers == [True, True]
    assert (await read(stream)).seq == 0
    with pytest.raises(Cancelled):
        await read(stream)
    assert await channel.abort(RequestId("other-1")) is False
    assert await channel.abort(RequestId("1.1-99")) is False
    assert no_open_requests(channel)


async def test_a_payload_in_shared_memory_is_copied_and_given_back(
    path: str, orchestrator: FakeOrchestrator, tmp_path: Path
) -> None:
    """Values stay valid after their file is gone, and every payload is given back once, read or not."""
    writer = PayloadWriter(str(tmp_path), "vocoder", 1024 * 1024, inline_limit=16)
    connecting = asyncio.ensure_future(Channel.connect(path, run=RUN, name="test"))
    peer = await orchestrator.accept(welcome=False)
    peer.welcome(shared_memory_dir=str(tmp_path))
    channel = await connecting
    stream = channel.submit(pipeline="speech", inputs={})
    refs = [writer.put(codec.encode({"audio": bytes([n]) * 100}))[0] for n in range(3)]
    for seq, ref in enumerate(refs):
        peer.output(1, seq, payload=ref, final=False)
    chunk = await read(stream)
    assert (await peer.next(wire.Viewed)).payload == refs[0]
    writer.close()
    assert chunk.values == {"audio": bytes(100)}
    with pytest.raises(PayloadLost):
        await read(stream)
    with pytest.raises(PayloadLost):
        await read(stream)
    assert {(await peer.next(wire.Viewed)).payload for _ in range(2)} == set(refs[1:])
    assert wire.Abort(1, acknowledge=False) in peer.received
    await channel.aclose()


async def test_a_preview_replaces_an_unread_one(pair: Pair) -> None:
    """The latest preview wins, takes no credit, and passes no data chunk."""
    stream, number = await submit(pair)
    peer = pair[1]
    for values in (b"a", b"b"):
        peer.output(number, 0, {"image": values}, kind="preview", final=False)
    peer.output(number, 0, {"image": b"c"}, timings=None)
    peer.finish(number)
    await wait_until(lambda: pair[0].statistics().open_requests == 0)
    assert [(c.kind, c.values["image"]) async for c in stream] == [
        ("preview", b"b"),
        ("data", b"c"),
    ]


async def test_a_value_that_can_not_be_sent_is_the_callers_mistake(pair: Pair) -> None:
    """The error names the input, and nothing was submitted."""
    with pytest.raises(InvalidRequest) as caught:
        pair[0].submit(pipeline="speech", inputs={"text": {"text": object()}})  # pyright: ignore[reportArgumentType]
    assert caught.value.param == "text"
    assert pair[0].statistics().submitted_total == 0


async def test_connecting_where_nobody_listens_fails_at_once(tmp_path: Path) -> None:
    """No socket, no engine."""
    with pytest.raises(EngineDead) as caught:
        await Channel.connect(str(tmp_path / "none.sock"), run=RUN, name="test")
    assert caught.value.code == ABSENT


async def test_an_engine_of_another_version_is_refused(
    path: str, orchestrator: FakeOrchestrator
) -> None:
    """A welcome in another protocol version names both."""
    connecting = asyncio.ensure_future(Channel.connect(path, run=RUN, name="test"))
    peer = await orchestrator.accept(welcome=False)
    peer.welcome(protocol=PROTOCOL_VERSION + 1)
    with pytest.raises(EngineDead, match=f"version {PROTOCOL_VERSION + 1}"):
        await connecting


async def test_hanging_up_before_the_welcome_is_a_crash(
    path: str, orchestrator: FakeOrchestrator
) -> None:
    """Who waits for the welcome learns that it will not come."""
    connecting = asyncio.ensure_future(Channel.connect(path, run=RUN, name="test"))
    (await orchestrator.accept(welcome=False)).crash()
    with pytest.raises(EngineDead) as caught:
        await connecting
    assert caught.value.code == CRASHED


async def test_waiting_for_readiness_follows_the_notices(
    path: str, orchestrator: FakeOrchestrator
) -> None:
    """It ends when each stage has a ready replica; subscribers see every change on the way."""
    connecting = asyncio.ensure_future(Channel.connect(path, run=RUN, name="test"))
    peer = await orchestrator.accept(welcome=False)
    peer.welcome(replicas=())
    channel = await connecting
    seen: list[str] = []
    stop = channel.subscribe(lambda state: seen.append(state.state))
    waiting = asyncio.ensure_future(channel.wait_ready())
    peer.send(wire.ReplicaNotice(replica(TALKER)), wire.ReplicaNotice(replica(VOCODER, "loading")))
    await wait_until(lambda: len(seen) == 2)
    assert not waiting.done()
    peer.send(wire.ReplicaNotice(replica(VOCODER)))
    async with asyncio.timeout(WAIT_S):
        await waiting
    stop()
    peer.send(wire.ReplicaNotice(replica(VOCODER, "dead")))
    await wait_until(lambda: not channel.readiness.is_ready)
    assert seen == ["ready", "loading", "ready"]
    await channel.aclose()


async def test_a_stage_that_does_not_start_ends_the_wait_with_its_reason(
    path: str, orchestrator: FakeOrchestrator
) -> None:
    """A parked stage that was never ready is a failed start."""
    connecting = asyncio.ensure_future(Channel.connect(path, run=RUN, name="test"))
    peer = await orchestrator.accept(welcome=False)
    peer.welcome(replicas=(replica(TALKER, "loading"),))
    channel = await connecting
    waiting = asyncio.ensure_future(channel.wait_ready())
    peer.send(wire.ReplicaNotice(replica(TALKER, "parked", detail="no module named onnxruntime")))
    with pytest.raises(StartFailed, match=r"talker.*onnxruntime"):
        await waiting
    await channel.aclose()


async def test_a_refused_submission_leaves_nothing_open(pair: Pair) -> None:
    """`Rejected` is a terminal like any other."""
    channel, peer = pair
    stream, number = await submit(pair)
    peer.send(
        wire.Rejected(number, Failure(kind=FailureKind.INVALID_REQUEST, detail="no", param="model"))
    )
    with pytest.raises(InvalidRequest):
        await read(stream)
    assert no_open_requests(channel)


async def test_a_lost_replica_after_output_is_read_after_the_output(pair: Pair) -> None:
    """A failure never overtakes a chunk."""
    stream, number = await submit(pair)
    pair[1].output(number, 0, {"audio": b"ab"})
    pair[1].fail(number, Failure(kind=FailureKind.REPLICA_LOST, detail="exit 9", where="vocoder"))
    assert (await read(stream)).seq == 0
    with pytest.raises(ReplicaLost):
        await read(stream)


async def test_row_M8_pieces_go_out_in_order_and_an_input_is_closed_once(pair: Pair) -> None:
    """Each in a message of its own, with its values in the body; then nothing of that input."""
    channel, peer = pair
    stream = channel.submit(pipeline="speech", inputs={}, open_inputs=("text",))
    assert (await peer.next(wire.Submit)).open_inputs == ("text",)
    stream.append(text="He")
    stream.append(text={"text": "llo", "lang": "en"})
    stream.close_input("text", "text")
    stream.close_input("text", "nothing")
    stream.abort()
    await peer.next(wire.Abort)
    kinds = [type(message) for message in peer.received[-4:]]
    assert kinds == [wire.Append, wire.Append, wire.CloseInput, wire.Abort]
    sent = [m for m in peer.received if isinstance(m, (wire.Append, wire.CloseInput))]
    assert {(m.number, m.input) for m in sent} == {(1, "text")}
    with pytest.raises(Cancelled):
        stream.append(text="late")


async def test_row_M8_and_row_Q14_after_the_end_nothing_is_appended(pair: Pair) -> None:
    """The writer hears of the engine's death; closing is harmless."""
    channel, peer = pair
    stream = channel.submit(pipeline="speech", inputs={}, open_inputs=("text",))
    await peer.next(wire.Submit)
    peer.crash()
    with pytest.raises(EngineDead):
        await read(stream)
    with pytest.raises(EngineDead):
        stream.append(text="late")
    stream.close_input("text")


async def test_row_M8_and_row_Q2_another_loop_can_not_append(pair: Pair) -> None:
    """It gets a typed error at once, and nothing is sent."""
    channel, _ = pair
    stream = channel.submit(pipeline="speech", inputs={}, open_inputs=("text",))

    async def meddle() -> None:
        with pytest.raises(InvalidRequest, match="append to it where it was made"):
            stream.append(text="x")
        with pytest.raises(InvalidRequest, match="close its inputs where it was made"):
            stream.close_input("text")

    await asyncio.to_thread(asyncio.run, meddle())


async def test_a_companion_of_a_former_life_is_refused_here(pair: Pair) -> None:
    """Its leader's number may be another request's by now; nothing is sent."""
    channel, _ = pair
    leader = channel.submit(pipeline="speech", inputs={"text": {"text": "one"}}, companions=1)
    leader.request = RequestId("0.1-1")
    with pytest.raises(InvalidRequest, match=r"0\.1-1 is not one of this channel") as caught:
        channel.submit(pipeline="speech", inputs={"text": {"text": "two"}}, companion_of=leader)
    assert caught.value.param == "companion_of"
    assert channel.statistics().submitted_total == 1
