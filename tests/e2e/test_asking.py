"""`/metrics`, `stretto ps`, `stretto story` and `stretto call` of a running server."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import time
from textwrap import dedent
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.serving import Server, serving, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PIPELINE = """
    version: 1
    name: slow
    inputs: [text]
    outputs: {audio: tone}
    stages:
      relay:
        backend: scripted
        options: {script: {mode: count, chunks: 200, delay_s: 0.05}}
        slots: 64
        inputs: {text: {from: request.text}}
      tone:
        backend: scripted
        options: {script: {mode: count, chunks: 1, bytes: 960}}
        slots: 64
        inputs: {text: {from: relay}}
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A server whose requests take ten seconds, with two API processes."""
    (tmp_path / "slow.yaml").write_text(dedent(PIPELINE))
    with serving(
        "slow.yaml", "--api-processes", "2", "--drain-timeout", "0", cwd=tmp_path
    ) as server:
        yield server


def stretto(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a verb as a user does."""
    return subprocess.run(
        [sys.executable, "-m", "stretto", *arguments],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def connect(server: Server) -> http.client.HTTPConnection:
    """Return a connection."""
    parts = urlsplit(server.url)
    return http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=10)


def begin(server: Server, label: str) -> http.client.HTTPConnection:
    """Begin a long request."""
    connection = connect(server)
    body = b'{"input":"hello","response_format":"pcm"}'
    connection.request("POST", "/v1/audio/speech", body, {"x-request-id": label})
    return connection


def channels(server: Server) -> float | None:
    """Return how many are connected; `None` from an API process that has not found its engine yet."""
    connection = connect(server)
    connection.request("GET", "/metrics")
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    if response.status != 200:
        return None
    families = {family.name: family for family in text_string_to_metric_families(text)}
    return families["stretto_channels"].samples[0].value


def scrape(server: Server) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return every sample of `/metrics`."""
    connection = connect(server)
    connection.request("GET", "/metrics")
    response = connection.getresponse()
    assert response.status == 200
    text = response.read().decode()
    connection.close()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def plain(server: Server, name: str) -> float:
    """Return the value of a sample without labels."""
    return scrape(server)[(f"stretto_{name}", ())]


def test_situation_K1_gauges_are_zero_after_everything_was_aborted(server: Server) -> None:
    """A hundred requests at once, all clients gone, then silence: zeros within two seconds."""
    clients = [begin(server, f"load-{n}") for n in range(100)]
    wait_until(lambda: plain(server, "requests_accepted_total") == 100)
    assert plain(server, "requests_running") + plain(server, "requests_queued") == 100
    for client in clients:
        client.close()
    gone_at = time.monotonic()
    gauges = ("requests_queued", "requests_running", "requests_draining", "payloads_held")
    wait_until(lambda: not any(plain(server, name) for name in gauges))
    assert time.monotonic() - gone_at < 2.0
    found = scrape(server)
    for name in ("stage_tasks", "stage_reserved"):
        for stage in ("relay", "tone"):
            assert found[(f"stretto_{name}", (("stage", stage),))] == 0
    assert plain(server, "requests_cancelled_total") == 100
    aborted = ("code", "200"), ("endpoint", "/v1/audio/speech")
    left = ("code", "499"), ("endpoint", "/v1/audio/speech")
    http_total = sum(found.get(("stretto_http_requests_total", key), 0) for key in (aborted, left))
    assert http_total == 100


def test_metrics_outlive_an_api_process_and_are_refused_without_an_engine(server: Server) -> None:
    """The one owner is the orchestrator: any API process answers, and none can when it is gone."""
    for label in ("one", "two", "three"):
        connection = connect(server)
        connection.request("GET", "/version", headers={"x-request-id": label})
        connection.getresponse().read()
        connection.close()
    key = ("stretto_http_requests_total", (("code", "200"), ("endpoint", "/version")))
    wait_until(lambda: scrape(server).get(key) == 3)
    before = plain(server, "channels")
    for process in server.processes("run_api"):
        process.kill()
    wait_until(lambda: len(server.processes("run_api")) == 2)
    server.wait_line("the API process api/1 has ended")
    wait_until(lambda: channels(server) == before)  # each may be the one that is asked next
    assert scrape(server)[key] == 3

    (orchestrator,) = server.processes("run_orchestrator")
    orchestrator.send_signal(signal.SIGSTOP)
    try:
        connection = connect(server)
        connection.request("GET", "/metrics")
        response = connection.getresponse()
        assert response.status == 504
        assert json.loads(response.read())["error"]["code"] == "stage_timeout"
        connection.close()
        hung = stretto("ps")  # all engines are asked at the same time
        assert "did not answer within 2 s" in hung.stdout
    finally:
        orchestrator.send_signal(signal.SIGCONT)


def test_ps_tells_what_runs_and_what_each_request_waits_for(
    server: Server, request: pytest.FixtureRequest
) -> None:
    """Run, address, replicas, and a line per open request; also for programs."""
    client = begin(server, "mine")
    request.addfinalizer(client.close)
    wait_until(lambda: plain(server, "requests_running") == 1)
    done = stretto("ps")
    assert done.returncode == 0, done.stderr
    assert server.url in done.stdout
    assert "1 running" in done.stdout
    row = next(line for line in done.stdout.splitlines() if " mine " in line)
    assert "relay/0#1 computes" in row or "waits for" in row
    runs = json.loads(stretto("ps", "--json").stdout)
    (found,) = [run for run in runs if run["facts"]["url"] == server.url]  # others may run here
    assert [each["label"] for each in found["status"]["open"]] == ["mine"]
    assert stretto("ps", "--run", "nobody").returncode == 1


def test_a_story_is_told_while_a_request_runs_and_after_it_has_ended(server: Server) -> None:
    """By the client's own name for it; an unknown one gets names that are known."""
    client = begin(server, "mine")
    wait_until(lambda: plain(server, "requests_running") == 1)
    told = stretto("story", "mine")
    assert told.returncode == 0, told.stderr
    assert "relay: dispatched to relay/0#1" in told.stdout
    assert "now: " in told.stdout
    client.close()
    wait_until(lambda: plain(server, "requests_running") == 0)
    ended = stretto("story", "mine")
    assert "now: " not in ended.stdout
    assert "relay: dispatched" in ended.stdout
    (found,) = json.loads(stretto("story", "mine", "--json").stdout)
    assert found["label"] == "mine"
    unknown = stretto("story", "yours")
    assert unknown.returncode == 1
    assert "mine" in unknown.stderr


