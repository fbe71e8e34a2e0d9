"""`stretto serve`: the supervisor process. It owns the port, the orchestrator and the API process.

Order of the end, on SIGTERM, SIGHUP or Ctrl-C: the API process refuses new work and finishes what runs,
within the drain time; then the orchestrator stops its replicas; then this process removes its
directories. A second signal kills everything at once.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import uvloop

from stretto.cli import exits, http_port
from stretto.cli.progress import Progress
from stretto.config.process_specs import ApiSpec
from stretto.core.graph import validated
from stretto.engine.client import EngineClient
from stretto.errors import ConfigError, EngineDead, StartFailed
from stretto.launch.child import ChildProcess
from stretto.launch.restarts import Restarts
from stretto.launch.supervisor import OrchestratorSupervisor

if TYPE_CHECKING:
    import socket

    from stretto.config.settings import Settings

API_COMMAND = (sys.executable, "-m", "stretto.cli.run_api")

API_GRACE_S = 1.5
"""How much longer than the drain time the API process may take to end."""


def serve_until_stopped(settings: Settings, debug_stage: str | None = None) -> int:
    """Bind the port, start everything, and return the exit code when it has ended.

    Args:
        settings: The deployment.
        debug_stage: A stage that runs inside this process, for a debugger.

    Raises:
        ConfigError: The deployment is unsound, or the port can't be bound.
    """
    if debug_stage is not None:
        from stretto.engine.debugging import patient

        settings = patient(settings, debug_stage)
    validated(settings.deployment())
    _check_event_log(settings.orchestrator.event_log)
    listener = http_port.bind(settings.server.host, settings.server.port)
    with listener:
        return uvloop.run(_Server(settings, listener, debug_stage).run())


def _check_event_log(path: str | None) -> None:
    """Raise `ConfigError` if the event log can't be written, before anything is started."""
    if path is None:
        return
    try:
        with Path(path).open("ab"):
            pass
    except OSError as error:
        raise ConfigError(
            f"orchestrator.event_log: {path} can't be written: {error.strerror}; name another file"
        ) from error


