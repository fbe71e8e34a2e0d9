"""`stretto serve`: the supervisor process. It owns the port, the orchestrator and the API processes.

Order of the end, on SIGTERM, SIGHUP or Ctrl-C: the API processes refuse new work and finish what runs,
within the drain time; then the orchestrator stops its replicas; then this process removes its
directories. A second signal kills everything at once.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from stretto import __version__
from stretto.cli import exits, http_port
from stretto.cli.api_processes import ApiProcesses
from stretto.cli.asking import Facts, write_facts
from stretto.cli.progress import Progress
from stretto.core.graph import validated
from stretto.engine.client import EngineClient
from stretto.errors import ConfigError, EngineDead, StartFailed
from stretto.launch.supervisor import OrchestratorSupervisor

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    from stretto.config.settings import Settings


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
    server = settings.server
    with ExitStack() as sockets:
        listeners = [
            sockets.enter_context(listener)
            for listener in http_port.bind(server.host, server.port, server.api_processes)
        ]
        return uvloop.run(_Server(settings, listeners, debug_stage).run())


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
        self,
        settings: Settings,
        listeners: Sequence[socket.socket],
        debug_stage: str | None = None,
    ) -> None:
        self._settings = settings
        self._debug_stage = debug_stage
        self._listeners = listeners
        self._progress = Progress(sys.stderr)
        self._started_at = time.monotonic()
        self._outcome: asyncio.Future[int]
        self._orchestrator: OrchestratorSupervisor
        self._api: ApiProcesses
        self._signals = 0
        self._last_signal = signal.SIGTERM

    async def run(self) -> int:
        """Serve until a signal or a failure; return the exit code."""
        loop = asyncio.get_running_loop()
        self._outcome = loop.create_future()
        self._api = ApiProcesses(
            self._listeners,
            self._settings,
            self._progress.line,
            lambda: self._end(exits.NOT_STARTED),
        )
        self._orchestrator = self._make_orchestrator()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            self._orchestrator.start()
            if self._orchestrator.join_address is not None:
                self._progress.line(f"replicas may join at {self._orchestrator.join_address}")
            self._write_facts()
            self._api.start(self._orchestrator.run, self._orchestrator.channel_path)
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
        """Stop in order: first the API processes, then the orchestrator with its replicas."""
        await self._api.stop(self._settings.server.drain_timeout_s)
        await self._orchestrator.stop(1.0)

    def _kill(self) -> None:
        self._api.kill()
        self._orchestrator.kill()

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
            await self._api.wait_ready()
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

    def _write_facts(self) -> None:
        """Leave for `stretto ps` what it can't learn otherwise."""
        url = http_port.url_of(self._listeners[0])
        names = tuple(pipeline.name for pipeline in self._settings.pipelines)
        facts = Facts(url=url, pipelines=names, version=__version__, started_at=time.time())
        write_facts(self._orchestrator.channel_path, facts)

    def _tell_ready(self, client: EngineClient) -> None:
        for view in client.readiness.stages:
            for state in view.replicas:
                self._progress.replica(state)
        pipelines = () if client.latest is None else client.latest.welcome.pipelines
        url = http_port.url_of(self._listeners[0])
        self._progress.ready(url, pipelines, time.monotonic() - self._started_at)

    async def _watch_supervisor(self) -> None:
        reason = await self._orchestrator.wait_gave_up()
        self._progress.line(f"{reason}; giving up")
        self._end(exits.NOT_STARTED)
