"""Bad input: each mistake gets 4xx with the field and a code, and the server goes on."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.support.fake_orchestrator import WAIT_S, wait_until

if TYPE_CHECKING:
    import httpx2

    from tests.server.conftest import Server

SPEECH = "/v1/audio/speech"

BAD: list[tuple[bytes, int, str | None, str]] = [
    (b"", 400, None, "invalid_json"),
    (b"input=hello", 400, None, "invalid_json"),
    (b'{"input":"a"', 400, None, "invalid_json"),
    (b'{"input":"\xff"}', 400, None, "invalid_json"),
    (b'{"input":"\\ud800"}', 400, None, "invalid_json"),
    (b"[" * 20_000, 400, None, "invalid_json"),
    (b'{"input":"a","seed":' + b"9" * 5000 + b"}", 400, None, "invalid_json"),
    (b"[]", 400, None, "invalid_type"),
    (b"null", 400, None, "invalid_type"),
    (b"{}", 400, "input", "missing_required_parameter"),
    (b'{"input":null}', 400, "input", "invalid_type"),
    (b'{"input":["a"]}', 400, "input", "invalid_type"),
    (b'{"input":""}', 400, "input", "invalid_value"),
    (b'{"input":" \\n\\t"}', 400, "input", "invalid_value"),
    (b'{"input":"' + b"a" * 1001 + b'"}', 400, "input", "string_above_max_length"),
    (b'{"input":"a","model":1}', 400, "model", "invalid_type"),
    (b'{"input":"a","model":"speach"}', 404, "model", "model_not_found"),
    (b'{"input":"a","model":""}', 404, "model", "model_not_found"),
    (b'{"input":"a","voice":true}', 400, "voice", "invalid_type"),
    (b'{"input":"a","voice":["alloy"]}', 400, "voice", "invalid_type"),
    (b'{"input":"a","voice":{}}', 400, "voice.id", "invalid_type"),
    (b'{"input":"a","voice":{"id":1}}', 400, "voice.id", "invalid_type"),
    (b'{"input":"a","voice":""}', 400, "voice", "invalid_value"),
    (b'{"input":"a","voice":"aloy"}', 404, "voice", "voice_not_found"),
    (b'{"input":"a","voice":"../../etc/passwd"}', 404, "voice", "voice_not_found"),
    (b'{"input":"a","voice":"\\u0000"}', 404, "voice", "voice_not_found"),
    (b'{"input":"a","response_format":"ogg"}', 400, "response_format", "unsupported_value"),
    (b'{"input":"a","response_format":"exe"}', 400, "response_format", "unsupported_value"),
    (b'{"input":"a","response_format":["wav"]}', 400, "response_format", "invalid_type"),
    (b'{"input":"a","speed":0.2}', 400, "speed", "invalid_value"),
    (b'{"input":"a","speed":4.1}', 400, "speed", "invalid_value"),
    (b'{"input":"a","speed":NaN}', 400, "speed", "invalid_type"),
    (b'{"input":"a","speed":true}', 400, "speed", "invalid_type"),
    (b'{"input":"a","speed":"1"}', 400, "speed", "invalid_type"),
    (b'{"input":"a","stream_format":"chunks"}', 400, "stream_format", "unsupported_value"),
    (b'{"input":"a","stream_format":"sse","stream":false}', 400, "stream", "unsupported_value"),
    (b'{"input":"a","stream":"yes"}', 400, "stream", "invalid_type"),
    (b'{"input":"a","seed":1.5}', 400, "seed", "invalid_type"),
    (b'{"input":"a","seed":false}', 400, "seed", "invalid_type"),
    (b'{"input":"a","seed":99999999999999999999}', 400, "seed", "invalid_value"),
]


@pytest.mark.parametrize(
    ("body", "status", "param", "code"), BAD, ids=lambda value: str(value)[:40]
)
async def test_situation_O1_each_mistake_is_named(
    client: httpx2.AsyncClient,
    server: Server,
    body: bytes,
    status: int,
    param: str | None,
    code: str,
) -> None:
    """Status, param and code are those of the table; nothing reaches the engine, nothing is a 5xx."""
    reply = await client.post(SPEECH, content=body)
    found = reply.json()["error"]
    assert (reply.status_code, found["param"], found["code"]) == (status, param, code)
    assert found["type"] == "invalid_request_error"
    assert server.engine.jobs == []


async def test_near_matches_are_offered(client: httpx2.AsyncClient) -> None:
    """A slip of the pen is answered with what was probably meant."""
    for body, meant in (
        ({"input": "a", "voice": "aloy"}, "'alloy'"),
        ({"input": "a", "model": "speach"}, "'speech'"),
        ({"input": "a", "response_format": "flac"}, "mp3, wav or pcm"),
    ):
        reply = await client.post(SPEECH, json=body)
        assert meant in reply.json()["error"]["message"]


async def test_null_means_the_default(client: httpx2.AsyncClient, server: Server) -> None:
    """Clients that send every field with null are served."""
    server.engine.script = lambda job: job.audio(b"\1\0").finish()
    names = ("model", "voice", "response_format", "speed", "stream_format", "stream", "seed")
    body = {"input": "Hello", **dict.fromkeys(names)}
    assert (await client.post(SPEECH, json=body)).status_code == 200


async def test_situation_L5_a_large_body_is_refused_unread(
    server: Server, client: httpx2.AsyncClient
) -> None:
    """A declared size above the limit is refused before the body, and the connection ends."""
    reader, writer = await server.connect()
    head = f"POST {SPEECH} HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 9999999\r\n\r\n"
    writer.write(head.encode())
    async with asyncio.timeout(WAIT_S):
        reply = await reader.read()
    assert reply.startswith(b"HTTP/1.1 413")
    assert b'"request_too_large"' in reply
    assert (await client.get("/health")).status_code == 200


async def test_situation_L5_no_declared_size_is_no_loophole(
    server: Server, client: httpx2.AsyncClient
) -> None:
    """A chunked body is refused as soon as it passes the limit, though its end never comes."""
    reader, writer = await server.connect()
    writer.write(
        f"POST {SPEECH} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n".encode()
    )
    for _ in range(5):
        writer.write(b"4000\r\n" + b" " * 0x4000 + b"\r\n")
    async with asyncio.timeout(WAIT_S):
        assert (await reader.readline()).startswith(b"HTTP/1.1 413")
    writer.transport.abort()
    await wait_until(lambda: not server.http.server_state.tasks)
    assert (await client.get("/health")).status_code == 200
