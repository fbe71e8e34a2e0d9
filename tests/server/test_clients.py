"""The requests that stock clients send, as they send them, and what they do with the answers."""

from __future__ import annotations

import asyncio
import json
from base64 import b64decode
from typing import TYPE_CHECKING

import openai
import pytest

from stretto.server.catalog import VOICE_ALIASES
from tests.support.decoding import frames_of
from tests.support.fake_orchestrator import WAIT_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import httpx2

    from tests.server.conftest import Server
    from tests.support.fake_engine import Job

SECOND = b"\x10\x00\x20\x00" * 12_000
MIN_MP3_FRAMES, MAX_MP3_FRAMES = 24_000, 24_000 + 1105 + 2 * 576


def speak(job: Job) -> None:
    """Answer with a second of audio."""
    job.audio(*(SECOND[at : at + 4800] for at in range(0, len(SECOND), 4800))).finish()


@pytest.fixture
async def sdk(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    """The asynchronous client of the SDK."""
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0
    ) as sdk:
        yield sdk


async def test_livekit_asks_for_events_with_mp3(server: Server, sdk: openai.AsyncOpenAI) -> None:
    """It goes by the content type, reads `data:` lines, and decodes what it has joined."""
    server.engine.script = speak
    async with sdk.audio.speech.with_streaming_response.create(
        input="Hello",
        model="gpt-4o-mini-tts",
        voice="ash",
        response_format="mp3",
        speed=1.0,
        stream_format="sse",
    ) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        audio, types = b"", list[str]()
        async for line in reply.iter_lines():
            if not line.startswith("data:"):
                continue
            event = json.loads(line.removeprefix("data:"))
            types.append(event["type"])
            if event["type"] == "speech.audio.delta":
                audio += b64decode(event["audio"])
    assert types[-1] == "speech.audio.done"
    assert MIN_MP3_FRAMES <= frames_of(audio) <= MAX_MP3_FRAMES


@pytest.mark.parametrize("voice", VOICE_ALIASES)
async def test_pipecat_asks_for_pcm_without_a_stream_flag(
    server: Server, sdk: openai.AsyncOpenAI, voice: str
) -> None:
    """It measures the time to the first bytes, which come before the synthesis ends, at 24 kHz."""
    server.engine.script = lambda job: job.audio(SECOND[:4800])
    async with (
        asyncio.timeout(WAIT_S),
        sdk.audio.speech.with_streaming_response.create(
            input="Hello",
            model="gpt-4o-mini-tts",
            voice=voice,
            response_format="pcm",
            extra_body={"instructions": "cheerful"},
        ) as reply,
    ):
        assert reply.status_code == 200
        assert reply.headers["x-sample-rate"] == "24000"
        received = b""
        async for piece in reply.iter_bytes(4096):
            received += piece
            if len(received) == 4096:
                server.engine.jobs[0].audio(SECOND[4800:]).finish()
    assert received == SECOND


async def test_open_webui_reads_voices_and_models_as_objects(client: httpx2.AsyncClient) -> None:
    """Its first choice is `/audio/models`; a voice has an id and a name."""
    voices = (await client.get("/v1/audio/voices")).json()
    assert {voice["id"]: voice["name"] for voice in voices["voices"]} == {"heart": "heart"}
    assert voices["object"] == "list"
    assert voices["data"] == voices["voices"]
    models = (await client.get("/v1/audio/models")).json()
    assert [model["id"] for model in models["models"]] == ["speech"]


async def test_open_webui_speaks_with_a_whole_body(
    server: Server, client: httpx2.AsyncClient
) -> None:
    """It sends model, input and voice only, and plays what comes as mp3."""
    server.engine.script = speak
    body = {"model": "tts-1", "input": "Hello", "voice": "alloy"}
    reply = await client.post("/v1/audio/speech", json=body)
    assert reply.headers["content-type"] == "audio/mpeg"
    assert MIN_MP3_FRAMES <= frames_of(reply.content) <= MAX_MP3_FRAMES


@pytest.mark.parametrize("response_format", ["mp3", "wav", "pcm"])
async def test_the_sdk_reads_every_format_synchronously_and_asynchronously(
    server: Server, sdk: openai.AsyncOpenAI, response_format: str
) -> None:
    """Both clients, read at once or as a stream, get the same bytes."""
    server.engine.script = speak
    asked = {
        "input": "Hello",
        "model": "tts-1",
        "voice": "alloy",
        "response_format": response_format,
    }

    def read() -> tuple[bytes, bytes]:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            whole = client.audio.speech.create(**asked).content  # pyright: ignore[reportArgumentType]
            with client.audio.speech.with_streaming_response.create(**asked) as reply:  # pyright: ignore[reportArgumentType]
                return whole, b"".join(reply.iter_bytes())

    whole, streamed = await asyncio.to_thread(read)
    assert whole == streamed
    assert (await sdk.audio.speech.create(**asked)).content == whole  # pyright: ignore[reportArgumentType]
    if response_format == "pcm":
        assert whole == SECOND
    else:
        assert frames_of(whole) >= MIN_MP3_FRAMES
