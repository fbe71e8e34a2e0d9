"""What crosses a process boundary: every message survives, and names its bytes in the body."""

from __future__ import annotations

from types import GenericAlias
from typing import TYPE_CHECKING, get_args

import msgspec
import pytest

from stretto.core.commands import ReplicaState, StageTiming, Timings
from stretto.errors import Failure, FailureKind
from stretto.messages import PROTOCOL_VERSION, channel, link
from stretto.types import Boundary, CallId, ChannelId, EdgeId, PipelineName, RunId
from tests.core.builders import AUDIO, TEXT, A, edge, inline, replica, shm, task

if TYPE_CHECKING:
    from collections.abc import Sequence

RUN = RunId("run")
SPEECH = PipelineName("speech")
CALL = CallId("1.1-call-1")
IN = EdgeId("request.text->a.in")
FAILURE = Failure(
    kind=FailureKind.OVERLOADED,
    detail="full",
    where="a",
    param="input",
    code="queue_full",
    retry_after_s=2.5,
)
FACTS = link.StageFacts("generation", "samples", {"rate_hz": 24000}, ("amy",), "retry", 30.0)
TIMINGS = Timings(queued_s=0.5, stages=(StageTiming(stage=A, replica=replica(A), chunks=3),))
STATE = ReplicaState(replica=replica(A), state="loading", detail="weights", fraction=0.5)

LINK_UP: tuple[link.Up, ...] = (
    link.Hello(PROTOCOL_VERSION, RUN, replica(A), "nonce", 123, "host"),
    link.LoadProgress("weights", 0.5),
    link.Ready(4, FACTS),
    link.Ready(4, FACTS, {"ping": "control", "sleep": "exclusive"}),
    link.StartFailed("no module"),
    link.Produced(task(A), 3, inline("", 5), 30, 10, "data", 0.1, Boundary(b"4", {IN: (3, 0)})),
    link.Produced(task(A, attempt=2), 0, shm("x"), 0, 0, "preview", 0.0),
    link.Produced(task(A), 1, shm("x"), 0, 0, "data", 0.0, None, 0.5, "length"),
    link.Consumed(task(A), IN, 4),
    link.Viewed(task(A), shm("x")),
    link.Ended(task(A), "finished"),
    link.Ended(task(A), "failed", FAILURE),
    link.Alive(1.5),
    link.Reported(2, 1, {"kv_use": 0.5}),
    link.CallAnswered(CALL, b"\xc0"),
    link.CallAnswered(CALL, b"", FAILURE, is_asleep=True),
    link.Offer(PROTOCOL_VERSION, A, "nonce", b"c" * 32, 123, "host", 7070, b"p" * 32),
    link.Leaving(),
)
LINK_DOWN: tuple[link.Down, ...] = (
    link.Welcome(PROTOCOL_VERSION, RUN),
    link.Open(task(A), SPEECH, (edge(TEXT, A),), inline("", 7), 0, 4, 1000),
    link.Open(task(A), SPEECH, (), None, 5, 2**53, 2**53, Boundary(b"4", {IN: (3, 0)}), 4),
    link.Feed(task(A), IN, 0, inline("", 9)),
    link.CloseInput(task(A), IN),
    link.Cancel(task(A)),
    link.Grant(task(A), 8, 2000),
    link.Release(("x", "y")),
    link.Drain(),
    link.Call(CALL, "ping", "control", b"\x80"),
    link.Challenge(PROTOCOL_VERSION, b"c" * 32),
    link.Accepted(b"launch", b"p" * 32),
    link.Refused(FAILURE),
)
CHANNEL_UP: tuple[channel.Up, ...] = (
    channel.Hello(PROTOCOL_VERSION, RUN, 123, "api"),
    channel.Submit(
        1, SPEECH, ((TEXT, inline("", 3)),), (AUDIO,), inline("", 4), 9.5, 1, None, "mine"
    ),
    channel.Submit(2, SPEECH, ((TEXT, shm("t")),), (), None, None, 0, None, ""),
    channel.Submit(3, SPEECH, (), (), None, None, 0, None, "", None, (TEXT,), 1, 2),
    channel.Append(3, TEXT, inline("", 3)),
    channel.CloseInput(3, TEXT),
    channel.Abort(1, acknowledge=True),
    channel.Drained(1, AUDIO, 4),
    channel.Viewed(shm("x")),
    channel.Ask(1, "story", "mine"),
    channel.HttpDone("/v1/audio/speech", 200, 1.5, 0.06),
    channel.Scale(2, A, 3),
    channel.Drain(3, replica(A), replace=True),
    channel.Call(1, "ping", (A,), b"\x80", 2.5),
)
CHANNEL_DOWN: tuple[channel.Down, ...] = (
    channel.Welcome(
        PROTOCOL_VERSION,
        1,
        ChannelId("1.1"),
        None,
        (channel.PipelineInfo(SPEECH, (TEXT,), ((AUDIO, A),)),),
        (STATE,),
        {A: 2},
    ),
    channel.Output(1, AUDIO, 0, inline("", 6), 0, 10, "data", 0.1, final=False, timings=TIMINGS),
    channel.Output(1, AUDIO, 1, shm("x"), 10, 10, "preview", 0.0, final=False),
    channel.Output(1, AUDIO, 1, None, 10, 0, "data", 0.0, final=True),
    channel.Finished(1, TIMINGS),
    channel.Failed(1, FAILURE),
    channel.Cancelled(1),
    channel.Rejected(1, FAILURE),
    channel.AbortAcknowledged(1, stopped=True),
    channel.ReplicaNotice(STATE),
    channel.StageNotice(A, FACTS),
    channel.TargetNotice(A, 3),
    channel.Fatal(FAILURE),
    channel.Closing(),
    channel.Answer(1, "text"),
    channel.Answer(2, "", FAILURE),
    channel.CallAnswered(1, (channel.CallResult(replica(A), "ok", b"\xc0"),)),
    channel.CallAnswered(
        2, (channel.CallResult(replica(A), "died", failure=FAILURE),), failure=FAILURE
    ),
)
DIRECTIONS = {
    "link up": (link.Up, LINK_UP),
    "link down": (link.Down, LINK_DOWN),
    "channel up": (channel.Up, CHANNEL_UP),
    "channel down": (channel.Down, CHANNEL_DOWN),
}


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_message_survives_the_wire(direction: str) -> None:
    """A frame's header is a list of messages, decoded by the direction's union."""
    union, messages = DIRECTIONS[direction]
    assert {type(message) for message in messages} == set(get_args(union)), "a message is missing"
    header = msgspec.msgpack.encode(messages)
    assert msgspec.msgpack.Decoder(GenericAlias(list, union)).decode(header) == list(messages)


