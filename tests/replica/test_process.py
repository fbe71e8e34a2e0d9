"""A replica as a process: how it starts, and the ways in which it ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from stretto.backends.scripted import check_counter_audio, tag_of
from stretto.messages.link import Drain as DrainMessage
from stretto.messages.link import Hello, LoadProgress, Ready, StartFailed
from stretto.replica.runtime import Replica
from tests.replica import backends
from tests.replica.rig import (
    BOUND_S,
    REPLICA,
    RUN,
    Rig,
    launch_spec,
    listening,
    replica_process,
    task_key,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable

A = task_key("a")
pytestmark = pytest.mark.slow


@pytest.fixture
async def rig(leak_check: None, tmp_path: Path) -> AsyncGenerator[Rig]:
    """Listen for a replica."""
    async with listening(tmp_path) as rig:
        yield rig


async def exit_code(process: Process) -> int:
    """Wait for the process's end."""
    async with asyncio.timeout(BOUND_S):
        return await process.wait()


async def is_gone(pid: int) -> None:
    """Wait for the end of a process that is not our child."""
    with contextlib.suppress(ProcessLookupError):
        fd = os.pidfd_open(pid)
        gone = asyncio.Event()
        asyncio.get_running_loop().add_reader(fd, gone.set)
        try:
            async with asyncio.timeout(BOUND_S):
                await gone.wait()
        finally:
            asyncio.get_running_loop().remove_reader(fd)
            os.close(fd)


async def test_a_process_says_hello_loads_and_works(rig: Rig) -> None:
    """Hello comes before loading, progress with it, then readiness with what the backend declares."""
    async with replica_process(rig, options={"load_s": 0.05}, slots=7) as process:
        ready = await rig.start()
        (hello,) = rig.of(Hello)
        assert (hello.run, hello.replica, hello.nonce) == (RUN, REPLICA, "nonce")
        assert hello.pid == process.pid
        assert [m.fraction for m in rig.of(LoadProgress)] == [0.0, 1.0]
        assert ready.slots == 7
        assert ready.facts.unit == "samples"
        assert ready.facts.media["rate_hz"] == 24_000
        rig.run_task(A, "hello", '{"chunks": 3}')
        await rig.ended(A)
        assert check_counter_audio(rig.audio(A), tag_of("hello")) == 3 * 480


async def test_the_end_of_the_link_ends_the_process(rig: Rig) -> None:
    """Exit code 0, also while a step computes."""
    async with replica_process(rig) as process:
        await rig.start()
        rig.run_task(A, "x", '{"hang_at": 1}')
        await rig.until(lambda: rig.chunks(A))
        rig.hang_up()
        assert await exit_code(process) == 0


async def test_draining_ends_the_process(rig: Rig) -> None:
    """Exit code 0, with nothing lost."""
    async with replica_process(rig) as process:
        await rig.start()
        rig.run_task(A, "x", '{"chunks": 20}')
        rig.send(DrainMessage())
        assert await exit_code(process) == 0
        await rig.until(lambda: rig.closed)
        assert rig.end(A) is not None
        assert check_counter_audio(rig.audio(A), tag_of("x")) == 20 * 480


@pytest.mark.parametrize("options", [{}, {"load_fault": "hang"}], ids=["serving", "loading"])
async def test_the_end_of_standard_input_ends_the_process(
    rig: Rig, options: dict[str, object]
) -> None:
    """The parent is gone: the whole group is killed, whatever it was doing."""
    async with replica_process(rig, options=options) as process:
        await rig.until(lambda: rig.of(Hello))
        rig.welcome()
        await rig.until(lambda: rig.of(LoadProgress))
        assert process.stdin is not None
        process.stdin.close()
        assert await exit_code(process) == -signal.SIGKILL


async def test_a_killed_parent_takes_its_replica_with_it(rig: Rig) -> None:
    """No replica outlives a parent that had no time to say goodbye."""
    program = (
        "import subprocess, sys, time\n"
        "line = sys.stdin.buffer.readline()\n"
        "child = subprocess.Popen([sys.executable, '-m', 'stretto.replica'],\n"
        "                         stdin=subprocess.PIPE, start_new_session=True)\n"
        "child.stdin.write(line); child.stdin.flush()\n"
        "sys.stdin.buffer.readline()\n"
    )
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdin=PIPE)
    assert parent.stdin is not None
    parent.stdin.write(msgspec.json.encode(launch_spec(rig)) + b"\n")
    await rig.start()
    (hello,) = rig.of(Hello)
    parent.kill()
    await parent.wait()
    parent.stdin.close()
    await is_gone(hello.pid)
    await rig.until(lambda: rig.closed)


async def test_interrupts_are_the_supervisors_and_sigterm_ends(rig: Rig) -> None:
    """Ctrl-C reaches the whole terminal; a replica goes on until it is told otherwise."""
    async with replica_process(rig) as process:
        await rig.start()
        process.send_signal(signal.SIGINT)
        rig.run_task(A, "x")
        await rig.ended(A)
        process.send_signal(signal.SIGTERM)
        assert await exit_code(process) == -signal.SIGTERM


