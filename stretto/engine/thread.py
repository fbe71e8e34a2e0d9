"""An orchestrator in a thread of this process, with an event loop of its own.

For programs that hold an `Engine` and want one process fewer. It keeps every promise of the orchestrator
process but two: it shares the interpreter lock with the program, so a busy program delays it; and one
that is stuck in foreign code can't be killed, only left behind.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import TYPE_CHECKING, Any

import msgspec

from stretto.engine.loop_thread import LoopThread
from stretto.launch.local import LocalLauncher
from stretto.launch.supervisor import OrchestratorSupervisor
from stretto.orchestrator.shell import Orchestrator
from stretto.transport.local import LocalListener

if TYPE_CHECKING:
    from collections.abc import Callable

    from stretto.config.process_specs import OrchestratorSpec
    from stretto.config.settings import Settings
    from stretto.messages import channel
    from stretto.types import Launcher

log = logging.getLogger("stretto.engine")

ABANDON_S = 2.0
"""How long a thread that was told to end at once is waited for."""


def in_thread(
    settings: Settings,
    *,
    make_launcher: Callable[[], Launcher] = LocalLauncher,
    make_orchestrator: Callable[..., Orchestrator] = Orchestrator,
    **options: Any,  # noqa: ANN401 - the supervisor's
) -> tuple[OrchestratorSupervisor, LocalListener[channel.Up, channel.Down]]:
    """Return what runs an orchestrator in a thread of this process, and where clients reach it.

    Args:
        settings: The deployment.
        make_launcher: Makes what starts the replicas; called in the thread, once per life.
        make_orchestrator: Makes each life's orchestrator; called in the thread.
        options: Further options of `OrchestratorSupervisor`.
    """
    listener: LocalListener[channel.Up, channel.Down] = LocalListener()

    def start_life(spec: OrchestratorSpec, on_exit: Callable[[str], None]) -> OrchestratorThread:
        return OrchestratorThread(
            spec,
            on_exit,
            listener,
            make_launcher=make_launcher,
            make_orchestrator=make_orchestrator,
        )

    owner = OrchestratorSupervisor(
        settings, start_life=start_life, on_release=listener.close, **options
    )
    return owner, listener


class OrchestratorThread:
    """One life of an orchestrator in a thread; a `stretto.launch.supervisor.Life`.

    Args:
        spec: What it is told. It serves the channel socket as well, by a descriptor of its own.
        on_exit: Called once, on the loop that made this, with the reason of its end.
        listener: Where clients in this process connect.
        make_launcher: Makes what starts its replicas; called in the thread.
        make_orchestrator: Makes the orchestrator; called in the thread.
    """

    def __init__(
        self,
        spec: OrchestratorSpec,
        on_exit: Callable[[str], None],
        listener: LocalListener[channel.Up, channel.Down],
        *,
        make_launcher: Callable[[], Launcher] = LocalLauncher,
        make_orchestrator: Callable[..., Orchestrator] = Orchestrator,
    ) -> None:
        self._on_exit = on_exit
        self._listener = listener
        self._make_launcher = make_launcher
        self._make_orchestrator = make_orchestrator
        self._home = asyncio.get_running_loop()
        self._ended: asyncio.Future[str] = self._home.create_future()
        self._orchestrator: Orchestrator | None = None
        self._patience: asyncio.TimerHandle | None = None
        self._spec = msgspec.structs.replace(
            spec,
            channel_fd=os.dup(spec.channel_fd),
            join_fd=None if spec.join_fd is None else os.dup(spec.join_fd),
        )
        self._life = listener.new_life()
        self._thread = LoopThread(
            f"stretto-orchestrator-{spec.epoch}",
            self._live,
            self._end,
            at_end=lambda: listener.hang_up(self._life),
        )

    @property
    def pid(self) -> int | None:
        """There is no process to name."""
        return None

    @property
    def is_running(self) -> bool:
        """Say whether `on_exit` is still to be called."""
        return not self._ended.done()

    def terminate(self) -> None:
        """Ask it to finish what runs, then to end."""
        self._thread.call(self._shut_down)

    def kill(self) -> None:
        """Stop its loop's work at once; replicas are killed on the way."""
        if self.is_running:
            self._thread.cancel()
            if self._patience is None:
                self._patience = self._home.call_later(ABANDON_S, self._abandon)

    async def wait(self) -> str:
        """Wait until it has ended and `on_exit` was called; return the reason."""
        return await asyncio.shield(self._ended)

    # ---- in the thread

    async def _live(self) -> int:
        try:
            self._orchestrator = self._make_orchestrator(
                self._spec, self._make_launcher(), self._listener, self._life
            )
        except BaseException:
            os.close(self._spec.channel_fd)  # an orchestrator that runs closes them
            if self._spec.join_fd is not None:
                os.close(self._spec.join_fd)
            raise
        return await self._orchestrator.run()

    def _shut_down(self) -> None:
        if self._orchestrator is not None:  # else it could not be made, and the thread ends anyway
            self._orchestrator.shut_down()

    # ---- at home

    def _abandon(self) -> None:
        log.error("the orchestrator's thread does not end; it is left behind")
        self._listener.hang_up(self._life)
        self._end("it did not end and was left behind")

    def _end(self, reason: str) -> None:
        if self._patience is not None:
            self._patience.cancel()
        if self.is_running:  # else it was left behind, and has ended after all
            self._ended.set_result(reason)
            self._on_exit(reason)
