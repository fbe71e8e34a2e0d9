"""Real speech over HTTP with the official client, real processes and real models."""

from __future__ import annotations

import signal
import wave
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING

import httpx2
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.e2e.serving import Server, serving

if TYPE_CHECKING:
    from collections.abc import Generator

pytestmark = pytest.mark.e2e

SENTENCES = (
    "The birch canoe slid on the smooth planks.",
    "Please call Stella and ask her to bring these things with her from the store.",
    "She opened the old wooden door slowly. The cold morning light filled the empty room.",
    "Nobody spoke.",
)


@pytest.fixture(scope="module")
def server() -> Generator[Server]:
    """One speech server for the tests that leave it as it was."""
    with serving("--replicas", "vocoder=2") as running:
        yield running


@pytest.fixture
def client(server: Server) -> Generator[OpenAI]:
    """The official client, without retries, so that each failure is seen."""
    with OpenAI(base_url=server.base_url, api_key="none", max_retries=0) as opened:
        yield opened


def speak(client: OpenAI, text: str, seed: int = 1) -> bytes:
    """Return the PCM of a text."""
    speech = client.audio.speech.create(
        model="tts-1", voice="alloy", input=text, response_format="pcm", extra_body={"seed": seed}
    )
    return speech.content


def test_the_first_audio_arrives_before_the_synthesis_ends(client: OpenAI) -> None:
    """Audio streams without any stream flag: the first piece is a small part of the whole."""
    text = " ".join(SENTENCES * 4)
    with client.audio.speech.with_streaming_response.create(
        model="tts-1", voice="alloy", input=text, response_format="pcm"
    ) as response:
        pieces = list(response.iter_bytes())
        assert response.headers["content-type"] == "audio/pcm"
        assert "talker" in response.headers["server-timing"]
    assert len(pieces) > 10
    assert len(pieces[0]) < sum(map(len, pieces)) / 10


def test_situation_E6_a_buffered_wav_file_holds_the_same_samples_as_streamed_pcm(
    client: OpenAI,
) -> None:
    """The formats differ by the header only."""
    pcm = speak(client, SENTENCES[0])
    body = client.audio.speech.create(
        model="tts-1",
        voice="alloy",
        input=SENTENCES[0],
        response_format="wav",
        extra_body={"seed": 1, "stream": False},
    ).content
    with wave.open(BytesIO(body)) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, 24_000)
        assert file.readframes(file.getnframes()) == pcm


def test_a_seed_fixes_the_bytes(client: OpenAI) -> None:
    """The same seed gives the same audio on either vocoder replica, another one does not."""
    assert len({speak(client, SENTENCES[1]) for _ in range(4)}) == 1
    assert speak(client, SENTENCES[1], seed=2) != speak(client, SENTENCES[1])


async def test_the_async_client_works(server: Server) -> None:
    """The SDK's asynchronous client gets the same kind of answer."""
    async with AsyncOpenAI(base_url=server.base_url, api_key="none") as opened:
        speech = await opened.audio.speech.create(
            model="gpt-4o-mini-tts", voice="nova", input=SENTENCES[3], response_format="pcm"
        )
        assert len(speech.content) > 10_000
        assert [model.id async for model in opened.models.list()] == ["speech"]


def test_32_concurrent_streams_are_byte_exact_and_the_server_ends_cleanly() -> None:
    """Load changes no byte; SIGTERM afterwards ends everything, without an error in the log."""
    with serving() as running:
        with OpenAI(base_url=running.base_url, api_key="none", max_retries=0) as opened:
            alone = {text: speak(opened, text) for text in SENTENCES}
            with ThreadPoolExecutor(32) as pool:
                texts = list(SENTENCES) * 8
                together = list(pool.map(partial(speak, opened), texts))
        assert all(alone[text] == audio for text, audio in zip(texts, together, strict=True))
        assert running.stop(signal.SIGTERM, timeout_s=10) == 0
        bad = [line for line in running.lines if "ERROR" in line or "Traceback" in line]
        assert not bad


@pytest.mark.parametrize(
    ("fields", "status", "param", "code"),
    [
        ({"input": ""}, 400, "input", "invalid_value"),
        ({"input": "a" * 100_000}, 400, "input", "string_above_max_length"),
        ({"input": "Hi.", "model": "gpt-9"}, 404, "model", "model_not_found"),
        ({"input": "Hi.", "voice": "nobody"}, 404, "voice", "voice_not_found"),
        ({"input": "Hi.", "response_format": "flac"}, 400, "response_format", "unsupported_value"),
        ({"input": ["Hi."]}, 400, "input", "invalid_type"),
        ({"input": "Hi.", "speed": 99}, 400, "speed", "invalid_value"),
    ],
)
def test_bad_input_is_the_clients_error(
    server: Server, fields: dict[str, object], status: int, param: str, code: str
) -> None:
    """Each mistake gets its status and the OpenAI error body, and the server goes on."""
    answer = httpx2.post(f"{server.base_url}/audio/speech", json=fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (status, param, code)
    assert httpx2.get(f"{server.url}/ready").status_code == 200


@pytest.mark.parametrize("body", [b"\xff\xfe", b"not json", b"[]", b""])
def test_a_body_that_is_no_json_object_is_refused(server: Server, body: bytes) -> None:
    """Bytes that are no text, and text that is no object, are 400."""
    answer = httpx2.post(f"{server.base_url}/audio/speech", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
