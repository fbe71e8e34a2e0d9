"""Several API processes behind one port, and what becomes of connections at the end."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import threading
import time
from collections import Counter
from textwrap import dedent
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit

import pytest

from stretto.backends.scripted import check_counter_audio
from stretto.cli import http_port
from stretto.errors import ConfigError
from tests.e2e.serving import Server, serving, wait_until

if TYPE_CHECKING:
    from pathlib import Path

    import psutil

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

CHUNKS, CHUNK_BYTES = 60, 960
PIPELINE = f"""
    version: 1
    name: slow
    inputs: [text]
    outputs: {{audio: tone}}
    stages:
      relay:
        backend: scripted
        options: {{script: {{mode: count, chunks: {CHUNKS}, delay_s: 0.05}}}}
        inputs:
          text: {{from: request.text, mode: stream}}
      tone:
        backend: scripted
        options: {{script: {{mode: count, chunks: 1, bytes: {CHUNK_BYTES}, tag: 5}}}}
        inputs:
          text: {{from: relay, mode: stream}}
"""
WAIT_S = 20.0


class Listener:
    """One client that reads a stream in a thread of its own."""

    def __init__(self, url: str, text: str, **fields: object) -> None:
        parts = urlsplit(url)
        self.text = text
        self.audio = b""
        self.status = 0
        self.error: Exception | None = None
        self.has_begun = threading.Event()
        self.connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
        self.connection.connect()
        name = cast("tuple[str, int]", self.connection.sock.getsockname())
        self.port = name[1]
        self._body = json.dumps({"input": text, "response_format": "pcm", **fields})
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until everything was read."""
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        self.connection.close()

    def _read(self) -> None:
        try:
            self.connection.request("POST", "/v1/audio/speech", self._body)
            response = self.connection.getresponse()
            self.status = response.status
            while piece := response.read1():
                self.audio += piece
                self.has_begun.set()
        except (OSError, http.client.HTTPException) as error:
            self.error = error
        self.has_begun.set()


def peers(process: psutil.Process) -> set[int]:
    """Return the ports of the clients that a process serves."""
    return {c.raddr.port for c in process.net_connections("tcp") if c.raddr}


def events(log: Path) -> list[dict[str, object]]:
    """Return the router's events so far."""
    lines = log.read_bytes().splitlines(keepends=True)[1:]
    return [json.loads(line)["event"] for line in lines if line.endswith(b"\n")]


def request_of(event: dict[str, object]) -> str:
    """Return the request that an event is about, if any."""
    task = event.get("task")
    return str(cast("list[object]", task)[0] if task else event.get("request", ""))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the pipeline."""
    (tmp_path / "slow.yaml").write_text(dedent(PIPELINE))
    return tmp_path


def test_row_Q18_the_death_of_one_api_process_aborts_only_its_requests(folder: Path) -> None:
    """The other streams are exact; the dead one's stop in all stages within two seconds."""
    log = folder / "events.jsonl"
    with serving(
        "slow.yaml", "--api-processes", "3", "--event-log", str(log), cwd=folder
    ) as server:
        api = server.processes("run_api")
        assert sorted(process.cmdline()[-1] for process in api) == ["api/0", "api/1", "api/2"]
        listeners = [Listener(server.url, f"stream {n}") for n in range(12)]
        for listener in listeners:
            assert listener.has_begun.wait(WAIT_S)
        served = {process: peers(process) for process in api}
        victim = max(api, key=lambda process: len(served[process]))
        dead_ports = served[victim]
        killed_at = time.monotonic()
        victim.kill()
        for listener in listeners:
            listener.join()
        lost = [listener for listener in listeners if listener.port in dead_ports]
        kept = [listener for listener in listeners if listener.port not in dead_ports]
        assert lost
        assert kept
        for listener in kept:
            assert listener.error is None
            assert len(listener.audio) == CHUNKS * CHUNK_BYTES
            assert check_counter_audio(listener.audio, 5) == CHUNKS * CHUNK_BYTES // 2
        assert all(listener.error is not None for listener in lost)

        closed = [e for e in events(log) if e["type"] == "ChannelClosed"]
        assert len(closed) == 1
        channel = closed[0]["channel"]
        mine = {
            str(e["request"])
            for e in events(log)
            if e["type"] == "RequestSubmitted" and e["channel"] == channel
        }
        assert len(mine) == len(lost)
        ended = [e for e in events(log) if e["type"] == "TaskCancelled" and request_of(e) in mine]
        assert len({(request_of(e), cast("list[object]", e["task"])[1]) for e in ended}) == 2 * len(
            mine
        )
        last = max(cast("float", e["now"]) for e in events(log) if request_of(e) in mine)
        assert last - killed_at < 2.0

        server.wait_line(r"the API process api/\d has ended: killed by SIGKILL")
        wait_until(lambda: len(server.processes("run_api")) == 3)
        again = [Listener(server.url, f"again {n}") for n in range(12)]
        for listener in again:
            listener.join()
        assert all(len(listener.audio) == CHUNKS * CHUNK_BYTES for listener in again)
        names = [str(e["request"]) for e in events(log) if e["type"] == "RequestSubmitted"]
        assert len(names) == len(set(names)) == 24


