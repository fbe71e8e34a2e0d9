"""What every `Launcher` promises, shown by the local one, and how the local one shows output."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import pytest

from stretto.launch.local import LocalLauncher
from stretto.types import IncarnationNumber, Launcher, LaunchSpec, ReplicaId, RunId, StageId
from tests.launch.processes import WAIT_S, Lines, has_children, open_descriptors, python, wait_gone

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

STAND_IN = """
    import json
    spec = json.loads(sys.stdin.readline())
    print(f"up {os.getpid()}", flush=True)
    exec(spec["options"]["code"])
"""
WAIT = "time.sleep(60)"


def spec_of(slot: int, code: str) -> LaunchSpec:
    """Return the specification of a replica that runs some code."""
    return LaunchSpec(
        replica=ReplicaId(StageId("talker"), slot, IncarnationNumber(1)),
        run=RunId("run"),
        address="unix:/nowhere",
        shared_memory_dir=None,
        nonce="nonce",
        backend="scripted",
        options={"code": code},
        runtime={"threads": 1},
        environment={"STAGE_COLOUR": "red"},
    )


class Exits:
    """Collects ends, and lets a test wait for the next one."""

    def __init__(self) -> None:
        self.seen: list[tuple[ReplicaId, str]] = []
        self._news: asyncio.Queue[tuple[ReplicaId, str]] = asyncio.Queue()

    def __call__(self, replica: ReplicaId, reason: str) -> None:
        """Take an end."""
        self.seen.append((replica, reason))
        self._news.put_nowait((replica, reason))

    async def next(self) -> tuple[ReplicaId, str]:
        """Return the next end."""
        async with asyncio.timeout(WAIT_S):
            return await self._news.get()


@pytest.fixture
def lines() -> Lines:
    """What the launcher has written."""
    return Lines()


@pytest.fixture
async def launcher(lines: Lines) -> AsyncIterator[Launcher]:
    """A launcher whose replicas are the stand-in, closed after the test."""
    launcher = LocalLauncher(command=python(STAND_IN), write_line=lines)
    yield launcher
    await launcher.close()


async def pid_of_next(lines: Lines) -> int:
    """Return the process id of the next replica that is up."""
    return int((await lines.next_with(lambda line: "] up " in line)).rpartition(" ")[2])


async def test_each_end_is_reported_once(launcher: Launcher, lines: Lines) -> None:
    """A replica that ends, is stopped, or goes with the launcher is reported once, by identity."""
    exits = Exits()
    specs = [spec_of(0, "pass"), spec_of(1, "sys.exit(7)"), spec_of(2, WAIT), spec_of(3, WAIT)]
    for spec in specs:
        launcher.start(spec, exits)
    assert not exits.seen
    for _ in specs:
        await pid_of_next(lines)
    launcher.stop(specs[2].replica)
    launcher.stop(specs[2].replica)
    for _ in range(3):
        await exits.next()
    await launcher.close()
    assert dict(exits.seen) == {
        specs[0].replica: "exit code 0",
        specs[1].replica: "exit code 7",
        specs[2].replica: "killed on request",
        specs[3].replica: "killed on request",
    }
    assert len(exits.seen) == len(specs)


async def test_a_start_that_fails_is_reported_in_a_later_turn(lines: Lines) -> None:
    """The caller is never called back while it calls."""
    launcher = LocalLauncher(command=["/nonexistent"], write_line=lines)
    exits = Exits()
    spec = spec_of(0, WAIT)
    launcher.start(spec, exits)
    assert not exits.seen
    assert await exits.next() == (
        spec.replica,
        "could not be started: [Errno 2] No such file or directory: '/nonexistent'",
    )
    await launcher.close()


async def test_an_environment_that_no_process_can_have_is_a_failed_start(
    launcher: Launcher,
) -> None:
    """A value with a NUL is reported like a missing program."""
    exits = Exits()
    launcher.start(replace(spec_of(0, WAIT), environment={"A": "\0"}), exits)
    assert (await exits.next())[1] == "could not be started: embedded null byte"


async def test_a_stopped_replica_takes_its_group_along(launcher: Launcher, lines: Lines) -> None:
    """Stop kills what the replica has started too."""
    code = "p = subprocess.Popen(['sleep', '60']); print('grandchild', p.pid, flush=True); " + WAIT
    spec = spec_of(0, code)
    exits = Exits()
    launcher.start(spec, exits)
    line = await lines.next_with(lambda line: "grandchild" in line)
    launcher.stop(spec.replica)
    assert await exits.next() == (spec.replica, "killed on request")
    await wait_gone(int(line.rpartition(" ")[2]))


async def test_stopping_the_unknown_and_the_ended_does_nothing(launcher: Launcher) -> None:
    """A stop that comes late or for nobody is ignored."""
    exits = Exits()
    spec = spec_of(0, "pass")
    launcher.stop(spec.replica)
    launcher.start(spec, exits)
    await exits.next()
    launcher.stop(spec.replica)
    assert len(exits.seen) == 1


async def test_close_may_be_called_twice_and_ends_starting(launcher: Launcher) -> None:
    """After the close nothing is started, and a start says so in a later turn."""
    await launcher.close()
    await launcher.close()
    exits = Exits()
    spec = spec_of(0, WAIT)
    launcher.start(spec, exits)
    assert not exits.seen
    assert await exits.next() == (spec.replica, "not started: the launcher is closed")


async def test_the_specification_arrives_whole(launcher: Launcher, lines: Lines) -> None:
    """The replica can read what the orchestrator wrote, and has the environment asked for."""
    exits = Exits()
    code = "print(json.dumps([spec, os.environ['STAGE_COLOUR']]))"
    spec = spec_of(5, code)
    launcher.start(spec, exits)
    await exits.next()
    line = lines.seen[-1].removeprefix("[talker/5] ")
    received, colour = json.loads(line)
    assert msgspec.convert(received, LaunchSpec) == spec
    assert colour == "red"


async def test_output_is_prefixed_with_stage_and_slot(launcher: Launcher, lines: Lines) -> None:
    """Every line, of a traceback too, says which replica wrote it; a clean end adds nothing."""
    exits = Exits()
    launcher.start(spec_of(3, "print('hello'); print('oh', file=sys.stderr)"), exits)
    await exits.next()
    assert [line.partition(" ")[0] for line in lines.seen] == ["[talker/3]"] * 3
    assert lines.seen[1:] == ["[talker/3] hello", "[talker/3] oh"]


async def test_an_unasked_death_is_shown_with_its_last_words(
    launcher: Launcher, lines: Lines
) -> None:
    """The reason and the last 20 lines stand together, out of the way of other replicas' output."""
    exits = Exits()
    code = "[print('line', n, flush=True) for n in range(30)]; os.kill(os.getpid(), signal.SIGKILL)"
    launcher.start(spec_of(0, code), exits)
    assert (await exits.next())[1] == "killed by SIGKILL (137): out of memory?"
    header, *block = lines.seen[-21:]
    assert header.startswith("[talker/0] died ")
    assert header.endswith(
        " s after its start: killed by SIGKILL (137): out of memory?; its last 20 lines:"
    )
    assert block == [f"[talker/0]   | line {number}" for number in range(10, 30)]