@pytest.mark.parametrize(
    ("script", "code"),
    [('{"exit_at": 1}', 9), ('{"kill_at": 1}', -signal.SIGKILL)],
)
async def test_the_script_can_end_the_process(rig: Rig, script: str, code: int) -> None:
    """What was made before leaves first; the link's end is noticed."""
    async with replica_process(rig) as process:
        await rig.start()
        rig.run_task(A, "x", script)
        assert await exit_code(process) == code
        await rig.until(lambda: rig.closed)
        assert len(rig.chunks(A)) <= 1


async def test_a_backend_that_exits_takes_its_replica_with_it(rig: Rig) -> None:
    """Exit code 1 and the reason, instead of a replica that looks alive."""
    async with replica_process(rig, f"{backends.__name__}:Obedient") as process:
        await rig.start()
        rig.run_task(A, "quit")
        assert await exit_code(process) == 1
        assert process.stderr is not None
        assert b"the compute thread got SystemExit: 3" in await process.stderr.read()


async def test_without_a_specification_there_is_no_replica() -> None:
    """A person who starts the module by hand is told what it is for."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "stretto.replica", stdin=PIPE, stderr=PIPE
    )
    _, error = await process.communicate(b"")
    assert process.returncode == 1
    assert b"before the specification" in error


async def test_an_orchestrator_that_is_gone_is_one_line(tmp_path: Path) -> None:
    """No traceback: the address and the reason."""
    rig = Rig(tmp_path, None)
    async with replica_process(rig) as process:
        assert await exit_code(process) == 1
        assert process.stderr is not None
        lines = (await process.stderr.read()).decode().splitlines()
        assert len(lines) == 1
        assert "can't be reached" in lines[0]


@pytest.mark.parametrize(
    ("backend", "options", "reason"),
    [
        ("scripted", {"load_fault": "raise"}, "RuntimeError: the options say that loading fails"),
        ("scripted", {"lod_s": 1}, "unexpected keyword argument 'lod_s'"),
        ("nowhere:Backend", {}, "backend 'nowhere:Backend' can't be imported"),
        ("scriptet", {}, "or one of scripted"),
        (f"{backends.__name__}:Cumulative", {}, "make each chunk carry only what is new"),
        (f"{backends.__name__}:Unpausable", {}, "drop `pausable=False`"),
        (f"{backends.__name__}:Undeclared", {}, "declares no `capabilities`"),
        (f"{backends.__name__}:Quitter", {}, "SystemExit: 3"),
    ],
)
async def test_a_replica_that_cannot_load_says_why(
    rig: Rig, backend: str, options: dict[str, object], reason: str
) -> None:
    """The reason travels on the link, and the exit code is 1."""
    living = asyncio.create_task(Replica(launch_spec(rig, backend, options)).live())
    await rig.until(lambda: rig.of(Hello))
    rig.welcome()
    (failed,) = await rig.until(lambda: rig.of(StartFailed))
    assert reason in failed.reason
    assert await living == 1
    assert not rig.of(Ready)


async def test_a_failed_load_shows_its_traceback(rig: Rig) -> None:
    """The launcher shows the last lines of a replica that died; they say where it broke."""
    async with replica_process(rig, options={"load_fault": "raise"}) as process:
        await rig.until(lambda: rig.of(Hello))
        rig.welcome()
        assert await exit_code(process) == 1
        assert process.stderr is not None
        error = (await process.stderr.read()).decode()
        assert "in load" in error
        assert error.splitlines()[-1] == "RuntimeError: the options say that loading fails"


async def test_numerical_libraries_get_their_threads_before_import(
    rig: Rig, tmp_path: Path
) -> None:
    """The variables are set when the backend's module is imported."""
    async with replica_process(rig, f"{__package__}.environment:Environment", threads=3):
        await rig.start()
        rig.run_task(A, "x")
        await rig.ended(A)
        assert rig.chunks(A)[0]["OMP_NUM_THREADS"] == "3"
        assert not rig.chunks(A)[0]["numpy"]


def switches(pid: int) -> int:
    """Return how often the threads of a process have gone to sleep by themselves."""
    return sum(_voluntary(Path(f"/proc/{pid}/task").glob("*/status")))


def _voluntary(paths: Iterable[Path]) -> Iterable[int]:
    for path in paths:
        for line in path.read_text().splitlines():
            if line.startswith("voluntary_ctxt_switches"):
                yield int(line.split()[1])


async def test_an_idle_replica_does_not_wake_up(tmp_path: Path) -> None:
    """After its work, no thread of it runs again, whichever form its backend has."""
    async with contextlib.AsyncExitStack() as stack:
        pids: list[int] = []
        for backend in ("scripted", "scripted-stream"):
            folder = tmp_path / backend
            folder.mkdir()
            rig = await stack.enter_async_context(listening(folder))
            process = await stack.enter_async_context(replica_process(rig, backend))
            pids.append(process.pid)
            await rig.start()
            rig.run_task(A, "x", '{"delay_s": 0.001}')
            await rig.ended(A)
        before = [switches(pid) for pid in pids]
        await asyncio.sleep(3)  # that nothing happens in this time is what is measured
        woken = [switches(pid) - count for pid, count in zip(pids, before, strict=True)]
        assert max(woken) <= 2, "after the last task each thread goes to sleep once"