@pytest.mark.parametrize(("up", "down"), [(link.Up, link.Down), (channel.Up, channel.Down)])
def test_tags_of_both_directions_differ(up: object, down: object) -> None:
    """A message that is sent the wrong way is an error, not another message."""
    tags = [kind.__struct_config__.tag for kind in (*get_args(up), *get_args(down))]
    assert len(tags) == len(set(tags))
    wrong_way = msgspec.msgpack.encode([link.Drain()])
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(wrong_way, type=list[link.Up])


@pytest.mark.parametrize("messages", [LINK_UP, LINK_DOWN], ids=["up", "down"])
def test_a_links_inline_payload_is_known_from_its_message(messages: Sequence[object]) -> None:
    """Only inline payloads own bytes of the body."""
    sizes = [
        ref.size_bytes for message in messages if (ref := link.inline_payload(message)) is not None
    ]
    assert sizes == ([5] if messages is LINK_UP else [7, 9])


@pytest.mark.parametrize("messages", [CHANNEL_UP, CHANNEL_DOWN], ids=["up", "down"])
def test_a_channels_inline_payloads_are_known_in_their_order(messages: Sequence[object]) -> None:
    """Inputs in order, then the options; of outputs the payload."""
    sizes = [ref.size_bytes for message in messages for ref in channel.inline_payloads(message)]
    assert sizes == ([3, 4, 3] if messages is CHANNEL_UP else [6])
