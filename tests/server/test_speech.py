"""`POST /v1/audio/speech`: bytes, headers, failures before and after the first byte, clients that leave."""

from __future__ import annotations

import asyncio
import io
import json
import re
import wave
from typing import TYPE_CHECKING, cast

import httpx2
import msgspec
import pytest

from stretto.core.graph import Limits
from stretto.engine.client import EngineState
from stretto.engine.readiness import Readiness
from stretto.errors import (
    Cancelled,
    InvalidRequest,
    Overloaded,
    ReplicaLost,
    StageError,
)
from stretto.server.speech import BodyBroken
from tests.server.conftest import SETTINGS, Server, running_server
from tests.support.fake_orchestrator import TALKER, WAIT_S, facts, in_time, replica, wait_until

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.support.fake_engine import Job

SPEECH = "/v1/audio/speech"
PIECES = (b"\x01\x00" * 100, b"\x02\x00" * 200, b"\x03\x00")
SAMPLES = b"".join(PIECES)


def speak(job: Job) -> None:
    """Answer with three chunks."""
    job.audio(*PIECES).finish()


async def raw_request(
    server: Server, body: bytes
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a speech request by hand and return its connection."""
    reader, writer = await server.connect()
    head = f"POST {SPEECH} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
    return reader, writer


def stop_reading(writer: asyncio.StreamWriter) -> None:
    """Take nothing from now on."""
    cast("asyncio.ReadTransport", writer.transport).pause_reading()


def hang_up(writer: asyncio.StreamWriter) -> None:
    """Leave at once."""
    writer.transport.abort()


# ---- what is sent


async def test_wav_is_streamed_with_one_header_and_exactly_the_samples(
    server: Server, client: httpx2.AsyncClient
) -> None:
    """A streamed WAV is chunked and has open sizes; the samples are those of the engine."""
    server.engine.script = speak
    reply = await client.post(SPEECH, json={"input": "Hello", "response_format": "wav"})
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "audio/wav"
    assert reply.headers["transfer-encoding"] == "chunked"
    assert reply.content[:4] == b"RIFF"
    assert reply.content[4:8] == reply.content[40:44] == b"\xff\xff\xff\xff"
    assert reply.content[44:] == SAMPLES
    assert reply.content.count(b"RIFF") == 1


async def test_pcm_is_exactly_the_samples_and_headers_describe_them(
    server: Server, client: httpx2.AsyncClient
) -> None:
    """PCM has no header of its own, so rate, channels and depth are HTTP headers."""
    server.engine.script = speak
    reply = await client.post(SPEECH, json={"input": "Hello", "response_format": "pcm"})
    assert reply.content == SAMPLES
    assert reply.headers["content-type"] == "audio/pcm"
    names = ("x-sample-rate", "x-channels", "x-bit-depth")
    assert [reply.headers[name] for name in names] == ["24000", "1", "16"]
    timing = reply.headers["server-timing"]
    assert re.fullmatch(
        r"queue;dur=1\.0, talker;dur=20\.0, vocoder;dur=5\.0, ttfa;dur=\d+\.\d", timing
    )


@pytest.mark.parametrize("pieces", [PIECES, (b"\x01\x00",)], ids=["three", "one sample"])
async def test_situation_F2_a_buffered_wav_has_exact_sizes(
    server: Server, client: httpx2.AsyncClient, pieces: tuple[bytes, ...]
) -> None:
    """`stream: false` sends a length and a file that a strict parser opens."""
    server.engine.script = lambda job: job.audio(*pieces).finish()
    body = {"input": "Hello", "stream": False, "response_format": "wav"}
    reply = await client.post(SPEECH, json=body)
    assert int(reply.headers["content-length"]) == len(reply.content)
    with wave.open(io.BytesIO(reply.content)) as file:
        assert file.readframes(file.getnframes()) == b"".join(pieces)
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (24000, 1, 2)


async def test_each_chunk_is_written_when_it_is_made(server: Server) -> None:
    """The first audio arrives with the status while the rest is not made yet."""
    reader, _ = await raw_request(server, b'{"input":"Hello","response_format":"pcm"}')
    job = await server.engine.next_job()
    job.audio(PIECES[0])
    async with asyncio.timeout(WAIT_S):
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert await reader.readuntil(PIECES[0] + b"\r\n") == b"c8\r\n" + PIECES[0] + b"\r\n"
        job.audio(PIECES[1]).finish()
        assert (await reader.readuntil(b"0\r\n\r\n")).endswith(PIECES[1] + b"\r\n0\r\n\r\n")


async def test_what_was_asked_for_reaches_the_engine(
    server: Server, client: httpx2.AsyncClient
) -> None:
    """Text, voice, speed and seed are passed on, and the request id is the label."""
    server.engine.script = speak
    body = {"input": "Hello", "voice": {"id": "HEART"}, "speed": 1.5, "seed": 7, "unknown": [1]}
    reply = await client.post(SPEECH, json=body, headers={"x-request-id": "mine-1"})
    job = await server.engine.next_job()
    assert (job.text, job.label) == ("Hello", "mine-1")
    assert job.options == {"voice": "heart", "speed": 1.5, "seed": 7}
    assert reply.headers["x-request-id"] == "mine-1"


async def test_openai_names_stand_for_what_there_is(
    server: Server, client: httpx2.AsyncClient
) -> None:
    """OpenAI's models and voices are accepted; the pipeline speaks with its default voice."""
    server.engine.script = speak
    for model in ("tts-1", "tts-1-hd", "gpt-4o-mini-tts", "speech"):
        for voice in ("alloy", "Marin", None):
            body = {"input": "Hello", "model": model, "voice": voice}
            assert (await client.post(SPEECH, json=body)).status_code == 200
    assert all(job.options == {} for job in server.engine.jobs)


async def test_the_body_is_json_whatever_it_is_called(
    server: Server, client: httpx2.AsyncClient
) -> None:
    """`curl -d` says that it sends a form; the bytes decide."""
    server.engine.script = speak
    for kind in ("application/x-www-form-urlencoded", "text/plain", "multipart/form-data"):
        reply = await client.post(
            SPEECH, content=b'{"input":"Hello"}', headers={"content-type": kind}
        )
        assert reply.status_code == 200


async def test_a_slow_client_holds_back_the_engine(server: Server) -> None:
    """While the client does not read, the stream is not read either, and no credit flows."""
    _, writer = await raw_request(server, b'{"input":"Hello","response_format":"pcm"}')
    stop_reading(writer)
    job = await server.engine.next_job()
    sent = 0  # as many as were granted: the reader waits for more
    piece = bytes(512 * 1024)
    while job.granted == sent:
        job.audio(piece)
        sent += 1
        for _ in range(50):
            await asyncio.sleep(0)
        assert sent < 100, "the server reads without bound"
    assert job.granted < sent
    hang_up(writer)
    async with asyncio.timeout(WAIT_S):
        await job.is_aborted.wait()


async def test_a_client_that_never_reads_is_dropped() -> None:
    """A write that waits too long ends the connection and the request."""
    async with running_server(limits=Limits(slow_client_timeout_s=0.1)) as server:
        _, writer = await raw_request(server, b'{"input":"Hello","response_format":"pcm"}')
        stop_reading(writer)
        job = await server.engine.next_job()
        job.audio(*[bytes(1024 * 1024)] * 16)
        async with asyncio.timeout(WAIT_S):
            await job.is_aborted.wait()
        await wait_until(lambda: len(server.in_flight) == 0)


# ---- failures


async def test_situation_G5_a_failure_before_the_first_byte_is_a_proper_status(
    server: Server, client: httpx2.AsyncClient
) -> None:
    """Nothing is sent before there is audio, so each failure has its own status."""
    for error, status in (
        (Overloaded("full", code="queue_full", retry_after_s=2.5), 429),
        (StageError("secret path /root", where="talker/0#1"), 500),
        (ReplicaLost("exit 9", where="vocoder"), 503),
        (InvalidRequest("speed 9 is not possible", param="speed"), 400),
    ):
        server.engine.script = lambda job, error=error: job.fail(error)
        reply = await client.post(SPEECH, json={"input": "Hello"})
        assert reply.status_code == status
        assert reply.headers["content-type"] == "application/json"
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("pieces", [1, 2, 3])
async def test_situation_G1_a_failure_after_the_first_byte_breaks_the_body(
    server: Server, client: httpx2.AsyncClient, caplog: pytest.LogCaptureFixture, pieces: int
) -> None:
    """The client gets the audio so far and then an error, never a clean end; no traceback is logged."""
    server.engine.script = lambda job: job.audio(*PIECES[:pieces]).fail(ReplicaLost("exit 9"))
    received: list[bytes] = []

    async def listen() -> None:
        body = {"input": "Hello", "response_format": "pcm"}
        async with client.stream("POST", SPEECH, json=body) as reply:
            async for data in reply.aiter_raw():
                received.append(data)  # noqa: PERF401 - what came before the error counts

    with pytest.raises(httpx2.RemoteProtocolError):
        await listen()
    assert b"".join(received) == b"".join(PIECES[:pieces])
    assert "Traceback" not in caplog.text
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_buffered_reply_that_fails_late_is_still_a_proper_status(
    server: Server, client: httpx2.AsyncClient
) -> None:
    """Nothing was sent yet, so the failure is the status."""
    server.engine.script = lambda job: job.audio(*PIECES).fail(StageError("broke", where="vocoder"))
    reply = await client.post(SPEECH, json={"input": "Hello", "stream": False})
    assert (reply.status_code, reply.json()["error"]["code"]) == (500, "stage_failed")


async def test_another_asgi_server_is_told_by_an_exception(server: Server) -> None:
    """Without our extension, the application raises, so that the body is not ended cleanly."""
    server.engine.script = lambda job: job.audio(PIECES[0]).fail(StageError("broke"))
    app = server.http.config.app
    transport = httpx2.ASGITransport(app)  # pyright: ignore[reportArgumentType] - an ASGI application
    async with httpx2.AsyncClient(transport=transport, base_url="http://x") as client:
        with pytest.raises(BodyBroken):
            await client.post(SPEECH, json={"input": "Hello"})


async def test_no_audio_in_time_is_a_timeout() -> None:
    """The wait for the first audio is bounded; the request is aborted."""
    settings = SETTINGS.__class__(first_chunk_timeout_s=0.05)
    async with running_server(settings) as server, httpx2.AsyncClient() as client:
        reply = await client.post(server.url + SPEECH, json={"input": "Hello"})
        assert (reply.status_code, reply.json()["error"]["code"]) == (504, "stage_timeout")
        assert server.engine.jobs[0].is_aborted.is_set()


async def test_situation_F10_a_text_without_audio_is_no_success(
    server: Server, client: httpx2.AsyncClient
) -> None:
    """A request that finishes without a sample is refused, and not worth repeating."""
    server.engine.script = lambda job: job.audio(b"").finish()
    for stream in (True, False):
        reply = await client.post(SPEECH, json={"input": "…", "stream": stream})
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "no_audio")