def test_connections_are_spread_and_a_second_server_is_refused() -> None:
    """Each socket gets its share; only the owner's own sockets share the port."""
    listeners = http_port.bind("127.0.0.1", 0, 3)
    try:
        port = listeners[0].getsockname()[1]
        assert [each.getsockname()[1] for each in listeners] == [port] * 3
        clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(300)]
        for listener in listeners:
            listener.setblocking(False)
        share: Counter[int] = Counter()
        for number, listener in enumerate(listeners):
            while True:
                try:
                    listener.accept()[0].close()
                except BlockingIOError:
                    break
                share[number] += 1
        assert sum(share.values()) == 300
        assert min(share.values()) > 50
        for client in clients:
            client.close()
        for number in (1, 3):
            with pytest.raises(ConfigError, match="in use"):
                http_port.bind("127.0.0.1", port, number)
    finally:
        for listener in listeners:
            listener.close()


def test_situation_A12_open_streams_do_not_hold_up_the_end(folder: Path) -> None:
    """Streams, raw and as events, and idle connections: broken off after the drain time, all cleaned up.

    There are no WebSockets yet.
    """
    with serving("slow.yaml", "--drain-timeout", "0.3", cwd=folder) as server:
        raw = [Listener(server.url, f"raw {n}") for n in range(3)]
        sse = [Listener(server.url, f"sse {n}", stream_format="sse") for n in range(3)]
        idle = [idle_connection(server) for _ in range(3)]
        for listener in (*raw, *sse):
            assert listener.has_begun.wait(WAIT_S)
        began = time.monotonic()
        assert server.stop(signal.SIGINT) == 0
        assert time.monotonic() - began < 5.0
        for listener in (*raw, *sse):
            listener.join()
            assert listener.error is not None
        assert all(b"event: error" in listener.audio for listener in sse)
        assert all(b"server_shutting_down" in listener.audio for listener in sse)
        assert all(connection.recv(1) == b"" for connection in idle)
        for connection in idle:
            connection.close()


def idle_connection(server: Server) -> socket.socket:
    """Return a kept-alive connection that has been used once."""
    parts = urlsplit(server.url)
    connection = socket.create_connection((parts.hostname or "", parts.port or 0), timeout=10)
    connection.sendall(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
    answer = b""
    while b"version" not in answer.partition(b"\r\n\r\n")[2]:
        answer += connection.recv(4096)
    return connection


def test_situation_A12_a_second_signal_ends_within_a_second(folder: Path) -> None:
    """Nothing is waited for any more."""
    with serving(
        "slow.yaml", "--drain-timeout", "30", "--api-processes", "2", cwd=folder
    ) as server:
        listener = Listener(server.url, "a long one")
        assert listener.has_begun.wait(WAIT_S)
        server.process.send_signal(signal.SIGINT)
        server.wait_line("stopping")
        began = time.monotonic()
        assert server.stop(signal.SIGINT) == 128 + signal.SIGINT
        assert time.monotonic() - began < 1.0
        listener.join()
        assert listener.error is not None, (listener.status, len(listener.audio))


def test_situation_I1_the_queue_has_a_bound_and_refusals_are_quick(folder: Path) -> None:
    """Two run, three wait, the rest is refused at once with both retry headers, and costs no stage work."""
    log = folder / "events.jsonl"
    environment = {
        "STRETTO_ORCHESTRATOR__LIMITS__MAX_QUEUED": "3",
        "STRETTO_STAGES__RELAY__SLOTS": "2",
        "STRETTO_STAGES__TONE__SLOTS": "2",
    }
    with serving(
        "slow.yaml", "--event-log", str(log), cwd=folder, environment=environment
    ) as server:
        admitted = [Listener(server.url, f"admitted {n}") for n in range(5)]
        wait_until(lambda: sum(e["type"] == "RequestSubmitted" for e in events(log)) == 5)
        parts = urlsplit(server.url)
        took: list[float] = []
        for _ in range(45):
            connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=10)
            connection.connect()
            began = time.monotonic()
            connection.request("POST", "/v1/audio/speech", b'{"input":"too many"}')
            response = connection.getresponse()
            took.append(time.monotonic() - began)
            assert response.status == 429
            assert json.loads(response.read())["error"]["code"] == "queue_full"
            assert int(response.headers["retry-after"]) >= 1
            assert int(response.headers["retry-after-ms"]) > 0
            connection.close()
        for listener in admitted:
            listener.join()
        assert [listener.status for listener in admitted] == [200] * 5
        assert all(len(listener.audio) == CHUNKS * CHUNK_BYTES for listener in admitted)
        refused = {str(e["request"]) for e in events(log) if e["type"] == "RequestSubmitted"} - {
            request_of(e) for e in events(log) if e["type"] == "ChunkProduced"
        }
        assert len(refused) == 45
        assert sorted(took)[len(took) // 2] < 0.1  # 20 ms on an idle machine
