"""One orchestrator after another over one socket; it is a stand-in, a real child process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING

import msgspec
import pytest

from stretto.config.loading import load_settings
from stretto.launch import supervisor as module
from stretto.launch.child import ChildProcess
from stretto.launch.restarts import Restarts
from stretto.launch.supervisor import Life, OrchestratorSupervisor, start_process
from stretto.transport.listening import socket_base
from stretto.transport.run_directory import SHARED_MEMORY_BASE
from tests.launch.processes import (
    WAIT_S,
    Lines,
    has_children,
    open_descriptors,
    python,
    wait_gone,
    watching_python,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from stretto.config.process_specs import OrchestratorSpec
    from stretto.config.settings import Settings

STAND_IN = """
    import json, socket
    spec = json.loads(sys.stdin.readline())
    listener = socket.socket(fileno=spec["channel_fd"])
    listener.setblocking(True)
    while True:
        client, _ = listener.accept()
        client.sendall(json.dumps({**spec, "pid": os.getpid()}).encode() + b"\\n")
        command = client.recv(100)
        if command == b"die":
            os._exit(9)
        elif command == b"be stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            grandchild = subprocess.Popen(["sleep", "60"])
            client.sendall(f"{grandchild.pid}\\n".encode())
        client.close()
"""


def life(command: Sequence[str]) -> Callable[[OrchestratorSpec, Callable[[str], None]], Life]:
    """Return what starts a stand-in."""
    return partial(start_process, command=command)


def quick_restarts() -> Restarts:
    """Return a back-off that a test need not wait for."""
    return Restarts(first_s=0.01, longest_s=0.01)


@dataclass(frozen=True, slots=True)
class Answer:
    """What an epoch says of itself."""

    epoch: int
    pid: int
    run_directory: Path
    shared_memory_dir: Path
    extra: str = ""


async def ask(path: str, command: str = "hello") -> Answer:
    """Connect as a client would, wait to be served, and give a command."""
    async with asyncio.timeout(WAIT_S):
        reader, writer = await asyncio.open_unix_connection(path, limit=2**20)
        spec = json.loads(await reader.readline())
        writer.write(command.encode())
        extra = (await reader.read()).decode().strip()
        writer.close()
    return Answer(
        spec["epoch"],
        spec["pid"],
        Path(spec["run_directory"]),
        Path(spec["shared_memory_dir"]),
        extra,
    )


def settings(*, restart: bool = True) -> Settings:
    """Return the settings of a small deployment."""
    loaded = load_settings(["scripted"], environ={})
    orchestrator = msgspec.structs.replace(loaded.orchestrator, restart=restart)
    return msgspec.structs.replace(loaded, orchestrator=orchestrator)


def traces(run: str) -> list[str]:
    """Return what a run has left in the file system."""
    return [
        str(path)
        for base in (SHARED_MEMORY_BASE, socket_base())
        for path in Path(base).glob(f"*{run}*")
    ]


@pytest.fixture
async def supervisor() -> AsyncIterator[OrchestratorSupervisor]:
    """A running supervisor with a quick back-off; after the test nothing of it may be left."""
    before = open_descriptors()
    supervisor = OrchestratorSupervisor(
        settings(), start_life=life(python(STAND_IN)), restarts=quick_restarts()
    )
    supervisor.start()
    yield supervisor
    await supervisor.stop(0.0)
    assert traces(supervisor.run) == []
    assert open_descriptors() == before
    assert not has_children()


async def test_a_client_is_served_without_a_retry(supervisor: OrchestratorSupervisor) -> None:
    """The socket accepts before the orchestrator is up."""
    answer = await ask(supervisor.channel_path)
    assert (answer.epoch, supervisor.epoch) == (1, 1)
    assert answer.pid == supervisor.pid
    assert str(answer.run_directory) == supervisor.channel_path.removesuffix("/channel.sock")
    assert answer.run_directory.stat().st_mode & 0o777 == 0o700


async def test_a_client_that_comes_between_two_epochs_is_served_by_the_next() -> None:
    """The listening socket outlives the orchestrator, so the gap is only a wait."""
    deaths: list[tuple[int, str]] = []
    epochs: list[int] = []
    in_the_gap: asyncio.Future[asyncio.Task[Answer]] = asyncio.get_running_loop().create_future()

    def on_death(epoch: int, reason: str) -> None:
        deaths.append((epoch, reason))
        assert supervisor.pid is None
        in_the_gap.set_result(asyncio.ensure_future(ask(supervisor.channel_path)))

    supervisor = OrchestratorSupervisor(
        settings(),
        start_life=life(python(STAND_IN)),
        restarts=quick_restarts(),
        on_epoch=epochs.append,
        on_death=on_death,
    )
    supervisor.start()
    first = await ask(supervisor.channel_path, "die")
    second = await (await in_the_gap)
    assert (second.epoch, second.pid != first.pid) == (2, True)
    assert second.run_directory == first.run_directory
    assert (deaths, epochs) == ([(1, "exit code 9")], [1, 2])
    await supervisor.stop(0.0)
    assert len(deaths) == 1


async def test_payload_files_of_a_dead_epoch_go_when_the_next_one_starts(
    supervisor: OrchestratorSupervisor,
) -> None:
    """Shared memory does not fill up with what nobody can name any more."""
    first = await ask(supervisor.channel_path, "die")
    second = await ask(supervisor.channel_path)
    assert second.shared_memory_dir != first.shared_memory_dir
    assert second.shared_memory_dir.is_dir()
    (second.shared_memory_dir / "payload").write_bytes(b"x")
    await ask(supervisor.channel_path, "die")
    await ask(supervisor.channel_path)
    assert not first.shared_memory_dir.exists()
    assert not second.shared_memory_dir.exists()


async def test_a_killed_orchestrator_has_a_successor(supervisor: OrchestratorSupervisor) -> None:
    """SIGKILL is a death like any other."""
    first = await ask(supervisor.channel_path)
    os.kill(first.pid, signal.SIGKILL)
    await wait_gone(first.pid)
    assert (await ask(supervisor.channel_path)).epoch == 2


async def test_an_orchestrator_that_keeps_dying_is_given_up() -> None:
    """After the fifth death no epoch follows, waiting clients are refused, and nothing is left."""
    deaths: list[int] = []
    supervisor = OrchestratorSupervisor(
        settings(),
        start_life=life(python("sys.exit(1)")),
        restarts=quick_restarts(),
        on_death=lambda epoch, _: deaths.append(epoch),
    )
    supervisor.start()
    path = supervisor.channel_path
    reader, writer = await asyncio.open_unix_connection(path)
    async with asyncio.timeout(WAIT_S):
        reason = await supervisor.wait_gave_up()
        with pytest.raises(ConnectionResetError):
            assert await reader.read() != b""
    writer.close()
    assert reason == "the orchestrator kept dying, the last time by: exit code 1"
    assert await supervisor.wait_gave_up() == reason
    assert deaths == [1, 2, 3, 4, 5]
    assert traces(supervisor.run) == []
    with pytest.raises((ConnectionRefusedError, FileNotFoundError)):
        await asyncio.open_unix_connection(path)
    await supervisor.stop(0.0)


async def test_without_restart_the_first_death_is_the_last() -> None:
    """`restart: false` gives up at once."""
    supervisor = OrchestratorSupervisor(settings(restart=False), start_life=life(python(STAND_IN)))
    supervisor.start()
    await ask(supervisor.channel_path, "die")
    async with asyncio.timeout(WAIT_S):
        assert await supervisor.wait_gave_up() == "the orchestrator died: exit code 9"
    assert traces(supervisor.run) == []


async def test_a_first_start_that_fails_leaves_nothing() -> None:
    """A missing program is an error of `start`, not a death."""
    before = open_descriptors()
    supervisor = OrchestratorSupervisor(settings(), start_life=life(["/nonexistent"]))
    with pytest.raises(FileNotFoundError):
        supervisor.start()
    assert traces(supervisor.run) == []
    assert open_descriptors() == before


async def test_a_stop_lets_the_orchestrator_drain(capfd: pytest.CaptureFixture[str]) -> None:
    """SIGTERM comes first, and the end is awaited; a stop is no death."""
    deaths: list[str] = []
    drain = """
        def drain(*_):
            time.sleep(0.1)
            os.write(1, b"drained")
            os._exit(0)

        signal.signal(signal.SIGTERM, drain)
    """
    supervisor = OrchestratorSupervisor(
        settings(),
        start_life=life(python(dedent(drain) + dedent(STAND_IN))),
        on_death=lambda _, reason: deaths.append(reason),
    )
    supervisor.start()
    await ask(supervisor.channel_path)
    await supervisor.stop(5.0)
    assert capfd.readouterr().out == "drained"
    assert deaths == []
    assert traces(supervisor.run) == []


@pytest.mark.parametrize("ending", ["stop", "second stop", "kill"])
async def test_a_stubborn_orchestrator_is_killed_in_bounded_time(
    ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who ignores SIGTERM is killed with its group: after the grace, or at once if asked twice."""
    monkeypatch.setattr(module, "KILL_GRACE_S", 0.1 if ending == "stop" else 60.0)
    supervisor = OrchestratorSupervisor(settings(), start_life=life(python(STAND_IN)))
    supervisor.start()
    answer = await ask(supervisor.channel_path, "be stubborn")
    async with asyncio.timeout(WAIT_S):
        match ending:
            case "stop":
                await supervisor.stop(0.1)
            case "second stop":
                await asyncio.gather(supervisor.stop(60.0), supervisor.stop(60.0))
            case _:
                supervisor.kill()
                supervisor.kill()
        await wait_gone(answer.pid)
        await wait_gone(int(answer.extra))
    assert traces(supervisor.run) == []