async def test_a_buffered_reply_has_a_bound(server: Server, client: httpx2.AsyncClient) -> None:
    """Audio that is too long to be collected is refused, and its request is aborted."""
    piece = bytes(8 * 1024 * 1024)
    server.engine.script = lambda job: job.audio(*[piece] * 9)
    reply = await client.post(SPEECH, json={"input": "Hello", "stream": False})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "stream")
    assert server.engine.jobs[0].is_aborted.is_set()


async def test_a_chunk_that_cuts_a_sample_is_the_stages_fault(
    server: Server, client: httpx2.AsyncClient
) -> None:
    """Only whole frames are written; the rest of the request is not wanted."""
    server.engine.script = lambda job: job.audio(b"\x01\x00\x02")
    reply = await client.post(SPEECH, json={"input": "Hello"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (500, "stage_failed")
    assert server.engine.jobs[0].is_aborted.is_set()


async def test_a_request_aborted_by_others_is_answered(
    server: Server, client: httpx2.AsyncClient
) -> None:
    """A client that is still there learns that its request was aborted."""
    server.engine.script = lambda job: job.fail(Cancelled("by an operator"))
    reply = await client.post(SPEECH, json={"input": "Hello"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (499, "cancelled")


async def test_while_the_engine_starts_requests_are_sent_away(
    server: Server, client: httpx2.AsyncClient
) -> None:
    """Before every stage was ready once: 503, with the time of the next try."""
    server.engine.readiness = Readiness({TALKER: 1}, (replica(TALKER, "loading"),))
    reply = await client.post(SPEECH, json={"input": "Hello"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "engine_starting")
    assert (reply.headers["retry-after"], reply.headers["x-should-retry"]) == ("2", "true")
    assert server.engine.jobs == []


async def test_situation_A7_without_an_engine_requests_fail_at_once(
    server: Server, client: httpx2.AsyncClient
) -> None:
    """While the engine is gone each request gets 503; when it is back, they are served."""
    server.engine.script = speak
    server.engine.state = EngineState.LOST
    for _ in range(10):
        reply = await client.post(SPEECH, json={"input": "Hello"})
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "engine_dead")
    server.engine.state = EngineState.ALIVE
    assert (await client.post(SPEECH, json={"input": "Hello"})).status_code == 200


async def test_a_pipeline_without_pcm_is_refused(
    server: Server, client: httpx2.AsyncClient
) -> None:
    """Samples in a format that can't be labelled are not sent."""
    stages = server.engine.readiness
    stages.stage(server.engine.pipelines[0].outputs[0][1], facts(rate_hz=24000, format="f32"))
    reply = await client.post(SPEECH, json={"input": "Hello"})
    assert reply.status_code == 500


# ---- clients that leave


async def leave_before_audio(server: Server) -> Job:
    """Hang up while the first audio is waited for."""
    _, writer = await raw_request(server, b'{"input":"Hello"}')
    job = await server.engine.next_job()
    hang_up(writer)
    return job


async def leave_mid_stream(server: Server) -> Job:
    """Hang up after the first audio."""
    body = b'{"input":"Hello","response_format":"pcm"}'
    reader, writer = await raw_request(server, body)
    job = await server.engine.next_job()
    job.audio(PIECES[0])
    await in_time(reader.readuntil(PIECES[0]))
    hang_up(writer)
    return job


async def leave_while_buffering(server: Server) -> Job:
    """Hang up while the reply is collected."""
    _, writer = await raw_request(server, b'{"input":"Hello","stream":false}')
    job = await server.engine.next_job()
    job.audio(PIECES[0])
    hang_up(writer)
    return job


async def leave_at_once(server: Server) -> Job:
    """Hang up in the same turn as the request, before anything was begun."""
    _, writer = await raw_request(server, b'{"input":"Hello"}')
    hang_up(writer)
    return await server.engine.next_job()


@pytest.mark.parametrize(
    "leave", [leave_before_audio, leave_mid_stream, leave_while_buffering, leave_at_once]
)
async def test_situation_B1_B4_a_client_that_leaves_stops_its_request(
    server: Server, caplog: pytest.LogCaptureFixture, leave: Callable[[Server], Awaitable[Job]]
) -> None:
    """Whenever the client goes, the request is aborted once and nothing is left, or logged as an error."""
    job = await leave(server)
    async with asyncio.timeout(WAIT_S):
        await job.is_aborted.wait()
    await wait_until(lambda: len(server.in_flight) == 0)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_situation_B4_a_client_that_leaves_in_its_body_leaves_nothing(server: Server) -> None:
    """No request is submitted for half a body."""
    _, writer = await server.connect()
    writer.write(f"POST {SPEECH} HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{{".encode())
    await writer.drain()
    await wait_until(lambda: bool(server.http.server_state.tasks))
    hang_up(writer)
    await wait_until(lambda: not server.http.server_state.tasks)
    assert server.engine.jobs == []


async def test_a_connection_serves_one_request_after_another(
    server: Server, client: httpx2.AsyncClient
) -> None:
    """Errors and streams both leave the connection usable."""
    server.engine.script = speak
    for body in ({"input": "Hello"}, {}, {"input": "Hello", "stream": False}, {"input": "Hello"}):
        await client.post(SPEECH, content=json.dumps(body))
    assert len(server.http.server_state.connections) == 1


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (b"", b""),
        (b"POST /v1/audio/speech HTTP/1.1\r\nHost: x\r\n", b""),
        (b"POST /v1/audio/speech HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{", b"408"),
    ],
    ids=["nothing", "half a head", "half a body"],
)
async def test_a_request_that_stops_coming_is_not_waited_for(sent: bytes, answer: bytes) -> None:
    """A silent connection is closed after a bounded pause; half a body is told so."""
    settings = msgspec.structs.replace(SETTINGS, receive_timeout_s=0.1)
    async with running_server(settings) as server:
        reader, writer = await server.connect()
        writer.write(sent)
        reply = await in_time(reader.read())
        assert reply.split(b" ")[1:2] == ([answer] if answer else [])