async def test_a_silent_death_says_that_it_was_silent(lines: Lines) -> None:
    """A process that dies before its first word is shown too."""
    launcher = LocalLauncher(command=python("sys.exit(1)"), write_line=lines)
    exits = Exits()
    launcher.start(spec_of(0, ""), exits)
    await exits.next()
    await launcher.close()
    assert lines.seen[0].endswith(" s after its start: exit code 1; it had written nothing")


async def test_a_requested_death_is_not_shown(launcher: Launcher, lines: Lines) -> None:
    """Eviction and shutdown print no block."""
    exits = Exits()
    spec = spec_of(0, WAIT)
    launcher.start(spec, exits)
    await pid_of_next(lines)
    launcher.stop(spec.replica)
    await exits.next()
    assert len(lines.seen) == 1


async def test_a_killed_replica_is_noticed_within_milliseconds(
    launcher: Launcher, lines: Lines
) -> None:
    """From SIGKILL to the report there is no timer."""
    exits = Exits()
    launcher.start(spec_of(0, WAIT), exits)
    pid = await pid_of_next(lines)
    loop = asyncio.get_running_loop()
    killed_at = loop.time()
    os.kill(pid, signal.SIGKILL)
    await exits.next()
    assert loop.time() - killed_at < 0.1


async def test_twenty_lives_leak_no_descriptor_and_no_zombie(launcher: Launcher) -> None:
    """Starts and stops in a row leave the process as it was."""
    exits = Exits()
    launcher.start(spec_of(0, "pass"), exits)
    await exits.next()
    before = open_descriptors()
    for slot in range(20):
        spec = spec_of(slot, WAIT)
        launcher.start(spec, exits)
        launcher.stop(spec.replica)
        await exits.next()
    assert open_descriptors() == before
    assert not has_children()