def test_without_an_engine_there_is_one_line_with_the_next_step() -> None:
    """Exit code 1, and nothing but the line."""
    done = stretto("ps", "--run", "nobody")
    assert (done.returncode, done.stderr) == (1, "")
    assert "stretto serve" in done.stdout


def test_call_tells_what_came_of_it_at_each_replica(server: Server) -> None:
    """Values, failures and the exit code; a slow call does not hold up anything."""
    runs = json.loads(stretto("ps", "--json").stdout)
    (run,) = [each["run"] for each in runs if each["facts"]["url"] == server.url]
    done = stretto("call", "ping", "--run", run)
    assert done.returncode == 0, done.stderr
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["REPLICA", "STATUS", "RESULT"],
        ["relay/0#1", "ok", "pong"],
        ["tone/0#1", "ok", "pong"],
    ]
    echo = ("call", "echo", "--run", run, "--stage", "tone", "--json")
    told = json.loads(stretto(*echo, "--argument", 'value={"a": [1]}').stdout)
    assert told == {"tone/0#1": {"status": "ok", "value": {"a": [1]}}}
    assert (
        json.loads(stretto(*echo, "--argument", "value=a b").stdout)["tone/0#1"]["value"] == "a b"
    )
    failed = stretto("call", "wait", "--run", run)
    assert failed.returncode == 1
    assert "missing a required argument" in failed.stdout
    unknown = stretto("call", "nothing", "--run", run)
    assert unknown.returncode == 1
    assert "methods are ping" in unknown.stderr
    late = stretto("call", "wait", "--run", run, "--timeout", "0.1", "--argument", "seconds=9")
    assert late.returncode == 1
    assert "relay/0#1, tone/0#1" in late.stderr
    assert stretto("call", "profile_start", "--run", run, "--stage", "tone").returncode == 0
    report = stretto("call", "profile_stop", "--run", run, "--stage", "tone")
    assert "tone/0#1:" in report.stdout
    assert "cumulative" in report.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--run", "nobody"], "stretto serve"), (["--argument", "x"], "NAME=VALUE")],
    ids=["no engine", "no argument"],
)
def test_a_call_that_cannot_be_made_is_one_line(arguments: list[str], words: str) -> None:
    """Exit code 2: wrong usage."""
    done = stretto("call", "ping", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
