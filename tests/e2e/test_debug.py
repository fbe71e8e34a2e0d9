"""`stretto serve --debug STAGE`: the debugger in the terminal reaches the stage's backend."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import urllib.request
from textwrap import dedent
from typing import TYPE_CHECKING

import pytest

from tests.e2e.serving import READY, Server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PIPELINE = """
    version: 1
    name: stopped
    inputs: [text]
    outputs: {audio: tone}
    stages:
      loud:
        backend: loud:Loud
        inputs:
          text: {from: request.text, mode: stream}
      tone:
        backend: scripted
        options: {script: {mode: count}}
        inputs:
          text: {from: loud, mode: stream}
"""

BACKEND = """
    from stretto.backends.contract import Capabilities, Chunk

    class Loud:
        capabilities = Capabilities(kind="function", unit="characters")

        def load(self, progress):
            pass

        def open(self, task):
            return task

        def step(self, items):
            texts = [item.payload.get("text") for _, item in items]
            if any(texts):
                secret = 6 * 7
                breakpoint()
            return [[Chunk(values={"text": text})] if text else [] for text in texts]

        def close(self, state):
            pass
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A server with one stage in its own process, and a terminal of pipes."""
    (tmp_path / "stopped.yaml").write_text(dedent(PIPELINE))
    (tmp_path / "loud.py").write_text(dedent(BACKEND))
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "stretto",
            "serve",
            "stopped.yaml",
            "--port",
            "0",
            "--debug",
            "loud",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    server = Server(process)
    server.url = server.wait_line(READY.pattern).group(1)
    yield server
    if process.poll() is None:
        process.kill()
        process.wait(10)
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        stream.close()


def test_a_breakpoint_in_the_backend_stops_in_the_terminal(server: Server) -> None:
    """The request waits for the person, is answered afterwards, and the server ends in order."""
    process = server.process
    assert process.stdin is not None
    assert process.stdout is not None
    assert not server.processes("loud/0")
    assert server.processes("tone/0")
    heard: list[bytes] = []

    def ask() -> None:
        request = urllib.request.Request(  # noqa: S310 - our own server
            f"{server.url}/v1/audio/speech", b'{"input": "hello", "response_format": "pcm"}'
        )
        with urllib.request.urlopen(request, timeout=30) as response:  # noqa: S310 - as above
            heard.append(response.read())

    asking = threading.Thread(target=ask)
    asking.start()
    process.stdin.write("p 'the secret is', secret\nc\n")
    process.stdin.flush()
    lines: list[str] = []
    while "the secret is" not in "".join(lines):
        line = process.stdout.readline()
        assert line, server.log
        lines.append(line)
    assert "42" in lines[-1]
    asking.join(30)
    assert heard
    assert heard[0]
    assert server.stop() == 0, server.log


def test_an_unknown_stage_is_refused_with_the_nearest_name() -> None:
    """Nothing is started."""
    done = subprocess.run(
        [sys.executable, "-m", "stretto", "serve", "scripted", "--port", "0", "--debug", "toon"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 2
    assert "did you mean 'tone'" in done.stderr