@pytest.mark.parametrize("moment", ["while it is told of the death", "before the timer"])
async def test_a_kill_after_a_death_starts_nothing_more(moment: str) -> None:
    """The next epoch goes with the supervisor, however close it was."""
    loop = asyncio.get_running_loop()
    died = asyncio.Event()

    def on_death(_epoch: int, _reason: str) -> None:
        died.set()
        if moment == "before the timer":
            loop.call_soon(supervisor.kill)
        else:
            supervisor.kill()

    supervisor = OrchestratorSupervisor(
        settings(),
        start_life=life(python(STAND_IN)),
        restarts=Restarts(first_s=0.0),
        on_death=on_death,
    )
    supervisor.start()
    await ask(supervisor.channel_path, "die")
    await died.wait()
    for _ in range(3):
        await asyncio.sleep(0)  # the turns in which the timer, due at once, would fire
    assert (supervisor.epoch, supervisor.pid) == (1, None)


@pytest.mark.slow
async def test_a_killed_owner_takes_its_orchestrator_along_and_is_cleaned_up_after() -> None:
    """SIGKILL of the owner leaves no process; the directories go with the next start."""
    owner_code = """
        import asyncio
        from functools import partial
        from stretto.config.loading import load_settings
        from stretto.launch.supervisor import OrchestratorSupervisor, start_process

        async def main():
            settings = load_settings(["scripted"], environ={{}})
            supervisor = OrchestratorSupervisor(
                settings, start_life=partial(start_process, command={command!r})
            )
            supervisor.start()
            print(supervisor.pid, supervisor.run, flush=True)
            await supervisor.wait_gave_up()

        asyncio.run(main())
    """
    orchestrator = watching_python("read_spec_line(); exit_with_parent(); time.sleep(60)")
    lines = Lines()
    code = dedent(owner_code).format(command=orchestrator)
    owner = ChildProcess([sys.executable, "-c", code], b"", on_exit=lines, on_line=lines)
    pid, run = (await lines.next()).split()
    assert len(traces(run)) == 2
    os.kill(owner.pid, signal.SIGKILL)
    await wait_gone(int(pid))
    await owner.wait()
    assert len(traces(run)) == 2
    successor = OrchestratorSupervisor(settings(), start_life=life(python(STAND_IN)))
    successor.start()
    await successor.stop(0.0)
    assert traces(run) == []
