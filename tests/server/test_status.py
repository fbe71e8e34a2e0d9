"""Health, readiness, version, models, unknown routes, and what every reply carries."""

from __future__ import annotations

import logging
import re
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

import pytest

import stretto
from stretto.engine.client import EngineState
from stretto.engine.readiness import Readiness
from stretto.server.boundary import HttpDate
from tests.support.fake_engine import ready_stages
from tests.support.fake_orchestrator import TALKER, VOCODER, facts, replica, wait_until

if TYPE_CHECKING:
    import httpx2

    from tests.server.conftest import Server


async def test_models_are_the_speech_pipelines(client: httpx2.AsyncClient) -> None:
    """The list has OpenAI's form; OpenAI's names find the pipeline behind them."""
    listed = (await client.get("/v1/models")).json()
    assert (listed["object"], [model["id"] for model in listed["data"]]) == ("list", ["speech"])
    for name in ("speech", "tts-1"):
        model = (await client.get(f"/v1/models/{name}")).json()
        assert (model["id"], model["object"], model["root"]) == (name, "model", "speech")
        assert (model["owned_by"], model["voices"]) == ("stretto", ["heart"])
        assert isinstance(model["created"], int)
    for name in ("nope", "a/b", "%ff", "..%2f"):
        reply = await client.get(f"/v1/models/{name}")
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")


async def test_readiness_and_health_follow_the_engine(
    server: Server, client: httpx2.AsyncClient
) -> None:
    """Ready needs every stage; healthy needs an engine, or one that is still to come."""
    loading = Readiness(
        {TALKER: 1, VOCODER: 1},
        (replica(TALKER), replica(VOCODER, "loading", detail="weights", fraction=0.4)),
    )
    degraded = ready_stages()
    degraded.replica(replica(VOCODER, "dead", detail="exit code 9"))
    cases = [
        (EngineState.STARTING, Readiness({}), 200, 503, "starting"),
        (EngineState.ALIVE, loading, 200, 503, "starting"),
        (EngineState.ALIVE, ready_stages(), 200, 200, "ready"),
        (EngineState.ALIVE, degraded, 200, 503, "degraded"),
        (EngineState.LOST, ready_stages(), 503, 503, "engine_dead"),
        (EngineState.GONE, ready_stages(), 503, 503, "engine_dead"),
    ]
    for state, readiness, health, ready, status in cases:
        server.engine.state = state
        server.engine.readiness = readiness
        assert (await client.get("/health")).status_code == health
        reply = await client.get("/ready")
        assert (reply.status_code, reply.json()["status"]) == (ready, status)
    server.engine.state = EngineState.ALIVE
    server.engine.readiness = loading
    stages = (await client.get("/ready")).json()["stages"]
    assert stages["vocoder"] == {
        "ready": 0,
        "target": 1,
        "replicas": [
            {"replica": "vocoder/0#1", "state": "loading", "detail": "weights", "fraction": 0.4}
        ],
    }


async def test_models_before_and_after_the_engine(
    server: Server, client: httpx2.AsyncClient
) -> None:
    """Before the first answer of the engine the list is not empty but not known."""
    server.engine.pipelines = ()
    server.engine.state = EngineState.STARTING
    reply = await client.get("/v1/models")
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "engine_starting")
    server.engine.state = EngineState.GONE
    reply = await client.get("/v1/models/speech")
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "engine_dead")


async def test_version_and_index(client: httpx2.AsyncClient) -> None:
    """Both tell the version; the index names the models."""
    assert (await client.get("/version")).json() == {"version": stretto.__version__}
    index = await client.get("/")
    assert (index.json()["models"], index.text.count("\n")) == (["speech"], 0)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nope", 404), ("GET", "/v1/audio/speech", 405), ("DELETE", "/v1/models", 405)],
)
async def test_unknown_routes_and_methods_have_openais_form(
    client: httpx2.AsyncClient, method: str, path: str, status: int
) -> None:
    """404 and 405 say what was asked; the allowed methods are kept."""
    reply = await client.request(method, path)
    error = reply.json()["error"]
    assert (reply.status_code, error["type"], error["code"]) == (
        status,
        "invalid_request_error",
        None,
    )
    assert f"{method} {path}" in error["message"]
    assert ("allow" in reply.headers) == (status == 405)


async def test_openapi_documents_the_body(client: httpx2.AsyncClient) -> None:
    """The schema has the fields of the speech request, though the body is parsed by hand."""
    document = (await client.get("/openapi.json")).json()
    body = document["paths"]["/v1/audio/speech"]["post"]["requestBody"]["content"][
        "application/json"
    ]
    assert {"input", "voice", "response_format", "speed", "stream", "seed"} <= set(
        body["schema"]["properties"]
    )
    assert body["schema"]["required"] == ["input"]


