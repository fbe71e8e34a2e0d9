"""Owns the orchestrator: its directories, its listening socket, and its next life.

Each life is an *epoch*. All epochs share the listening socket, so a client that connects between
two of them waits in the backlog and is served by the next one. Each epoch has a directory for payload
files of its own, which goes when the next epoch starts.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from stretto.config.process_specs import OrchestratorSpec
from stretto.errors import ConfigError
from stretto.launch.child import ChildProcess
from stretto.launch.restarts import Restarts
from stretto.transport.listening import listen_unix, private_directory, socket_base
from stretto.transport.pulling import PayloadServer, payload_token
from stretto.transport.run_directory import SHARED_MEMORY_BASE, RunDirectory
from stretto.transport.tcp import Address, address_of, listen_tcp
from stretto.types import RunId

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from stretto.config.settings import OrchestratorSettings, Settings

ORCHESTRATOR_COMMAND = (sys.executable, "-m", "stretto.cli.run_orchestrator")
KILL_GRACE_S = 2.0
"""How much longer than its drain time an orchestrator may take to end."""


class Life(Protocol):
    """A running or ended orchestrator; `ChildProcess` is one."""

    @property
    def pid(self) -> int | None:
        """Its process, if it has one of its own."""
        ...

    @property
    def is_running(self) -> bool:
        """Whether its end is still to be told."""
        ...

    def terminate(self) -> None:
        """Ask it to end."""
        ...

    def kill(self) -> None:
        """End it at once. An ended one is left alone."""
        ...

    async def wait(self) -> str:
        """Wait until it has ended and its end was told; return the reason."""
        ...


def start_process(
    spec: OrchestratorSpec,
    on_exit: Callable[[str], None],
    command: Sequence[str] = ORCHESTRATOR_COMMAND,
) -> Life:
    """Start an orchestrator as a child process.

    Args:
        spec: What it is told.
        on_exit: Called once on the running loop with the reason of its end.
        command: The program.

    Raises:
        OSError: The process can't be started.
    """
    fds = [fd for fd in (spec.channel_fd, spec.join_fd) if fd is not None]
    return ChildProcess(command, msgspec.json.encode(spec), on_exit=on_exit, pass_fds=fds)


class OrchestratorSupervisor:
    """Runs the orchestrator of one deployment, one life after the other, until stopped or given up.

    Attributes:
        run: The run's identity.
        epoch: The number of the newest epoch; 0 before the start.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        on_epoch: Callable[[int], None] | None = None,
        on_death: Callable[[int, str], None] | None = None,
        on_release: Callable[[], None] | None = None,
        start_life: Callable[[OrchestratorSpec, Callable[[str], None]], Life] = start_process,
        restarts: Restarts | None = None,
    ) -> None:
        """Prepare; nothing is created or started.

        Args:
            settings: The deployment. `orchestrator.restart` says whether a death has a successor.
            on_epoch: Called on the loop when an epoch has been started.
            on_death: Called on the loop with the number and the reason when an epoch ended unasked.
            on_release: Called when no epoch will follow. May be called twice.
            start_life: Starts an epoch; see `start_process`.
            restarts: The back-off and the breaker.
        """
        self.run = RunId(secrets.token_hex(6))
        self.epoch = 0
        self._settings = settings
        self._on_epoch = on_epoch
        self._on_death = on_death
        self._on_release = on_release
        self._start_life = start_life
        self._restarts = restarts if restarts is not None else Restarts()
        self._run_directory: RunDirectory | None = None
        self._payloads: RunDirectory | None = None
        self._listener: socket.socket | None = None
        self._join_listener: socket.socket | None = None
        self._payload_server: PayloadServer | None = None
        self._life: Life | None = None
        self._started_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._gave_up: asyncio.Future[str] | None = None
        self._is_stopping = False

    @property
    def channel_path(self) -> str:
        """Return the path of the socket that the orchestrator serves; it exists after `start`."""
        assert self._run_directory is not None, "start first"
        return f"{self._run_directory.path}/channel.sock"

    @property
    def join_address(self) -> Address | None:
        """Return where replicas from other hosts join; `None` if they can't."""
        if self._join_listener is None:
            return None
        return Address(*self._join_listener.getsockname()[:2])

    @property
    def pid(self) -> int | None:
        """Return the process id of the running epoch, if it is a process."""
        return self._life.pid if self._life is not None and self._life.is_running else None

    def start(self) -> None:
        """Create the directories and the socket, then start the first epoch.

        Clients may connect from now on; they are served when the orchestrator is up.

        Raises:
            OSError: A directory, the socket or the process can't be made.
            ConfigError: The socket's path is too long, or replicas can't join where they should.
        """
        self._gave_up = asyncio.get_running_loop().create_future()
        RunDirectory.reclaim(socket_base())
        if Path(SHARED_MEMORY_BASE).is_dir():
            RunDirectory.reclaim()
        try:
            self._run_directory = private_directory(self.run)
            self._listener = listen_unix(self.channel_path)
            self._join_listener = _listen_for_joins(self._settings.orchestrator)
            if self.join_address is not None:
                silence_s = self._settings.orchestrator.join_silence_s
                self._payload_server = PayloadServer(self.join_address.host, silence_s)
            self._start_epoch()
        except BaseException:
            self._release()
            raise

    async def wait_gave_up(self) -> str:
        """Wait until no epoch will follow although nobody asked to stop; return the reason."""
        assert self._gave_up is not None, "start first"
        return await asyncio.shield(self._gave_up)

    async def stop(self, drain_s: float) -> None:
        """Let the orchestrator drain for at most `drain_s` seconds, then leave nothing.

        A second call, while the first one waits, kills at once.
        """
        if self._is_stopping:
            self.kill()
        self._end_supervision()
        life = self._life
        try:
            if life is not None and life.is_running:
                life.terminate()
                await asyncio.wait_for(life.wait(), drain_s + KILL_GRACE_S)
        except TimeoutError:
            self.kill()
            if life is not None:
                await life.wait()
        finally:
            self.kill()

    def kill(self) -> None:
        """End everything at once and remove the directories. May be called twice."""
        self._end_supervision()
        if self._life is not None:
            self._life.kill()
        self._release()

    def _end_supervision(self) -> None:
        self._is_stopping = True
        if self._timer is not None:
            self._timer.cancel()

    def _start_epoch(self) -> None:
        assert self._listener is not None
        assert self._run_directory is not None
        self.epoch += 1
        self._renew_payloads()
        spec = OrchestratorSpec(
            run=self.run,
            epoch=self.epoch,
            channel_fd=self._listener.fileno(),
            run_directory=self._run_directory.path,
            shared_memory_dir=self._payloads.path if self._payloads is not None else None,
            settings=self._settings,
            payload_port=(0 if self._payload_server is None else self._payload_server.address.port),
            join_fd=None if self._join_listener is None else self._join_listener.fileno(),
        )
        self._started_at = time.monotonic()
        self._life = self._start_life(spec, self._on_exit)
        if self._on_epoch is not None:
            self._on_epoch(self.epoch)

    def _renew_payloads(self) -> None:
        """Replace the directory for payload files; without shared memory there is none."""
        if self._payloads is not None:
            self._payloads.close()
        try:
            self._payloads = RunDirectory.create(f"{self.run}-{self.epoch}")
        except OSError:
            self._payloads = None
        if self._payload_server is not None and self._payloads is not None:
            token = payload_token(self._settings.orchestrator.join_token, self.run)
            self._payload_server.serve(self._payloads.path, token)

    def _on_exit(self, reason: str) -> None:
        if self._is_stopping:
            return
        if self._on_death is not None:
            self._on_death(self.epoch, reason)
        if self._is_stopping:  # what heard of the death has stopped us
            return
        now = time.monotonic()
        if not self._settings.orchestrator.restart:
            self._give_up(f"the orchestrator died: {reason}")
            return
        delay_s = self._restarts.delay_after_death(now, now - self._started_at)
        if delay_s is None:
            self._give_up(f"the orchestrator kept dying, the last time by: {reason}")
        else:
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._start_next_epoch)

    def _start_next_epoch(self) -> None:
        try:
            self._start_epoch()
        except OSError as error:
            self._on_exit(f"could not be started: {error}")

    def _give_up(self, reason: str) -> None:
        assert self._gave_up is not None
        self._end_supervision()
        self._release()
        self._gave_up.set_result(reason)

    def _release(self) -> None:
        """Close the socket, which refuses who waits in its backlog, and remove the directories."""
        for listener in (self._listener, self._join_listener):
            if listener is not None:
                listener.close()
        if self._payload_server is not None:
            self._payload_server.close()
        if self._on_release is not None:
            self._on_release()
        for directory in (self._payloads, self._run_directory):
            if directory is not None:
                directory.close()


def _listen_for_joins(settings: OrchestratorSettings) -> socket.socket | None:
    """Return the socket at which replicas from other hosts join, if they may."""
    if settings.join_address is None:
        return None
    if (mistake := settings.join_mistake()) is not None:
        raise ConfigError(mistake)
    try:
        return listen_tcp(address_of(settings.join_address), settings.join_silence_s)
    except OSError as error:
        raise ConfigError(
            f"orchestrator.join_address: {settings.join_address} can't be bound: "
            f"{error.strerror or error}; choose another port, or an address of this host"
        ) from error
