"""`stream_format: sse`: the same audio as server-sent events, and one end marker on every path."""

from __future__ import annotations

import asyncio
import json
import random
from base64 import b64decode
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, cast

import httpx2
import pytest

from stretto.errors import ReplicaLost, StageError, StrettoError
from tests.server.conftest import Server, running_server
from tests.support.fake_orchestrator import VOCODER, WAIT_S, facts

if TYPE_CHECKING:
    from tests.support.fake_engine import Job

SPEECH = "/v1/audio/speech"
SECOND = bytes(range(256)) * 187 + b"\0" * 128  # 48,000 bytes
FORMATS = ("mp3", "wav", "pcm")


@dataclass
class Events:
    """What came of one stream of events.

    Attributes:
        names: Each event's name, in order.
        data: Each event's JSON.
        texts: The base64 text of each delta.
        broken: The transfer was broken off.
    """

    names: list[str] = field(default_factory=list[str])
    data: list[dict[str, object]] = field(default_factory=list[dict[str, object]])
    texts: list[str] = field(default_factory=list[str])
    broken: bool = False

    @property
    def audio(self) -> bytes:
        """The audio, as a client that joins the text first decodes it."""
        return b64decode("".join(self.texts), validate=True)


def parse(text: str) -> Events:
    """Read a body of events as a strict client would."""
    events = Events()
    assert not text or text.endswith("\n\n")
    for block in text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        assert name.startswith("event: ")
        assert data.startswith("data: ")
        found = json.loads(data.removeprefix("data: "))
        assert found["type"] == name.removeprefix("event: ")
        events.names.append(found["type"])
        events.data.append(found)
        if found["type"] == "speech.audio.delta":
            events.texts.append(found["audio"])
    return events


async def listen(client: httpx2.AsyncClient, **more: object) -> Events:
    """Ask for events and read them to the end, or to the break."""
    body = {"input": "Hello", "stream_format": "sse", **more}
    text = ""
    try:
        async with client.stream("POST", SPEECH, json=body) as reply:
            assert reply.status_code == 200
            assert reply.headers["content-type"] == "text/event-stream"
            assert reply.headers["cache-control"] == "no-cache"
            assert reply.headers["x-sample-rate"] == "24000"
            async for piece in reply.aiter_text():
                text += piece
    except httpx2.RemoteProtocolError:
        events = parse(text)
        events.broken = True
        return events
    return parse(text)


def speak(job: Job) -> None:
    """Answer with pieces of odd sizes."""
    cuts = [0, 2, 12, 14, 20_000, 20_002, len(SECOND)]
    pieces = [SECOND[a:b] for a, b in pairwise(cuts)]
    job.audio(*pieces).finish()


@pytest.mark.parametrize("response_format", FORMATS)
async def test_the_events_hold_exactly_the_raw_body(
    server: Server, client: httpx2.AsyncClient, response_format: str
) -> None:
    """Joined and decoded, the deltas are the bytes that a raw reply has."""
    server.engine.script = speak
    raw = await client.post(SPEECH, json={"input": "Hello", "response_format": response_format})
    events = await listen(client, response_format=response_format)
    assert events.audio == raw.content
    assert not events.broken
    assert events.names.count("speech.audio.done") == 1
    assert events.names[-1] == "speech.audio.done"
    assert not any("=" in text for text in events.texts[:-1])
    if response_format == "pcm":
        assert all(len(b64decode(text)) % 2 == 0 for text in events.texts)


async def test_the_end_counts_characters_and_audio(
    server: Server, client: httpx2.AsyncClient
) -> None:
    """OpenAI's shape: integers, and their sum."""
    server.engine.script = speak
    events = await listen(client)
    usage = events.data[-1]["usage"]
    assert usage == {"input_tokens": 5, "output_tokens": 20, "total_tokens": 25}


async def test_events_leave_when_the_audio_is_made(
    server: Server, client: httpx2.AsyncClient
) -> None:
    """The first delta arrives while the rest is still being made."""
    server.engine.script = lambda job: job.audio(SECOND)
    body = {"input": "Hello", "stream_format": "sse"}
    async with asyncio.timeout(WAIT_S), client.stream("POST", SPEECH, json=body) as reply:
        async for piece in reply.aiter_text():
            if "delta" in piece:
                break
        server.engine.jobs[0].finish()


