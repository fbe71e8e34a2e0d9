"""The leak check sees what tests may leave behind."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import threading
import uuid
from typing import TYPE_CHECKING

import pytest

from tests.support.leaks import MARK, SHARED_MEMORY, Holdings

if TYPE_CHECKING:
    from pathlib import Path

ENDLESS = "import signal; print(flush=True); signal.pause()"


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> str:
    """A mark for processes started from here on."""
    value = uuid.uuid4().hex
    monkeypatch.setenv(MARK, value)
    return value


async def test_a_clean_test_leaves_nothing(mark: str) -> None:
    """Looking twice at the same state finds no difference."""
    before = Holdings.now(mark)
    assert Holdings.now(mark).beyond(before) == []


async def test_a_process_is_seen_until_it_was_waited_for(mark: str) -> None:
    """A child counts while it runs and as long as nobody has collected its end."""
    before = Holdings.now(mark)
    with subprocess.Popen([sys.executable, "-c", ENDLESS], stdout=subprocess.PIPE) as child:  # noqa: ASYNC220
        assert child.stdout is not None
        child.stdout.readline()
        assert any(f"process {child.pid} " in line for line in Holdings.now(mark).beyond(before))
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222 - it was killed
        assert any("(zombie)" in line for line in Holdings.now(mark).beyond(before))
    assert Holdings.now(mark).beyond(before) == []


async def test_an_orphan_is_seen(mark: str) -> None:
    """A process whose parent has ended still carries the mark."""
    before = Holdings.now(mark)
    parent = (
        "import subprocess, sys; "
        f"print(subprocess.Popen([sys.executable, '-c', {ENDLESS!r}], stdout=subprocess.DEVNULL).pid)"
    )
    orphan = int(subprocess.check_output([sys.executable, "-c", parent], text=True))  # noqa: ASYNC221
    try:
        assert any(f"process {orphan} " in line for line in Holdings.now(mark).beyond(before))
    finally:
        os.kill(orphan, 9)


async def test_descriptors_threads_and_tasks_are_seen(mark: str) -> None:
    """What lives inside the test process is named, each by its kind."""
    before = Holdings.now(mark)
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="left-behind")
    thread.start()
    task = asyncio.create_task(asyncio.Event().wait())
    number = os.memfd_create("left-behind")
    left = Holdings.now(mark).beyond(before)
    os.close(number)
    task.cancel()
    done.set()
    thread.join()
    assert [line.split()[0] for line in left] == ["descriptor", "thread", "task"]


async def test_shared_memory_is_seen_unless_its_owner_lives(mark: str) -> None:
    """A run directory without a held lock is left behind; one with a held lock is somebody's."""
    before = Holdings.now(mark)
    directory = SHARED_MEMORY / f"stretto-{os.getuid()}-{mark}"
    directory.mkdir()
    try:
        assert Holdings.now(mark).beyond(before) == [f"shared memory {directory}"]
        code = (
            "import fcntl, sys; owner = open(sys.argv[1], 'wb'); "
            f"fcntl.flock(owner, fcntl.LOCK_EX); {ENDLESS}"
        )
        with subprocess.Popen(  # noqa: ASYNC220
            [sys.executable, "-c", code, str(directory / "owner")], stdout=subprocess.PIPE
        ) as owner:
            assert owner.stdout is not None
            owner.stdout.readline()
            assert Holdings.now(mark).shared_memory == before.shared_memory
            owner.kill()
    finally:
        shutil.rmtree(directory)


@pytest.mark.slow
def test_the_fixture_names_what_is_left(leaking_run: tuple[int, str]) -> None:
    """A test that leaves a descriptor behind fails at its end, with the descriptor's target."""
    code, printed = leaking_run
    assert code == 1
    assert "left behind:" in printed
    assert "memfd:left-behind" in printed


@pytest.fixture
def leaking_run(tmp_path: Path) -> tuple[int, str]:
    """Run a leaking test in a pytest of its own; return its exit code and report."""
    leaking = tmp_path / "test_leaking.py"
    leaking.write_text(
        "import os\n\n\ndef test_leaking(leak_check):\n    os.memfd_create('left-behind')\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "--rootdir", str(tmp_path), "-o", "asyncio_mode=auto", str(leaking)],
        capture_output=True,
        check=False,
        text=True,
    )
    return done.returncode, done.stdout
