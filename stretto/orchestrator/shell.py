"""The orchestrator: sockets, dispatcher, router and executor, from the first event to the last."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

from stretto.core import events as on
from stretto.core.router import Router, Statistics
from stretto.errors import Failure, FailureKind, text_of
from stretto.messages import PROTOCOL_VERSION, channel
from stretto.observe import EventLogWriter
from stretto.observe.metrics import Metrics
from stretto.orchestrator.answers import Answers
from stretto.orchestrator.calls import CallValues
from stretto.orchestrator.channels import Channels
from stretto.orchestrator.dispatcher import Dispatcher
from stretto.orchestrator.door import Door
from stretto.orchestrator.executor import Executor, payload_token_of
from stretto.orchestrator.links import Links
from stretto.orchestrator.payloads import PayloadTable
from stretto.transport.connection import serve_unix

if TYPE_CHECKING:
    from stretto.config.process_specs import OrchestratorSpec
    from stretto.core.commands import AnyCommand
    from stretto.transport.local import LocalListener
    from stretto.types import ChannelId, Launcher

log = logging.getLogger("stretto.orchestrator")

LAST_WORDS_S = 1.0
"""How long the end waits for API processes to read their last messages."""


class Orchestrator:
    """One life (epoch) of the orchestrator; create it on its loop, then `await run()`.

    Args:
        spec: What this process, or this thread, was told.
        launcher: Starts and kills replica processes.
        listener: Where clients in this process connect, beside those who use the socket.
        life: As whom it serves there; see `LocalListener.new_life`.

    Raises:
        ConfigError: The deployment is unsound.
    """

    def __init__(
        self,
        spec: OrchestratorSpec,
        launcher: Launcher,
        listener: LocalListener[channel.Up, channel.Down] | None = None,
        life: int | None = None,
    ) -> None:
        self._spec = spec
        self._listener = listener
        self._life = life
        self._launcher = launcher
        self._router = Router(spec.settings.deployment())
        self._ended: asyncio.Future[Failure | None] = asyncio.get_running_loop().create_future()
        self._replica_path = str(Path(spec.run_directory) / f"replicas-{spec.epoch}.sock")
        event_log = spec.settings.orchestrator.event_log
        self._event_log = (
            None if event_log is None else EventLogWriter(event_log, self._router.deployment)
        )
        self._metrics = Metrics(spec.epoch)
        self._payloads = PayloadTable(spec.shared_memory_dir)
        calls = CallValues()
        self._dispatcher = Dispatcher(
            self._router,
            self._execute,
            self._end_turn,
            self._crashed,
            time.monotonic,
            (self._metrics,) if self._event_log is None else (self._metrics, self._event_log),
        )
        self._channels = Channels(
            self._dispatcher,
            self._payloads,
            spec.run,
            spec.epoch,
            time.monotonic,
            self._welcome,
            Answers(self._router, self._metrics, spec.epoch),
            calls,
        )
        self._links = Links(
            self._dispatcher,
            self._payloads,
            spec.run,
            time.monotonic,
            self._channels.learn,
            calls,
        )
        self._door = (
            None
            if spec.join_fd is None
            else Door(
                self._dispatcher,
                self._links,
                spec.settings.orchestrator.join_token,
                spec.run,
                time.monotonic,
                spec.payload_port,
            )
        )
        self._executor = Executor(
            spec,
            self._links,
            self._channels,
            self._payloads,
            calls,
            launcher,
            f"unix:{self._replica_path}",
            self._stopped,
            self._door,
        )

    async def run(self) -> int:
        """Serve until a shutdown was asked for or the router breaks; return the exit code.

        The order at the end: channels hear the last word, processes are killed, sockets closed. Whatever
        else ends it, cancellation included, is a crash: channels hear that first.
        """
        listening = socket.socket(fileno=self._spec.channel_fd)
        try:
            replicas = await serve_unix(self._replica_path, self._links.accept)
        except BaseException:
            listening.close()  # else connections would wait for nobody
            raise
        channels = await serve_unix(listening, self._channels.accept)
        log.debug("epoch %d listens at %s", self._spec.epoch, self._replica_path)
        try:
            if self._listener is not None:
                self._listener.serve(self._channels.accept_local, self._life)
            self._dispatcher.post(on.EngineStarted(now=time.monotonic()))
            if self._door is not None:
                await self._door.open(socket.socket(fileno=self._spec.join_fd))
            fatal = await self._ended
        except BaseException as error:
            self._crashed(error)
            raise
        finally:
            self._dispatcher.stop()
            replicas.close()
            channels.close()
            if self._door is not None:
                self._door.close()
            self._links.close()
            await self._launcher.close()
            await self._channels.wait_closed(LAST_WORDS_S)
            if self._event_log is not None:
                self._event_log.close()
        return 0 if fatal is None else 1

    def shut_down(self) -> None:
        """Finish what runs within the drain time, then end; what is left then fails."""
        drain_s = self._spec.settings.server.drain_timeout_s
        self._dispatcher.post(on.ShutdownRequested(now=time.monotonic(), drain_s=drain_s))

    def statistics(self) -> Statistics:
        """Return the router's counters and gauges."""
        return self._router.statistics()

    @property
    def dispatcher(self) -> Dispatcher:
        """The serial dispatcher, for observers."""
        return self._dispatcher

    def _execute(self, command: AnyCommand) -> None:
        self._executor.execute(command)

    def _end_turn(self) -> None:
        self._links.end_turn()
        self._channels.end_turn()

    def _stopped(self) -> None:
        """Everything was stopped on purpose."""
        self._channels.close(fatal=None)
        self._end(None)

    def _crashed(self, error: BaseException) -> None:
        """The router's state is unknown: tell everybody, then end."""
        log.critical("the orchestrator has crashed", exc_info=error)
        text = text_of(error) or type(error).__name__
        failure = Failure(
            kind=FailureKind.ENGINE_DEAD,
            detail=f"the orchestrator has crashed: {text}",
            retry_after_s=1.0,
        )
        self._channels.close(fatal=failure)
        self._end(failure)

    def _end(self, fatal: Failure | None) -> None:
        if not self._ended.done():
            self._ended.set_result(fatal)

    def _welcome(self, name: ChannelId) -> channel.Welcome:
        deployment = self._router.deployment
        return channel.Welcome(
            PROTOCOL_VERSION,
            self._spec.epoch,
            name,
            self._spec.shared_memory_dir,
            tuple(
                channel.PipelineInfo(
                    pipeline.name,
                    pipeline.inputs,
                    tuple((output.name, output.stage) for output in pipeline.outputs),
                )
                for pipeline in deployment.pipelines
            ),
            self._router.replica_states(),
            self._router.targets(),
            payload_token_of(self._spec),
        )
