"""The official SDK against a real socket: sync, async, streaming, its errors and its retries."""

from __future__ import annotations

import asyncio
import io
import wave
from typing import TYPE_CHECKING

import httpx2
import openai
import pytest

from stretto.errors import Overloaded, ReplicaLost

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.server.conftest import Server
    from tests.support.fake_engine import Job

SAMPLES = b"\x01\x00" * 2400


def speak(job: Job) -> None:
    """Answer with two chunks."""
    job.audio(SAMPLES[:2400], SAMPLES[2400:]).finish()


@pytest.fixture
async def sdk(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    """The asynchronous client."""
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0
    ) as sdk:
        yield sdk


async def test_the_synchronous_client_writes_a_file(server: Server, tmp_path: Path) -> None:
    """`with_streaming_response` to a file, in a thread of its own."""
    server.engine.script = speak
    path = tmp_path / "hello.wav"

    def run() -> None:
        with (
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk,
            sdk.audio.speech.with_streaming_response.create(
                input="Hello", model="tts-1", voice="alloy", response_format="wav"
            ) as reply,
        ):
            reply.stream_to_file(path)

    await asyncio.to_thread(run)
    assert path.read_bytes()[44:] == SAMPLES


async def test_the_asynchronous_client_reads_all(server: Server, sdk: openai.AsyncOpenAI) -> None:
    """The plain call returns the whole audio."""
    server.engine.script = speak
    reply = await sdk.audio.speech.create(
        input="Hello", model="speech", voice="heart", response_format="pcm", speed=1.0
    )
    assert reply.content == SAMPLES


async def test_our_extras_travel_in_extra_body(server: Server, sdk: openai.AsyncOpenAI) -> None:
    """Seed and buffering are extensions; a buffered WAV opens in a strict parser."""
    server.engine.script = speak
    reply = await sdk.audio.speech.create(
        input="Hello",
        model="speech",
        voice="heart",
        response_format="wav",
        extra_body={"seed": 3, "stream": False},
    )
    with wave.open(io.BytesIO(reply.content)) as file:
        assert file.readframes(file.getnframes()) == SAMPLES
    assert server.engine.jobs[0].options["seed"] == 3


async def test_the_streaming_client_gets_pieces_as_they_are_made(
    server: Server, sdk: openai.AsyncOpenAI
) -> None:
    """The first piece can be heard before the second is made."""
    server.engine.script = lambda job: job.audio(SAMPLES[2400:])
    async with sdk.audio.speech.with_streaming_response.create(
        input="Hello", model="speech", voice="alloy", response_format="pcm"
    ) as reply:
        received = b""
        async for piece in reply.iter_bytes():
            received += piece
            if len(received) == 2400:
                server.engine.jobs[0].audio(SAMPLES[2400:])
            elif len(received) == 4800:
                server.engine.jobs[0].finish()
        assert received == SAMPLES


async def test_errors_are_the_sdks_classes(server: Server, sdk: openai.AsyncOpenAI) -> None:
    """Status, code, param and request id come through."""
    with pytest.raises(openai.BadRequestError) as bad:
        await sdk.audio.speech.create(input="", model="speech", voice="alloy")
    assert (bad.value.code, bad.value.param) == ("invalid_value", "input")
    assert bad.value.request_id is not None
    with pytest.raises(openai.NotFoundError):
        await sdk.audio.speech.create(input="a", model="nope", voice="alloy")
    server.engine.script = lambda job: job.fail(Overloaded("full", code="queue_full"))
    with pytest.raises(openai.RateLimitError) as full:
        await sdk.audio.speech.create(
            input="a", model="speech", voice="alloy", response_format="pcm"
        )
    assert full.value.code == "queue_full"
    with pytest.raises(openai.NotFoundError):
        await sdk.models.retrieve("nope")
    assert [model.id async for model in sdk.models.list()] == ["speech"]


async def test_the_sdks_default_format_is_ours(server: Server, sdk: openai.AsyncOpenAI) -> None:
    """Leaving the format out gives mp3, labelled so."""
    server.engine.script = speak
    reply = await sdk.audio.speech.with_raw_response.create(
        input="a", model="speech", voice="alloy"
    )
    assert reply.headers["content-type"] == "audio/mpeg"


async def test_the_sdk_tries_again_when_it_is_told_to(
    server: Server, sdk: openai.AsyncOpenAI
) -> None:
    """A retryable failure before the first byte is repeated after the time we name."""

    def flaky(job: Job) -> None:
        if len(server.engine.jobs) < 3:
            job.fail(Overloaded("full", code="queue_full", retry_after_s=0.01))
        else:
            speak(job)

    server.engine.script = flaky
    reply = await sdk.with_options(max_retries=2).audio.speech.create(
        input="a", model="speech", voice="alloy", response_format="pcm"
    )
    assert reply.content == SAMPLES
    assert len(server.engine.jobs) == 3


async def test_a_broken_stream_raises(server: Server, sdk: openai.AsyncOpenAI) -> None:
    """A failure after the first byte is no end of audio for the SDK."""
    server.engine.script = lambda job: job.audio(SAMPLES).fail(ReplicaLost("exit 9"))

    async def listen() -> None:
        async with sdk.audio.speech.with_streaming_response.create(
            input="Hello", model="speech", voice="alloy", response_format="pcm"
        ) as reply:
            await reply.read()

    with pytest.raises(httpx2.RemoteProtocolError):
        await listen()