async def test_every_reply_has_one_date_and_one_request_id(
    server: Server, client: httpx2.AsyncClient
) -> None:
    """Successes, failures and unknown routes alike; an unfit id is replaced."""
    server.engine.script = lambda job: job.audio(b"\1\0").finish()
    replies = [
        await client.get("/health"),
        await client.get("/nope"),
        await client.post("/v1/audio/speech", content=b""),
        await client.post("/v1/audio/speech", json={"input": "Hello"}),
    ]
    for reply in replies:
        assert len(reply.headers.get_list("date")) == 1
        assert parsedate_to_datetime(reply.headers["date"]).tzinfo is not None
        assert re.fullmatch(r"req-[0-9a-f]{16}", reply.headers["x-request-id"])
    assert len({reply.headers["x-request-id"] for reply in replies}) == len(replies)
    for given, kept in (("my-id.1", True), ("two words", False), ("x" * 129, False), ("é", False)):
        reply = await client.get("/health", headers=[(b"x-request-id", given.encode())])
        assert (reply.headers["x-request-id"] == given) == kept


def test_the_date_is_formatted_once_a_second() -> None:
    """Within a second the same bytes are returned."""
    now = [0.0]
    date = HttpDate(lambda: now[0])
    first = date()
    assert first == b"Thu, 01 Jan 1970 00:00:00 GMT"
    now[0] = 0.9
    assert date() is first
    now[0] = 1.0
    assert date() == b"Thu, 01 Jan 1970 00:00:01 GMT"


async def test_the_access_log_has_one_line_per_request_and_probes_are_quiet(
    server: Server, client: httpx2.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    """Method, path, status, bytes and id are there; control characters of the path are not."""
    caplog.set_level(logging.INFO)
    server.engine.script = lambda job: job.audio(b"\1\0").finish()
    await client.get("/health")
    await client.get("/ready")
    await client.get("/a%0ab")
    body = {"input": "Hello", "response_format": "wav"}
    await client.post("/v1/audio/speech", json=body, headers={"x-request-id": "i"})

    def lines() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == "stretto.access"]

    await wait_until(lambda: len(lines()) == 2)  # the line is written after the reply
    assert "uvicorn.access" not in {record.name for record in caplog.records}
    assert [re.sub(r"\d+ms|req-\w+", "…", line) for line in lines()] == [
        "127.0.0.1 GET /a%0ab 404 … 106B …",
        "127.0.0.1 POST /v1/audio/speech 200 … 46B i",
    ]


async def test_a_failure_of_ours_is_a_500_in_openais_form(
    server: Server, client: httpx2.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    """What nobody foresaw is answered without its text, and logged with its traceback."""
    server.engine.pipelines = 5  # pyright: ignore[reportAttributeAccessIssue] - a bug
    reply = await client.get("/v1/models")
    assert (reply.status_code, reply.json()["error"]["code"]) == (500, "internal_error")
    assert "not iterable" not in reply.text
    assert reply.headers["x-request-id"]
    assert [record for record in caplog.records if record.exc_info]
    server.engine.pipelines = ()


async def test_a_second_voice_stage_adds_its_voices(
    server: Server, client: httpx2.AsyncClient
) -> None:
    """Voices of all stages are offered once each."""
    server.engine.readiness.stage(VOCODER, facts(voices=("heart", "deep")))
    assert (await client.get("/v1/models/speech")).json()["voices"] == ["heart", "deep"]


async def test_metrics_are_the_orchestrators_answer(
    server: Server, client: httpx2.AsyncClient
) -> None:
    """As text for Prometheus; without an engine there is none to answer."""
    server.engine.answers["metrics"] = "stretto_build_info 1.0\n"
    reply = await client.get("/metrics")
    assert (reply.status_code, reply.text) == (200, "stretto_build_info 1.0\n")
    assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    server.engine.state = EngineState.LOST
    reply = await client.get("/metrics")
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "engine_dead")


async def test_every_exchange_is_reported_once_with_a_bounded_endpoint(
    server: Server, client: httpx2.AsyncClient
) -> None:
    """The route's template, never a path that a client made up; times and audio where there was audio."""
    second = b"\1\0" * 24_000
    server.engine.script = lambda job: job.audio(second).finish()
    await client.get("/v1/models/speech")
    await client.get("/made/up")
    await client.post("/v1/audio/speech", json={"input": "Hello", "response_format": "pcm"})
    await client.post("/v1/audio/speech", json={"input": ""})
    await wait_until(lambda: len(server.engine.reports) == 4)
    found = [(report.endpoint, report.code) for report in server.engine.reports]
    assert found == [
        ("/v1/models/{model:path}", 200),
        ("other", 404),
        ("/v1/audio/speech", 200),
        ("/v1/audio/speech", 400),
    ]
    spoken, refused = server.engine.reports[2:]
    assert spoken.first_audio_s is not None
    assert 0 < spoken.first_audio_s <= spoken.duration_s
    assert refused.first_audio_s is None
