"""`stretto doctor`: what this machine offers to a pipeline, and whether one sentence comes out of it.

Each check looks at one thing and says what to do about it. Nothing heavy is imported here: packages are
looked up by their metadata, and the self-test runs in the processes that would serve.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import re
import resource
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from stretto.cli import exits, http_port
from stretto.config.loading import load_settings
from stretto.errors import ConfigError, StrettoError
from stretto.transport.listening import longest_socket_path, socket_base
from stretto.transport.run_directory import SHARED_MEMORY_BASE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from stretto.config.settings import Settings
    from stretto.core.graph import PipelineSpec
    from stretto.engine import Engine
    from stretto.engine.stream import Stream

Verdict = Literal["ok", "warn", "FAIL"]

ENOUGH_SHARED_MEMORY = 64 * 1024**2
ENOUGH_DESCRIPTORS = 1024
ENOUGH_MEMORY = 512 * 1024**2
TEXT = "The next voice enters early."
SELF_TEST_S = 120.0

_MIB = 1024**2
_CGROUP = Path("/sys/fs/cgroup")
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)(?:.*extra == ['\"](\w+)['\"])?")


@dataclass(frozen=True, slots=True)
class Check:
    """What one look has found.

    Attributes:
        verdict: `ok`, `warn` (it works, with a drawback) or `FAIL`.
        what: What was looked at.
        value: What was found.
        step: What to do about it; empty if nothing.
    """

    verdict: Verdict
    what: str
    value: str
    step: str = ""

    def __str__(self) -> str:
        """Return the line for people."""
        return f"{self.verdict:4} {self.what}: {self.value}" + (
            f" - {self.step}" if self.step else ""
        )


def examine(
    pipelines: Sequence[str],
    environ: Mapping[str, str],
    say: Callable[[str], None],
    *,
    as_json: bool = False,
    self_test: bool = True,
) -> int:
    """Print every check; return 1 if one fails.

    Raises:
        ConfigError: The configuration is wrong; the text lists every mistake.
    """
    settings = load_settings(pipelines, environ=environ)
    found: list[Check] = []
    for check in _checks(settings, self_test=self_test):
        found.append(check)
        if not as_json:
            say(str(check))
    if as_json:
        say(json.dumps([asdict(check) for check in found], indent=2))
    failed = [check for check in found if check.verdict == "FAIL"]
    return exits.FAILED if failed else exits.OK


def _checks(settings: Settings, *, self_test: bool) -> Iterator[Check]:
    yield _python()
    yield _cores(settings)
    yield _memory()
    yield _shared_memory()
    yield _sockets()
    yield _descriptors()
    yield _port(settings)
    is_complete = True
    for extra in _extras(settings):
        check = _packages(extra)
        is_complete = is_complete and check.verdict != "FAIL"
        yield check
    if not self_test:
        return
    if not is_complete:
        yield Check("warn", "self-test", "left out", "install what is missing first")
        return
    yield asyncio.run(_self_test(settings))


def _python() -> Check:
    value = f"{platform.python_version()} on {platform.system()} {platform.release()} {platform.machine()}"
    if sys.version_info < (3, 11):  # noqa: UP036 - whoever runs a copied tree learns of it here
        return Check("FAIL", "python", value, "install Python 3.11 or newer")
    if platform.system() != "Linux":
        return Check("FAIL", "python", value, "run it on Linux, for example in a container")
    return Check("ok", "python", value)


def _cores(settings: Settings) -> Check:
    cores = float(len(os.sched_getaffinity(0)))
    quota = _cgroup("cpu.max").split()
    if len(quota) > 1 and quota[0].isdecimal():
        cores = min(cores, int(quota[0]) / int(quota[1]))
    threads = sum(stage.replicas * stage.threads for stage in settings.stages)
    value = f"{cores:g} for {threads} compute threads"
    if threads > cores:
        return Check("warn", "cores", value, "they take turns; lower `replicas` or `threads`")
    return Check("ok", "cores", value)


def _memory() -> Check:
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    limit, used = _cgroup("memory.max"), _cgroup("memory.current")
    if limit.isdecimal() and used.isdecimal():
        available = min(available, int(limit) - int(used))
    value = f"{available / _MIB:,.0f} MiB available"
    if available < ENOUGH_MEMORY:
        return Check("warn", "memory", value, "the speech pipeline takes about 350 MiB")
    return Check("ok", "memory", value)


def _shared_memory() -> Check:
    what = "shared memory"
    try:
        disk = shutil.disk_usage(SHARED_MEMORY_BASE)
    except OSError as error:
        value = f"{SHARED_MEMORY_BASE}: {error.strerror}"
        return Check("warn", what, value, "large payloads travel through sockets, which is slower")
    value = f"{disk.free / _MIB:,.0f} of {disk.total / _MIB:,.0f} MiB free in {SHARED_MEMORY_BASE}"
    if not os.access(SHARED_MEMORY_BASE, os.W_OK):
        return Check(
            "warn", what, f"{value}, not writable", "large payloads travel through sockets"
        )
    if disk.free < ENOUGH_SHARED_MEMORY:
        step = "what does not fit travels through sockets; in Docker: --shm-size=64m"
        return Check("warn", what, value, step)
    return Check("ok", what, value)


def _sockets() -> Check:
    base = socket_base()
    if not os.access(base, os.W_OK | os.X_OK):
        return Check(
            "FAIL", "sockets", f"{base} is not writable", "set XDG_RUNTIME_DIR to a folder of yours"
        )
    room = longest_socket_path(base)
    if room < 0:
        return Check(
            "FAIL",
            "sockets",
            f"{base} is {-room} bytes too long",
            "set XDG_RUNTIME_DIR to a shorter path",
        )
    return Check("ok", "sockets", f"in {base}")


def _descriptors() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    value = f"{soft} per process"
    if soft != resource.RLIM_INFINITY and soft < ENOUGH_DESCRIPTORS:
        return Check("warn", "file descriptors", value, f"ulimit -n {min(hard, 65536)}")
    return Check("ok", "file descriptors", value)


def _port(settings: Settings) -> Check:
    server = settings.server
    what = "port"
    try:
        listeners = http_port.bind(server.host, server.port, server.api_processes)
    except ConfigError as error:
        value, _, step = error.detail.partition("; ")
        return Check("warn", what, value, step)
    for listener in listeners:
        listener.close()
    return Check("ok", what, f"{server.port} on {server.host} is free")


def _extras(settings: Settings) -> list[str]:
    """Return the extras that these pipelines need."""
    needs_speech = any(stage.backend.startswith("hibari") for stage in settings.stages)
    return ["", "server", "speech"] if needs_speech else ["", "server"]


def _packages(extra: str) -> Check:
    """Look up what our own metadata says that this extra needs; an empty name means the package itself."""
    what = f"packages [{extra}]" if extra else "packages"
    found: list[str] = []
    missing: list[str] = []
    for name in _required(extra):
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        step = f"pip install 'stretto[{extra}]'" if extra else f"pip install {' '.join(missing)}"
        return Check("FAIL", what, f"{', '.join(missing)} missing", step)
    return Check("ok", what, ", ".join(found))


def _required(extra: str) -> list[str]:
    matches = (_REQUIREMENT.match(text) for text in metadata.requires("stretto") or ())
    return [match[1] for match in matches if match is not None and (match[2] or "") == extra]


async def _self_test(settings: Settings) -> Check:
    """Have one sentence made by the processes that would serve."""
    from stretto.engine import Engine

    what = "self-test"
    began = time.monotonic()
    first_s, media_s, made_s = 0.0, 0.0, 0.0
    name = settings.pipelines[0].name
    try:
        async with asyncio.timeout(SELF_TEST_S), Engine.from_pipeline(settings) as engine:
            ready_s = time.monotonic() - began
            asked = time.monotonic()
            async for chunk in _speak(engine, settings.pipelines[0]):
                first_s = first_s or time.monotonic() - asked
                media_s += chunk.media_s
            made_s = time.monotonic() - asked
    except StrettoError as error:
        return Check("FAIL", what, f"{name}: {error.detail}", f"stretto serve {name} shows the log")
    except TimeoutError:
        return Check("FAIL", what, f"{name}: nothing within {SELF_TEST_S:g} s", "see the log above")
    value = f"{name} ready after {ready_s:.1f} s, first output after {first_s * 1000:.0f} ms"
    if media_s:
        value += f", {media_s:.1f} s of audio at {made_s / media_s:.2f} of real time"
    return Check("ok", what, value)


def _speak(engine: Engine, pipeline: PipelineSpec) -> Stream:
    inputs: dict[str, Any] = dict.fromkeys(pipeline.inputs, TEXT)
    return engine.generate(pipeline=pipeline.name, **inputs)


def _cgroup(name: str) -> str:
    try:
        return (_CGROUP / name).read_text().strip()
    except OSError:
        return ""
