"""`stretto serve` as an operator meets it: start, mistakes, signals, exit codes."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import httpx2
import psutil
import pytest

from scripts.measure.idle import measure
from tests.e2e.serving import READY, Server, launch, serving, wait_until

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.e2e

LONG_TEXT = " ".join(["She opened the old wooden door slowly, and cold light filled the room."] * 6)


def stretto(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command that ends by itself."""
    return subprocess.run(
        [sys.executable, "-m", "stretto", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=50,
        check=False,
    )


def read_slowly(url: str) -> tuple[int, bool]:
    """Stream a long text; return the bytes that came and whether the end was clean."""
    size = 0
    try:
        with httpx2.stream(
            "POST", f"{url}/v1/audio/speech", json={"input": LONG_TEXT, "response_format": "pcm"}
        ) as response:
            assert response.status_code == 200
            for piece in response.iter_bytes():
                size += len(piece)
    except httpx2.RemoteProtocolError:
        return size, False
    return size, True


def test_situation_A10_sigterm_lets_streams_finish_and_leaves_nothing() -> None:
    """Eight streams run when SIGTERM comes: they end in full, and so does every process."""
    with serving("--drain-timeout", "20") as server, ThreadPoolExecutor(8) as pool:
        whole, _ = read_slowly(server.url)
        running = [pool.submit(read_slowly, server.url) for _ in range(8)]
        wait_until(
            lambda: (
                httpx2.get(f"{server.url}/ready").json()["requests_in_flight"] == 8
                or all(future.done() for future in running)
            )
        )
        tree = server.tree()
        began = time.monotonic()
        assert server.stop(signal.SIGTERM, timeout_s=30) == 0
        assert time.monotonic() - began < 20 + 2
        assert [future.result() for future in running] == [(whole, True)] * 8
        assert not psutil.wait_procs(tree, timeout=0)[1]
        assert "Traceback" not in server.log


def test_a_closed_terminal_drains_like_sigterm() -> None:
    """SIGHUP ends the server in order."""
    with serving("scripted") as server:
        assert server.stop(signal.SIGHUP) == 0
        server.wait_line("stopping")


def test_a_second_signal_stops_at_once() -> None:
    """The first Ctrl-C drains, the second one does not wait: exit code 130."""
    with serving() as server:
        body = {"input": LONG_TEXT * 40, "response_format": "pcm"}
        with httpx2.stream("POST", f"{server.base_url}/audio/speech", json=body) as response:
            next(response.iter_bytes())  # and read no more: the stream can't end
            server.process.send_signal(signal.SIGINT)
            server.wait_line("stopping")
            began = time.monotonic()
            assert server.stop(signal.SIGINT) == 130
            assert time.monotonic() - began < 3


def test_a_used_port_is_one_line_with_the_next_step() -> None:
    """The port is bound before anything is loaded; the error names who holds it."""
    with serving("scripted") as server:
        port = server.url.rpartition(":")[2]
        done = stretto("serve", "scripted", "--port", port)
        assert done.returncode == 2
        assert len(done.stderr.splitlines()) == 1
        assert f"port {port} on 127.0.0.1 is in use by" in done.stderr
        assert f"--port {int(port) + 1}" in done.stderr


def test_an_unknown_key_is_one_line_with_the_nearest_name(tmp_path: Path) -> None:
    """A typo in a file is refused with its place and a suggestion."""
    file = tmp_path / "mine.yaml"
    file.write_text(
        "version: 1\nname: mine\ninputs: [text]\noutputs: {text: a}\nstages:\n"
        "  a:\n    backend: scripted\n    replcas: 2\n"
        "    inputs: {text: {from: request.text, mode: stream}}\n"
    )
    done = stretto("serve", str(file), "--port", "0")
    assert done.returncode == 2
    assert "mine.yaml:8" in done.stderr
    assert "replicas" in done.stderr


def test_a_backend_that_cannot_load_ends_the_start_with_its_reason(tmp_path: Path) -> None:
    """Exit code 3, the exception's text, and the replica's own lines behind its name (J7)."""
    file = tmp_path / "broken.yaml"
    file.write_text(
        "version: 1\nname: broken\ninputs: [text]\noutputs: {text: a}\nstages:\n"
        "  a:\n    backend: scripted\n    options: {load_fault: raise}\n"
        "    inputs: {text: {from: request.text, mode: stream}}\n"
    )
    began = time.monotonic()
    done = stretto("serve", str(file), "--port", "0")
    assert done.returncode == 3
    assert time.monotonic() - began < 20
    assert "RuntimeError: the options say that loading fails" in done.stderr
    assert "[a/0]" in done.stderr


def test_an_out_of_memory_kill_is_named(tmp_path: Path) -> None:
    """A replica that is killed while loading dies with 137, said to be out of memory."""
    file = tmp_path / "killed.yaml"
    file.write_text(
        "version: 1\nname: killed\ninputs: [text]\noutputs: {text: a}\nstages:\n"
        "  a:\n    backend: scripted\n    options: {load_fault: kill}\n"
        "    inputs: {text: {from: request.text, mode: stream}}\n"
    )
    done = stretto("serve", str(file), "--port", "0")
    assert done.returncode == 3
    assert "137" in done.stderr
    assert "out of memory" in done.stderr


def test_a_stage_from_the_current_folder_is_found(tmp_path: Path) -> None:
    """`module:Class` next to the pipeline file works without any installation."""
    (tmp_path / "mine.py").write_text(
        "from stretto.backends.scripted import Scripted\n\n\nclass Mine(Scripted):\n    pass\n"
    )
    (tmp_path / "mine.yaml").write_text(
        "version: 1\nname: mine\ninputs: [text]\noutputs: {audio: a}\nstages:\n"
        "  a:\n    backend: mine:Mine\n"
        "    inputs: {text: {from: request.text, mode: stream}}\n"
    )
    with serving("mine.yaml", cwd=tmp_path) as server:
        answer = httpx2.post(
            f"{server.url}/v1/audio/speech", json={"input": "x", "response_format": "pcm"}
        )
        assert answer.status_code == 200
        assert len(answer.content) == 9600


def test_a_killed_supervisor_takes_everything_with_it() -> None:
    """SIGKILL of the parent leaves no process behind, also while stages are loading."""
    for is_loaded in (False, True):
        server = launch("scripted")
        if is_loaded:
            server.wait_line(READY.pattern)
        else:
            wait_until(partial(_has_children, server))
        tree = server.tree()
        server.process.kill()
        server.process.wait(10)
        assert not psutil.wait_procs(tree[1:], timeout=5)[1]


def _has_children(server: Server) -> bool:
    return len(server.tree()) >= 4


def test_a_dead_api_process_is_replaced() -> None:
    """The port stays bound; the next process takes it over."""
    with serving("scripted") as server:
        [first] = server.processes("run_api")
        first.kill()
        wait_until(lambda: _is_ready(server.url))
        [second] = server.processes("run_api")
        assert second.pid != first.pid


def _is_ready(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/ready", timeout=5).status_code == 200
    except httpx2.TransportError:
        return False


def test_row_Q11_a_dead_orchestrator_is_followed_by_the_next_epoch() -> None:
    """`/health` and `/ready` tell the truth meanwhile, and requests work again (row Q11)."""
    with serving("scripted") as server:
        [orchestrator] = server.processes("run_orchestrator")
        before = len(server.lines)
        orchestrator.kill()
        server.wait_line("epoch 1", after=before)
        server.wait_line("ready again", timeout_s=10, after=before)
        answer = httpx2.post(
            f"{server.url}/v1/audio/speech", json={"input": "x", "response_format": "pcm"}
        )
        assert answer.status_code == 200


def test_without_restart_the_server_ends_with_the_engine() -> None:
    """`--no-restart`: the death of the orchestrator is the end, exit code 3."""
    with serving("scripted", "--no-restart") as server:
        server.processes("run_orchestrator")[0].kill()
        assert server.process.wait(10) == 3


def test_an_idle_server_does_not_wake_up() -> None:
    """In four seconds no process of the pipeline switches contexts more than three times."""
    rows = measure(4.0)
    assert len(rows) == 5
    assert max(count for _, count, _ in rows) <= 3, rows


def test_say_writes_speech_without_a_server(tmp_path: Path) -> None:
    """`stretto say` starts an engine of its own and ends it."""
    done = stretto("say", "Hello there.", "-o", str(tmp_path / "hello.wav"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "hello.wav").stat().st_size > 20_000
    assert "first audio after" in done.stderr


def test_the_orchestrator_loads_no_numeric_library() -> None:
    """The process that routes has none of numpy, onnxruntime and torch mapped."""
    with serving() as server:
        [orchestrator] = server.processes("run_orchestrator")
        mapped = " ".join(entry.path for entry in orchestrator.memory_maps())
        assert "msgspec" in mapped
        assert not any(name in mapped for name in ("numpy", "onnxruntime", "torch"))


@pytest.mark.parametrize("closed", ["<&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_do_not_matter(closed: str) -> None:
    """A server whose parent has closed its standard streams serves, and ends on SIGTERM."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = f"exec {sys.executable} -m stretto serve scripted --port {port} {closed}"
    process = subprocess.Popen(["/bin/sh", "-c", command])
    try:
        wait_until(partial(_is_ready, f"http://127.0.0.1:{port}"), timeout_s=30)
        process.terminate()
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()


def test_say_finds_mistakes_before_it_starts_anything(tmp_path: Path) -> None:
    """Blank text, a folder and a wrong URL are one line each, at once."""
    for arguments, text in (
        (("   ",), "blank"),
        (("Hi.", "-o", str(tmp_path)), "is a folder"),
        (("Hi.", "-o", "/nowhere/x.wav"), "can't be written"),
        (("Hi.", "--url", "nonsense"), "is no URL"),
    ):
        began = time.monotonic()
        done = stretto("say", *arguments)
        assert done.returncode in {1, 2}
        assert text in done.stderr
        assert len(done.stderr.splitlines()) == 1
        assert time.monotonic() - began < 2


def test_a_text_without_speech_is_no_success(tmp_path: Path) -> None:
    """No file is written for a text in which nothing can be spoken."""
    done = stretto("say", "\U0001f600", "-o", str(tmp_path / "empty.wav"))
    assert done.returncode == 1
    assert not (tmp_path / "empty.wav").exists()


def test_an_event_log_that_cannot_be_written_is_a_configuration_error() -> None:
    """It is found before anything is started."""
    done = stretto("serve", "scripted", "--port", "0", "--event-log", "/nowhere/events.jsonl")
    assert done.returncode == 2
    assert "event_log" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_an_orchestrator_that_keeps_dying_ends_the_server_in_words() -> None:
    """The fifth death in a minute is the last one: exit code 3, the reason, and no traceback."""
    with serving("scripted") as server:
        killed: set[int] = set()
        while server.process.poll() is None and len(killed) < 5:
            for process in server.processes("run_orchestrator"):
                if process.pid not in killed:
                    killed.add(process.pid)
                    process.kill()
        assert server.process.wait(10) == 3
        server.wait_line("kept dying")
        assert "Traceback" not in server.log