class _Server:
    """One run of `stretto serve`."""

    def __init__(
        self, settings: Settings, listener: socket.socket, debug_stage: str | None = None
    ) -> None:
        self._settings = settings
        self._debug_stage = debug_stage
        self._listener = listener
        self._progress = Progress(sys.stderr)
        self._started_at = time.monotonic()
        self._outcome: asyncio.Future[int]
        self._orchestrator: OrchestratorSupervisor
        self._api: ChildProcess | None = None
        self._api_restarts = Restarts()
        self._api_started_at = 0.0
        self._api_is_ready: asyncio.Event
        self._signals = 0
        self._last_signal = signal.SIGTERM
        self._is_stopping = False

    async def run(self) -> int:
        """Serve until a signal or a failure; return the exit code."""
        loop = asyncio.get_running_loop()
        self._outcome = loop.create_future()
        self._api_is_ready = asyncio.Event()
        self._orchestrator = self._make_orchestrator()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            self._orchestrator.start()
            self._start_api()
            async with asyncio.TaskGroup() as tasks:
                watchers = [
                    tasks.create_task(self._watch_engine(), name="watch-engine"),
                    tasks.create_task(self._watch_supervisor(), name="watch-supervisor"),
                ]
                code = await self._outcome
                for watcher in watchers:
                    watcher.cancel()
            await self._stop()
        finally:
            self._kill()
        return self._second_signal_code() or code

    def _make_orchestrator(self) -> OrchestratorSupervisor:
        on_death = self._progress.orchestrator_died
        if self._debug_stage is None:
            return OrchestratorSupervisor(self._settings, on_death=on_death)
        import logging

        from stretto.engine.debugging import DebugLauncher
        from stretto.engine.thread import in_thread

        logging.basicConfig(format="[orchestrator] %(levelname)s %(message)s", level=logging.INFO)
        self._progress.line(f"stage {self._debug_stage} runs in this process, {os.getpid()}")
        launcher = partial(DebugLauncher, self._debug_stage)
        return in_thread(self._settings, make_launcher=launcher, on_death=on_death)[0]

    # ------------------------------------------------------------------ signals and the end

    def _on_signal(self, number: signal.Signals) -> None:
        self._signals += 1
        if self._signals == 1:
            self._progress.line("stopping: finishing what runs; a second signal stops at once")
            self._end(exits.OK)
            return
        self._last_signal = number
        self._kill()

    def _second_signal_code(self) -> int:
        return exits.SECOND_SIGNAL + self._last_signal if self._signals > 1 else 0

    def _end(self, code: int) -> None:
        if not self._outcome.done():
            self._outcome.set_result(code)

    async def _stop(self) -> None:
        """Stop in order: first the API process, then the orchestrator with its replicas."""
        self._is_stopping = True
        drain_s = self._settings.server.drain_timeout_s
        if self._api is not None and self._api.is_running:
            self._api.terminate()
            try:
                async with asyncio.timeout(drain_s + API_GRACE_S):
                    await self._api.wait()
            except TimeoutError:
                self._api.kill()
                await self._api.wait()
        await self._orchestrator.stop(1.0)

    def _kill(self) -> None:
        self._is_stopping = True
        if self._api is not None:
            self._api.kill()
        self._orchestrator.kill()

    # ------------------------------------------------------------------ the API process

    def _start_api(self) -> None:
        read_fd, write_fd = os.pipe()
        os.set_blocking(read_fd, False)
        spec = ApiSpec(
            run=self._orchestrator.run,
            channel_path=self._orchestrator.channel_path,
            http_fd=self._listener.fileno(),
            ready_fd=write_fd,
            settings=self._settings,
        )
        self._api_started_at = time.monotonic()
        self._api = ChildProcess(
            API_COMMAND,
            msgspec.json.encode(spec),
            on_exit=self._on_api_exit,
            pass_fds=[self._listener.fileno(), write_fd],
        )
        os.close(write_fd)
        loop = asyncio.get_running_loop()

        def on_readable() -> None:
            loop.remove_reader(read_fd)
            if os.read(read_fd, 1):
                self._api_is_ready.set()
            os.close(read_fd)

        loop.add_reader(read_fd, on_readable)

    def _on_api_exit(self, reason: str) -> None:
        if self._is_stopping:
            return
        now = time.monotonic()
        self._progress.line(f"the API process has ended: {reason}")
        delay_s = self._api_restarts.delay_after_death(now, now - self._api_started_at)
        if delay_s is None:
            self._progress.line("the API process kept ending; giving up")
            self._end(exits.NOT_STARTED)
            return
        asyncio.get_running_loop().call_later(delay_s, self._restart_api)

    def _restart_api(self) -> None:
        if not self._is_stopping:
            self._start_api()

    # ------------------------------------------------------------------ the engine

    async def _watch_engine(self) -> None:
        """Follow each life of the orchestrator: show loading, say when all is ready."""
        client = EngineClient(
            self._orchestrator.channel_path, run=self._orchestrator.run, name="supervisor"
        )
        client.subscribe(self._progress.replica)
        client.start()
        try:
            await client.wait_ready()
            await self._api_is_ready.wait()
            self._tell_ready(client)
            while client.latest is not None:
                await asyncio.shield(client.latest.closed)
                await client.wait_ready()
                self._progress.line("ready again")
        except StartFailed as error:
            self._progress.line(f"the engine did not start: {error}")
            self._end(exits.NOT_STARTED)
        except EngineDead:
            pass  # no further life comes: `_watch_supervisor` knows why
        finally:
            await client.aclose()

    def _tell_ready(self, client: EngineClient) -> None:
        for view in client.readiness.stages:
            for state in view.replicas:
                self._progress.replica(state)
        pipelines = () if client.latest is None else client.latest.welcome.pipelines
        host, port = self._listener.getsockname()[:2]
        self._progress.ready(host, port, pipelines, time.monotonic() - self._started_at)

    async def _watch_supervisor(self) -> None:
        reason = await self._orchestrator.wait_gave_up()
        self._progress.line(f"{reason}; giving up")
        self._end(exits.NOT_STARTED)
