"""One stage inside this process, so that a debugger reaches its backend.

    stretto serve pipeline.yaml --debug shout

The stage's replica runs in threads of the server: `breakpoint()` in the backend opens the debugger in the
terminal, and an IDE that started the server stops there. Everything else stays as it is: the replica
joins by its socket, with the same messages. Time-outs that would end a request, or the replica, while
somebody thinks are a day long.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import msgspec

from stretto.config.mistakes import did_you_mean
from stretto.engine.loop_thread import LoopThread
from stretto.errors import ConfigError
from stretto.launch.local import LocalLauncher
from stretto.replica.runtime import Replica
from stretto.replica.settings import RuntimeSettings, cap_threads
from stretto.types import StageId

if TYPE_CHECKING:
    from collections.abc import Callable

    from stretto.config.settings import Settings
    from stretto.types import LaunchSpec, ReplicaId

_PATIENCE_S = 86_400.0


def patient(settings: Settings, stage: str) -> Settings:
    """Return settings in which one replica serves the stage and nothing hurries it.

    Raises:
        ConfigError: There is no such stage.
    """
    names = [each.id for each in settings.stages]
    if stage not in names:
        raise ConfigError(f"--debug: there is no stage {stage!r}{did_you_mean(stage, names)}")
    replace = msgspec.structs.replace
    limits = replace(
        settings.orchestrator.limits,
        queue_timeout_s=_PATIENCE_S,
        request_timeout_s=_PATIENCE_S,
        cancel_timeout_s=_PATIENCE_S,
        stage_unavailable_timeout_s=_PATIENCE_S,
    )
    return replace(
        settings,
        stages=tuple(
            replace(
                each,
                replicas=1 if each.id == stage else each.replicas,
                chunk_timeout_s=_PATIENCE_S,
                start_timeout_s=_PATIENCE_S,
            )
            for each in settings.stages
        ),
        orchestrator=replace(settings.orchestrator, limits=limits),
        server=replace(settings.server, first_chunk_timeout_s=_PATIENCE_S),
    )


class DebugLauncher:
    """Runs one stage's replica in threads of this process and starts all others as usual.

    Made and used on the orchestrator's loop; implements `stretto.types.Launcher`.

    Args:
        stage: Which stage.
    """

    def __init__(self, stage: str) -> None:
        self._stage = StageId(stage)
        self._others = LocalLauncher()
        self._here: dict[ReplicaId, LoopThread] = {}

    def start(self, spec: LaunchSpec, on_exit: Callable[[ReplicaId, str], None]) -> None:
        """Start a replica; `on_exit` is called once, when nothing of it is left."""
        if spec.replica.stage != self._stage:
            self._others.start(spec, on_exit)
            return

        def report(reason: str) -> None:
            del self._here[spec.replica]
            on_exit(spec.replica, reason)

        name = f"stretto-{spec.replica}"
        self._here[spec.replica] = LoopThread(name, partial(_live, spec), report)

    def stop(self, replica: ReplicaId) -> None:
        """End a replica. One here ends when its backend returns."""
        thread = self._here.get(replica)
        if thread is None:
            self._others.stop(replica)
        else:
            thread.cancel()

    async def close(self) -> None:
        """End all of them; what is still computing here is left to its thread."""
        for thread in list(self._here.values()):
            thread.cancel()
        await self._others.close()


async def _live(spec: LaunchSpec) -> int:
    cap_threads(spec, RuntimeSettings.of(spec.runtime))
    return await Replica(spec).live()
