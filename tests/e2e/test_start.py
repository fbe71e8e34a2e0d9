"""Starts that go wrong: told at once with the reason, and nothing is left behind."""

from __future__ import annotations

import time
from textwrap import dedent
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.e2e.serving import launch, serving

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PIPELINE = """
    version: 1
    name: mine
    inputs: [text]
    outputs: {audio: last}
    stages:
      first:
        backend: %(backend)s
        options: %(options)s
        start_timeout_s: 0.5
        %(more)s
        inputs:
          text: {from: request.text, mode: stream}
      last:
        backend: scripted
        options: {script: {mode: count}}
        inputs:
          text: {from: first, mode: stream}
    orchestrator:
      limits: {breaker_deaths: 1, respawn_min_s: 0.01}
"""

BACKEND = """
    import os
    from stretto.backends.contract import Capabilities, Chunk

    class Mine:
        capabilities = Capabilities(kind="function", unit="items", devices=("cpu", "cuda"))

        def __init__(self, device, does="work"):
            self.device = device
            self.does = does

        def load(self, progress):
            if self.does == "exit":
                print("these are my last words", flush=True)
                os._exit(9)
            if self.does == "raise":
                raise RuntimeError("no weights here")
            if self.does == "hang":
                import threading
                threading.Event().wait()
            if self.does == "allocate":
                self.held = bytearray(512 * 1024 * 1024)

        def open(self, task):
            return task

        def step(self, items):
            seen = f"{self.device} {os.environ.get('CUDA_VISIBLE_DEVICES')}"
            return [[Chunk(values={"text": seen})] if i.payload else [] for _, i in items]

        def close(self, state):
            pass
"""


def write(
    folder: Path, backend: str = "mine:Mine", options: str = "{}", more: str = "slots: 4"
) -> str:
    """Write the pipeline and its module; return the file's path."""
    folder.mkdir(exist_ok=True)
    values = {"backend": backend, "options": options, "more": more}
    (folder / "mine.yaml").write_text(dedent(PIPELINE) % values)
    (folder / "mine.py").write_text(dedent(BACKEND))
    return str(folder / "mine.yaml")


@pytest.mark.parametrize(
    ("does", "reason"),
    [
        ("exit", "exit code 9"),
        ("raise", "no weights here"),
        ("hang", "not loaded within|no progress|0.5 s"),
    ],
)
def test_situation_J7_a_stage_that_does_not_start_is_told_at_once(
    tmp_path: Path, does: str, reason: str
) -> None:
    """The server ends by itself with the reason and the tail of the stage's log."""
    began = time.monotonic()
    server = launch(write(tmp_path, options=f"{{does: {does}}}"))
    found = server.wait_line("the engine did not start|giving up|did not start")
    tree = psutil.Process(server.process.pid).children(recursive=True)
    assert server.process.wait(10) == 3, server.log
    assert time.monotonic() - began < 6.0
    assert found
    server.wait_line(reason)
    if does == "exit":
        assert "these are my last words" in server.log
    assert not psutil.wait_procs(tree, timeout=5)[1]


def test_a_module_beside_the_pipeline_file_is_found(tmp_path: Path) -> None:
    """The server may be started anywhere."""
    file = write(tmp_path / "folder")
    with serving(file, cwd=tmp_path) as server:
        assert server.processes("first/0")


def test_a_device_that_the_backend_does_not_know_is_refused(tmp_path: Path) -> None:
    """The text names stage, device, and what is allowed."""
    server = launch(write(tmp_path, backend="scripted", more="device: cuda:1"))
    assert server.process.wait(20) == 3
    server.wait_line(
        r"stage 'first' is given device 'cuda:1', but backend 'scripted' computes on cpu only"
    )


def test_a_replica_beyond_its_memory_limit_fails_alone(tmp_path: Path) -> None:
    """An allocation above `memory_bytes` is that replica's error, told by its name."""
    file = write(tmp_path, options="{does: allocate}", more="memory_bytes: 268435456")
    server = launch(file)
    assert server.process.wait(20) == 3
    server.wait_line("MemoryError")
