"""`stretto doctor`: every check has a verdict, a value, and a next step when something is wrong."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import pytest

from stretto.cli.doctor import Check, examine
from tests.repository.project import declared, names


def doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it as a user does."""
    return subprocess.run(
        [sys.executable, "-m", "stretto", "doctor", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.e2e
def test_a_sound_machine_makes_a_sentence() -> None:
    """All is well, and the self-test tells times."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    done = subprocess.run(
        [sys.executable, "-m", "stretto", "doctor"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"PATH": "/usr/bin:/bin", "STRETTO_SERVER__PORT": str(port)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAIL" not in done.stdout
    assert "first output after" in done.stdout
    assert "of real time" in done.stdout


def test_checks_are_lines_or_json() -> None:
    """Without the self-test it takes no process."""
    lines: list[str] = []
    assert examine(["scripted"], {}, lines.append, self_test=False) == 0
    whats = [line[5:].partition(":")[0] for line in lines]
    assert whats[:4] == ["python", "cores", "memory", "shared memory"]
    assert whats[-2:] == ["packages", "packages [server]"]
    assert all(name in lines[-2] for name in names(declared()))
    assert all(name in lines[-1] for name in names(declared("server")) - names(declared()))
    printed: list[str] = []
    examine(["scripted"], {}, printed.append, self_test=False, as_json=True)
    assert [each["what"] for each in json.loads(printed[0])] == whats


def test_a_taken_port_is_told_with_its_holder() -> None:
    """A warning: another port can be chosen."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        lines: list[str] = []
        environ = {"STRETTO_SERVER__PORT": str(port)}
        assert examine(["scripted"], environ, lines.append, self_test=False) == 0
    line = next(line for line in lines if " port:" in line)
    assert line.startswith("warn")
    assert "in use" in line
    assert f"--port {port + 1}" in line


def test_too_many_threads_are_a_warning() -> None:
    """They would take turns."""
    lines: list[str] = []
    environ = {"STRETTO_STAGES__TONE__THREADS": "200"}
    examine(["scripted"], environ, lines.append, self_test=False)
    assert any(line.startswith("warn cores") and "threads" in line for line in lines)


@pytest.mark.slow
@pytest.mark.e2e
def test_a_pipeline_that_does_not_start_fails_the_self_test(tmp_path: object) -> None:
    """The reason is the stage's own; the exit code is 1."""
    lines: list[str] = []
    environ = {
        "STRETTO_STAGES__TONE__BACKEND": "nowhere:Nothing",
        "STRETTO_ORCHESTRATOR__LIMITS__BREAKER_DEATHS": "1",
    }
    assert examine(["scripted"], environ, lines.append) == 1
    assert lines[-1].startswith("FAIL self-test")
    assert "nowhere" in lines[-1]


def test_a_check_is_one_line() -> None:
    """With its step only if there is one."""
    assert str(Check("ok", "a", "b")) == "ok   a: b"
    assert str(Check("FAIL", "a", "b", "c")) == "FAIL a: b - c"
