"""A replica on another host, by network namespaces: its link is cut without a word, and restored."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
from typing import TYPE_CHECKING

import msgspec
import pytest

from tests.e2e.engines import Heard, Script, all_idle, coming, engine_of, in_time, listen, scripted
from tests.e2e.joining import joinable, joining

if TYPE_CHECKING:
    from collections.abc import Generator

pytestmark = pytest.mark.e2e

SILENCE_S = 2.0
SAMPLES = 20 * 480
SLOW: Script = {"tone": {"chunks": 20, "delay_s": 0.1}, "relay": {}}
LARGE: Script = {"tone": {"chunks": 5, "bytes": 400_000}, "relay": {}}


class Wire:
    """A network namespace that stands for another host, and the cable to it."""

    def __init__(self) -> None:
        number = os.getpid() % 16_000
        self.name = f"stretto-{os.getpid()}"
        self.ours, self.theirs = f"st{number}a", f"st{number}b"
        subnet = f"198.18.{number // 64}.{number % 64 * 4}"
        first, _, last = subnet.rpartition(".")
        self.our_host, self.their_host = f"{first}.{int(last) + 1}", f"{first}.{int(last) + 2}"

    @property
    def inside(self) -> tuple[str, ...]:
        """The command that runs another one on the other host."""
        return ("ip", "netns", "exec", self.name)

    def lay(self) -> None:
        """Make the host and connect it.

        Raises:
            subprocess.CalledProcessError: That is not allowed here.
        """
        run("ip", "netns", "add", self.name)
        run("ip", "link", "add", self.ours, "type", "veth", "peer", "name", self.theirs)
        run("ip", "link", "set", self.theirs, "netns", self.name)
        run("ip", "address", "add", f"{self.our_host}/30", "dev", self.ours)
        run("ip", "link", "set", self.ours, "up")
        run(*self.inside, "ip", "address", "add", f"{self.their_host}/30", "dev", self.theirs)
        run(*self.inside, "ip", "link", "set", "lo", "up")
        run(*self.inside, "ip", "link", "set", self.theirs, "up")

    def cut(self) -> None:
        """Lose every packet from now on; neither end is told."""
        run(*self.inside, "ip", "link", "set", self.theirs, "down")

    def restore(self) -> None:
        """Let packets pass again."""
        run(*self.inside, "ip", "link", "set", self.theirs, "up")

    def remove(self) -> None:
        """Leave nothing behind."""
        for command in (("link", "delete", self.ours), ("netns", "delete", self.name)):
            subprocess.run(("ip", *command), capture_output=True, check=False)  # noqa: S607 - where it is varies


def run(*command: str) -> None:
    """Run a command that must succeed."""
    subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)


@contextlib.contextmanager
def another_host() -> Generator[Wire]:
    """Provide another host until the block ends; skip the test, with the reason, where that can't be."""
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` command here, so no network namespace can be made")
    wire = Wire()
    try:
        wire.lay()
    except subprocess.CalledProcessError as error:
        wire.remove()
        pytest.skip(f"no network namespace can be made here: {error.stderr.strip()}")
    try:
        yield wire
    finally:
        wire.remove()


async def test_row_M2_a_host_that_is_partitioned_away_comes_back_and_serves_again() -> None:
    """Both ends notice within seconds; the stream goes on at the new incarnation, byte-identical."""
    with another_host() as wire:
        settings = joinable(scripted(tone=0))
        _, _, port = str(settings.orchestrator.join_address).rpartition(":")
        orchestrator = msgspec.structs.replace(
            settings.orchestrator,
            join_address=f"{wire.our_host}:{port}",
            join_silence_s=SILENCE_S,
        )
        settings = msgspec.structs.replace(settings, orchestrator=orchestrator)
        async with engine_of(settings) as engine:
            with joining(
                orchestrator.join_address,
                "tone",
                "--silence",
                str(SILENCE_S),
                inside=wire.inside,
            ) as joined:
                heard = Heard()
                running = asyncio.create_task(listen(engine, "cut", SLOW, heard))
                await heard.has_begun.wait()
                lost = coming(engine, lambda s: s.replica.stage == "tone" and s.state == "stopped")
                wire.cut()
                await in_time(lost)
                await asyncio.to_thread(joined.wait_line, "lost the link as tone/0#1")
                assert not running.done()
                wire.restore()
                await running
                assert (heard.error, heard.samples("cut")) == (None, SAMPLES)
                await asyncio.to_thread(joined.wait_line, "as tone/0#2")
                again = await listen(engine, "again", LARGE)
                assert (again.error, again.samples("again")) == (None, 1_000_000)
                await all_idle(engine)
                assert await asyncio.to_thread(joined.stop, signal.SIGTERM) == 0
