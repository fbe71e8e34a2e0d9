"""Nothing that a request names is opened or fetched, whatever the field."""

from __future__ import annotations

import ast
import asyncio
import os
import sys
from typing import TYPE_CHECKING

import pytest

from tests.repository.project import PACKAGE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import httpx2

    from tests.server.conftest import Server

SPEECH = "/v1/audio/speech"

NAMES = [
    "../../etc/passwd",
    "/etc/passwd",
    "..\\..\\boot.ini",
    "%2e%2e%2fetc%2fpasswd",
    "heart\0.wav",
    "\u2024\u2024/heart",
    "heart" * 100,
    "CON",
    ".",
    "~root",
    "$HOME",
    "file:///etc/passwd",
]


class Watch:
    """Sees which paths this process opens or lists; a hook can't be taken out, so there is one for all."""

    def __init__(self) -> None:
        self.is_on = False
        self.paths: list[str] = []
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple[object, ...]) -> None:
        if self.is_on and event in {"open", "os.listdir", "os.scandir"}:
            self.paths.append(str(arguments[0]))


@pytest.fixture(scope="module")
def hook() -> Watch:
    """The one hook."""
    return Watch()


@pytest.fixture
def watch(hook: Watch) -> Iterator[Watch]:
    """Watch for as long as the test runs."""
    hook.paths.clear()
    hook.is_on = True
    yield hook
    hook.is_on = False


@pytest.mark.parametrize("name", NAMES)
async def test_situation_L1_every_unknown_voice_gets_the_same_answer(
    server: Server, client: httpx2.AsyncClient, watch: Watch, name: str
) -> None:
    """404 with the same code, whether such a file exists or not, and no file is opened."""
    replies = [
        await client.post(SPEECH, json={"input": "Hello", "voice": voice})
        for voice in (name, {"id": name})
    ]
    for reply in replies:
        error = reply.json()["error"]
        assert (reply.status_code, error["code"]) == (404, "voice_not_found")
        assert error["param"] == "voice"
    assert not [path for path in watch.paths if "passwd" in path or "heart" in path]
    assert server.engine.jobs == []


def unknown(text: str, name: str) -> str:
    """Return an error text without the name in it."""
    return text.replace(repr(name), "…")


async def test_situation_L1_existing_and_missing_files_can_not_be_told_apart(
    client: httpx2.AsyncClient,
) -> None:
    """The answers differ in the name only."""
    texts: set[str] = set()
    for name in ("/etc/passwd", "/etc/nosuch"):
        assert os.path.exists("/etc/passwd")  # noqa: PTH110, ASYNC240 - of the test, not of the server
        reply = await client.post(SPEECH, json={"input": "Hello", "voice": name})
        texts.add(unknown(reply.json()["error"]["message"], name))
    assert len(texts) == 1


TARGETS = [
    "http://127.0.0.1:{port}/a.wav",
    "http://localhost:{port}/a.wav",
    "http://2130706433:{port}/a.wav",
    "http://0x7f.1:{port}/a.wav",
    "http://[::ffff:127.0.0.1]:{port}/a.wav",
    "http://user@127.0.0.1.:{port}/a.wav",
    "//127.0.0.1:{port}/a.wav",
]
FIELDS = (
    "input",
    "voice",
    "model",
    "instructions",
    "ref_audio",
    "ref_text",
    "image",
    "file",
    "url",
)


@pytest.mark.parametrize("field", FIELDS)
async def test_situation_L2_no_field_makes_the_server_fetch_or_open(
    server: Server, client: httpx2.AsyncClient, watch: Watch, field: str, tmp_path: Path
) -> None:
    """A trap on the loopback interface and a file are never touched, whatever they are written like."""
    bait = tmp_path / "bait.wav"
    bait.write_bytes(b"RIFF")
    watch.paths.clear()
    calls: list[object] = []

    def caught(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        calls.append(writer.get_extra_info("peername"))
        writer.close()

    server.engine.script = lambda job: job.audio(b"\1\0").finish()
    trap = await asyncio.start_server(caught, "127.0.0.1", 0)
    async with trap:
        port = trap.sockets[0].getsockname()[1]
        for target in (*TARGETS, str(bait), bait.as_uri()):
            value = target.format(port=port)
            for shape in (value, {"url": value}, {"id": value}, [value]):
                body: dict[str, object] = {"input": "Hello", field: shape}
                reply = await client.post(SPEECH, json=body)
                assert reply.status_code in {200, 400, 404}, reply.text
    assert calls == []
    assert not [path for path in watch.paths if bait.name in path]


FETCHERS = {"urllib.request", "http.client", "httpx", "httpx2", "requests", "aiohttp", "ftplib"}
OPENERS = {"open", "read_text", "read_bytes", "urlopen", "create_connection", "open_connection"}
"""What could open a file or a connection by name."""

EDGE = ("server", "engine", "audio")


def imports_and_calls(text: str) -> Iterator[str]:
    """Yield what a module imports to fetch with, and what it opens, under whatever name."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in FETCHERS)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            full = {module, *(f"{module}.{alias.name}" for alias in node.names)}
            yield from sorted(full & FETCHERS)
            yield from (alias.name for alias in node.names if alias.name in OPENERS)
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if name in OPENERS:
                yield f"{name}()"


@pytest.mark.parametrize(
    "text",
    [
        "import urllib.request",
        "import urllib.request as quiet",
        "from urllib import request",
        "from urllib.request import urlopen as get",
        "from httpx2 import AsyncClient",
        "from asyncio import open_connection as dial",
        "open('/etc/passwd')",
        "Path(name).read_bytes()",
        "socket.create_connection(place)",
    ],
)
def test_situation_L3_the_check_sees_a_fetcher_by_any_name(text: str) -> None:
    """Else the next test could not fail."""
    assert list(imports_and_calls(text))


@pytest.mark.slow
def test_situation_L3_nothing_at_the_edge_opens_or_fetches_by_name() -> None:
    """A second code path with a policy of its own can't appear unseen: there is no first one."""
    found = {
        f"{path.relative_to(PACKAGE)}: {what}"
        for folder in EDGE
        for path in (PACKAGE / folder).rglob("*.py")
        for what in imports_and_calls(path.read_text())
    }
    assert found == {"engine/payloads.py: open()"}  # payload files of the run's own directory