@pytest.mark.parametrize("pieces", [1, 2, 5])
@pytest.mark.parametrize("response_format", FORMATS)
async def test_situation_G1_a_failure_after_the_first_event_is_told_and_then_broken_off(
    server: Server, client: httpx2.AsyncClient, pieces: int, response_format: str
) -> None:
    """An error event in OpenAI's form is the last thing, and the transfer does not end cleanly."""
    server.engine.script = lambda job: job.audio(*[SECOND[:4800]] * pieces).fail(
        ReplicaLost("exit 9", where="vocoder/0")
    )
    events = await listen(client, response_format=response_format)
    assert events.broken
    assert events.names[-1] == "error"
    assert "speech.audio.done" not in events.names
    error = cast("dict[str, object]", events.data[-1]["error"])
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == "replica_lost"
    assert "exit 9" not in str(error)


@pytest.mark.parametrize("error", [StageError("broke"), ReplicaLost("exit 9")])
async def test_situation_G1_a_failure_before_the_first_event_is_a_status(
    server: Server, client: httpx2.AsyncClient, error: StrettoError
) -> None:
    """Nothing was committed to yet."""
    server.engine.script = lambda job: job.fail(error)
    reply = await client.post(SPEECH, json={"input": "Hello", "stream_format": "sse"})
    assert reply.status_code in {500, 503}
    assert reply.headers["content-type"] == "application/json"


@pytest.mark.slow
async def test_situation_G3_a_thousand_streams_have_one_end_marker_each() -> None:
    """Whatever the length, and wherever it fails: one marker, and nothing after it."""
    chance = random.Random(7)  # noqa: S311 - the same each time

    def play(job: Job) -> None:
        length, fails = int(job.text.split()[0]), job.text.split()[1] == "fails"
        job.audio(*[SECOND[: 2 * (n + 1) * 100] for n in range(length)])
        if fails:
            job.fail(StageError("broke"))
        else:
            job.finish()

    async with running_server() as server:
        server.engine.script = play
        limits = httpx2.Limits(max_connections=32)
        async with httpx2.AsyncClient(
            base_url=server.url, timeout=30, verify=False, limits=limits
        ) as client:

            async def one() -> None:
                length, fails = chance.randint(1, 12), chance.random() < 0.3
                text = f"{length} {'fails' if fails else 'ends'}"
                events = await listen(client, input=text, response_format=chance.choice(FORMATS))
                markers = [name for name in events.names if name != "speech.audio.delta"]
                assert markers == (["error"] if fails else ["speech.audio.done"])
                assert events.names[-1] == markers[0]
                assert events.broken == fails

            for _ in range(25):
                await asyncio.gather(*(one() for _ in range(40)))
        assert len(server.in_flight) == 0


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("rate_hz", [8000, 16000, 22050, 44100, 48000])
async def test_situation_F7_headers_tell_the_rate_of_the_stage(rate_hz: int, channels: int) -> None:
    """Rate and channels are the stage's own in every format, and in what usage counts."""
    async with running_server() as server:
        server.engine.readiness.stage(
            VOCODER, facts(rate_hz=rate_hz, channels=channels, format="s16le")
        )
        second = bytes(2 * channels * rate_hz)
        server.engine.script = lambda job: job.audio(second).finish()
        async with httpx2.AsyncClient(base_url=server.url, timeout=WAIT_S, verify=False) as client:
            for response_format in FORMATS:
                body = {"input": "Hello", "response_format": response_format}
                reply = await client.post(SPEECH, json=body)
                assert reply.headers["x-sample-rate"] == str(rate_hz)
                assert reply.headers["x-channels"] == str(channels)
                assert reply.headers["x-bit-depth"] == "16"
                if response_format == "wav":
                    assert int.from_bytes(reply.content[24:28], "little") == rate_hz
                    assert int.from_bytes(reply.content[22:24], "little") == channels
            done = await client.post(SPEECH, json={"input": "Hello", "stream_format": "sse"})
            assert parse(done.text).data[-1]["usage"] == {
                "input_tokens": 5,
                "output_tokens": 20,
                "total_tokens": 25,
            }


async def test_a_rate_that_mp3_does_not_know_is_refused_before_any_work() -> None:
    """The text says what to ask for instead."""
    async with running_server() as server:
        server.engine.readiness.stage(VOCODER, facts(rate_hz=96000, channels=1, format="s16le"))
        async with httpx2.AsyncClient(base_url=server.url, timeout=WAIT_S, verify=False) as client:
            reply = await client.post(SPEECH, json={"input": "Hello"})
            error = reply.json()["error"]
            assert (reply.status_code, error["param"]) == (400, "response_format")
            assert "use wav or pcm" in error["message"]
            assert server.engine.jobs == []
