"""A client that outlives its engine: when one life of the orchestrator ends, it joins the next.

The channel socket belongs to whoever supervises the orchestrator, so connecting succeeds at once, also
between two lives, and the welcome comes when the next one is up: there is no retry timer. Streams of
a life that ended have failed with `EngineDead`; nothing is carried over.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from enum import Enum
from typing import TYPE_CHECKING

from stretto.engine.channel import ABSENT, Address, Channel, ReplicaCallback
from stretto.engine.readiness import Readiness
from stretto.errors import EngineDead

if TYPE_CHECKING:
    from collections.abc import Callable

    from stretto.core.commands import ReplicaState
    from stretto.core.graph import Limits
    from stretto.messages.channel import HttpDone
    from stretto.types import RunId

_MAX_UNREPORTED = 1000
"""So many reports are kept between two lives; older ones are forgotten."""

_MAX_HANG_UPS = 16
"""So many connections in a row that end before the welcome are a refusal, not a restart."""


class EngineState(Enum):
    """What a client waits for."""

    STARTING = "starting"  # the first welcome
    ALIVE = "alive"  # nothing: there is a channel
    LOST = "lost"  # the next life's welcome
    GONE = "gone"  # nothing any more: no life will follow, or the client was closed


class EngineClient:
    """Keeps a channel to whatever life of the orchestrator there is.

    Args:
        address: The channel socket's path, or the orchestrator's listener in this process.
        run: The run that the orchestrator must belong to.
        name: Who this is, for people.
        limits: The deployment's limits.
    """

    def __init__(
        self, address: Address, *, run: RunId, name: str, limits: Limits | None = None
    ) -> None:
        self._address = address
        self._run = run
        self._name = name
        self._limits = limits
        self._state = EngineState.STARTING
        self._channel: Channel | None = None
        self._death: EngineDead | None = None
        self._task: asyncio.Task[None] | None = None
        self._callbacks: list[ReplicaCallback] = []
        self._unreported: deque[HttpDone] = deque(maxlen=_MAX_UNREPORTED)
        self._changed = asyncio.Event()

    @property
    def state(self) -> EngineState:
        """What it waits for."""
        if self._state is EngineState.ALIVE and not self.is_connected:
            return EngineState.LOST
        return self._state

    @property
    def is_connected(self) -> bool:
        """Whether there is a channel now."""
        return self._channel is not None and self._channel.is_open

    @property
    def readiness(self) -> Readiness:
        """The stages as last heard of; none before the first welcome."""
        return Readiness({}) if self._channel is None else self._channel.readiness

    @property
    def channel(self) -> Channel:
        """The channel of the present life.

        Raises:
            EngineDead: There is none at this moment.
        """
        if self._channel is not None and self._channel.is_open:
            return self._channel
        death = self._death if self._channel is None else self._channel.closed.result()
        if death is None:
            raise EngineDead("The engine has not answered yet.")
        raise EngineDead(death.detail, code=death.code)

    @property
    def latest(self) -> Channel | None:
        """The newest channel, also when its life has ended; `None` before the first welcome."""
        return self._channel

    def start(self) -> None:
        """Begin to connect. Needs a running loop; may be called twice."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(
                self._follow(), name="stretto-channel"
            )

    async def aclose(self) -> None:
        """Close the channel and stop connecting. May be called twice."""
        self._give_up(EngineDead("The engine client was closed."))
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            if not self._task.cancelled():
                self._task.result()
        if self._channel is not None:
            await self._channel.aclose()

    async def wait_ready(self) -> None:
        """Wait until every stage of a life has a ready replica, through as many lives as it takes.

        Raises:
            StartFailed: A stage does not start.
            EngineDead: No further life will come.
        """
        while True:
            changed = self._changed
            if self._state is EngineState.GONE:
                raise self._death or EngineDead("The engine is gone.")
            if self._channel is not None and self._channel.is_open:
                with contextlib.suppress(EngineDead):
                    await self._channel.wait_ready()
                    return
            else:
                await changed.wait()

    def subscribe(self, callback: ReplicaCallback) -> Callable[[], None]:
        """Call `callback` with each replica's state, now and as it changes; return what ends that."""
        self._callbacks.append(callback)
        for view in self.readiness.stages:
            for state in view.replicas:
                callback(state)
        return lambda: self._callbacks.remove(callback) if callback in self._callbacks else None

    def report(self, message: HttpDone) -> None:
        """Tell the engine something for its metrics, the next life if there is none now."""
        if self._channel is not None and self._channel.is_open:
            self._channel.report(message)
        else:
            self._unreported.append(message)

    # ---- inside

    async def _follow(self) -> None:
        """Hold a channel to one life after the other."""
        hang_ups = 0
        while True:
            try:
                channel = await Channel.connect(
                    self._address, run=self._run, name=self._name, limits=self._limits
                )
            except EngineDead as death:
                hang_ups += 1
                if death.code == ABSENT or hang_ups == _MAX_HANG_UPS:
                    self._give_up(death)
                    return
                continue
            hang_ups = 0
            self._channel = channel
            self._become(EngineState.ALIVE)
            while self._unreported:
                channel.report(self._unreported.popleft())
            channel.subscribe(self._notify)
            for view in channel.readiness.stages:
                for state in view.replicas:
                    self._notify(state)
            self._death = await channel.closed
            self._become(EngineState.LOST)

    def _notify(self, state: ReplicaState) -> None:
        for callback in tuple(self._callbacks):
            callback(state)

    def _give_up(self, death: EngineDead) -> None:
        if self._state is not EngineState.GONE:
            self._death = death
            self._become(EngineState.GONE)

    def _become(self, state: EngineState) -> None:
        self._state = state
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
