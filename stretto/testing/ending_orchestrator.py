"""An orchestrator that ends when it is asked to, in every way in which one can end.

The request that asks is an ordinary one whose label is `Ending.label`.
"""

from __future__ import annotations

import asyncio
import os
import signal
from enum import Enum
from typing import TYPE_CHECKING

from stretto.core.events import RequestSubmitted
from stretto.orchestrator.shell import Orchestrator

if TYPE_CHECKING:
    from collections.abc import Callable

    from stretto.config.process_specs import OrchestratorSpec
    from stretto.core.commands import AnyCommand
    from stretto.core.events import AnyEvent
    from stretto.messages import channel
    from stretto.transport.local import LocalListener
    from stretto.types import Launcher

_PREFIX = "end:"


class Ending(Enum):
    """How an orchestrator may end. `IN_LOOP`: beside the dispatcher, which guards itself."""

    RETURN = "return"
    EXCEPTION = "exception"
    SILENT_EXCEPTION = "silent-exception"  # its text is empty
    UNSPEAKABLE_EXCEPTION = "unspeakable-exception"  # making its text fails
    SYSTEM_EXIT = "system-exit"
    KEYBOARD_INTERRUPT = "keyboard-interrupt"
    CANCELLED = "cancelled"
    SYSTEM_EXIT_IN_LOOP = "system-exit-in-loop"
    KEYBOARD_INTERRUPT_IN_LOOP = "keyboard-interrupt-in-loop"
    CANCELLED_IN_LOOP = "cancelled-in-loop"
    HARD_EXIT = "hard-exit"  # of a process: no handler runs
    KILL = "kill"  # of a process

    @property
    def label(self) -> str:
        """The label of a request that asks for it."""
        return f"{_PREFIX}{self.value}"


class _UnspeakableError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


_RAISED: dict[Ending, Callable[[], BaseException]] = {
    Ending.EXCEPTION: lambda: RuntimeError("asked to break"),
    Ending.SILENT_EXCEPTION: RuntimeError,
    Ending.UNSPEAKABLE_EXCEPTION: _UnspeakableError,
    Ending.SYSTEM_EXIT: lambda: SystemExit(3),
    Ending.KEYBOARD_INTERRUPT: KeyboardInterrupt,
    Ending.CANCELLED: asyncio.CancelledError,
    Ending.SYSTEM_EXIT_IN_LOOP: lambda: SystemExit(3),
    Ending.KEYBOARD_INTERRUPT_IN_LOOP: KeyboardInterrupt,
}


class EndingOrchestrator(Orchestrator):
    """See the module."""

    def __init__(
        self,
        spec: OrchestratorSpec,
        launcher: Launcher,
        listener: LocalListener[channel.Up, channel.Down] | None = None,
        life: int | None = None,
    ) -> None:
        super().__init__(spec, launcher, listener, life)
        self._main: asyncio.Task[object] | None = None
        self.dispatcher.add_observer(self)

    async def run(self) -> int:
        """Serve until asked to end."""
        self._main = asyncio.current_task()
        return await super().run()

    def observe(
        self, event: AnyEvent, commands: tuple[AnyCommand, ...], error: str | None = None
    ) -> None:
        """End if this event asks for it."""
        del commands, error
        if isinstance(event, RequestSubmitted) and event.label.startswith(_PREFIX):
            self._end_by(Ending(event.label.removeprefix(_PREFIX)))

    def flush(self) -> None:
        """Nothing was kept back."""

    def _end_by(self, ending: Ending) -> None:
        loop = asyncio.get_running_loop()
        if ending is Ending.RETURN:
            self.shut_down()
        elif ending is Ending.KILL:
            loop.call_soon(os.kill, os.getpid(), signal.SIGKILL)
        elif ending is Ending.HARD_EXIT:
            loop.call_soon(os._exit, 9)
        elif ending is Ending.CANCELLED_IN_LOOP:
            assert self._main is not None
            loop.call_soon(self._main.cancel)
        elif ending.value.endswith("-in-loop"):
            loop.call_soon(_raise, ending)
        else:
            _raise(ending)


def _raise(ending: Ending) -> None:
    error = _RAISED[ending]()
    raise error
