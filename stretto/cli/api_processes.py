"""The API processes of a server: each has its own socket and channel, and is replaced when it dies.

The sockets are this process's own, so connections that come while one of them is replaced wait for
its successor.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import TYPE_CHECKING

import msgspec

from stretto.config.process_specs import ApiSpec
from stretto.launch.child import ChildProcess
from stretto.launch.restarts import Restarts

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from stretto.config.settings import Settings
    from stretto.types import RunId

API_COMMAND = (sys.executable, "-m", "stretto.cli.run_api")

GRACE_S = 1.5
"""How much longer than the drain time an API process may take to end."""


class ApiProcesses:
    """Runs one API process per listening socket.

    Args:
        listeners: Where HTTP clients connect; one per process.
        settings: The deployment.
        say: Tells the operator something.
        on_given_up: Called once when one of them kept dying and is not started again.
        command: The program of an API process.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        settings: Settings,
        say: Callable[[str], None],
        on_given_up: Callable[[], None],
        command: Sequence[str] = API_COMMAND,
    ) -> None:
        self._say = say
        self._on_given_up = on_given_up
        names = ["api"] if len(listeners) == 1 else [f"api/{n}" for n in range(len(listeners))]
        self._places = [
            _Place((*command, name), listener, settings, self._died)
            for name, listener in zip(names, listeners, strict=True)
        ]
        self._is_stopping = False

    def start(self, run: RunId, channel_path: str) -> None:
        """Start them; needs a running loop."""
        for place in self._places:
            place.start(run, channel_path)

    async def wait_ready(self) -> None:
        """Wait until each has accepted connections once."""
        for place in self._places:
            await place.is_ready.wait()

    async def stop(self, drain_s: float) -> None:
        """Let all of them drain at the same time; kill what is left after that."""
        self._is_stopping = True
        for place in self._places:
            place.give_up()
        running = [place.child for place in self._places if place.child is not None]
        for child in running:
            child.terminate()
        try:
            async with asyncio.timeout(drain_s + GRACE_S):
                for child in running:
                    await child.wait()
        except TimeoutError:
            self.kill()
            for child in running:
                await child.wait()

    def kill(self) -> None:
        """End all of them at once. May be called twice."""
        self._is_stopping = True
        for place in self._places:
            place.kill()

    def _died(self, place: _Place, reason: str) -> None:
        if self._is_stopping:
            return
        what = "the API process" if len(self._places) == 1 else f"the API process {place.name}"
        self._say(f"{what} has ended: {reason}")
        if not place.start_again():
            self._say(f"{what} kept ending; giving up")
            self._on_given_up()


class _Place:
    """One socket and whichever process serves it now."""

    def __init__(
        self,
        command: Sequence[str],
        listener: socket.socket,
        settings: Settings,
        on_death: Callable[[_Place, str], None],
    ) -> None:
        # The last word is for people who look at a list of processes; the program ignores it.
        self._command = command
        self.name = command[-1]
        self.child: ChildProcess | None = None
        self.is_ready = asyncio.Event()
        self._listener = listener
        self._settings = settings
        self._on_death = on_death
        self._restarts = Restarts()
        self._started_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._spec: tuple[RunId, str] | None = None

    def start(self, run: RunId, channel_path: str) -> None:
        self._spec = (run, channel_path)
        self._start()

    def start_again(self) -> bool:
        """Start a successor after a while; false if too many have died."""
        now = time.monotonic()
        delay_s = self._restarts.delay_after_death(now, now - self._started_at)
        if delay_s is None:
            return False
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._try_again)
        return True

    def _try_again(self) -> None:
        try:
            self._start()
        except OSError as error:
            self._on_death(self, f"it could not be started: {error}")

    def give_up(self) -> None:
        """Start no successor."""
        if self._timer is not None:
            self._timer.cancel()

    def kill(self) -> None:
        self.give_up()
        if self.child is not None:
            self.child.kill()

    def _start(self) -> None:
        assert self._spec is not None
        run, channel_path = self._spec
        read_fd, write_fd = os.pipe()
        os.set_blocking(read_fd, False)
        spec = ApiSpec(
            run=run,
            name=self.name,
            channel_path=channel_path,
            http_fd=self._listener.fileno(),
            ready_fd=write_fd,
            settings=self._settings,
        )
        self._started_at = time.monotonic()
        try:
            self.child = ChildProcess(
                self._command,
                msgspec.json.encode(spec),
                on_exit=lambda reason: self._on_death(self, reason),
                pass_fds=[self._listener.fileno(), write_fd],
            )
        except OSError:
            os.close(read_fd)
            raise
        finally:
            os.close(write_fd)
        loop = asyncio.get_running_loop()

        def on_readable() -> None:
            loop.remove_reader(read_fd)
            if os.read(read_fd, 1):
                self.is_ready.set()
            os.close(read_fd)

        loop.add_reader(read_fd, on_readable)
