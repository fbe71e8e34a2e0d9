"""A simulated client with its API process: it takes outputs in virtual time, stalls, aborts or vanishes."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from stretto.core import commands as do
from stretto.core import events as on
from stretto.types import INLINE

if TYPE_CHECKING:
    from stretto.sim.world import World
    from stretto.types import ChannelId, OutputName, PayloadRef, RequestId


class SimClient:
    """Who waits for one request.

    Args:
        world: Where it lives.
        request: What it waits for.
        channel: Its API process.

    Attributes:
        units: Units received per output.
        finals: Outputs whose end was seen.
        viewed: Shared-memory payloads that its API process looks at.
        is_gone: Its API process has vanished.
    """

    def __init__(self, world: World, request: RequestId, channel: ChannelId) -> None:
        self.channel = channel
        self.units: Counter[OutputName] = Counter()
        self.finals: set[OutputName] = set()
        self.viewed: Counter[PayloadRef] = Counter()
        self.is_gone = False
        self._world = world
        self._request = request
        self._chunks: Counter[OutputName] = Counter()
        self._is_stuck = False
        self._take_at = world.now

    def begin(self) -> None:
        """Plan what this client will do to its request."""
        world = self._world
        if world.chance(world.habits.abort):
            for _ in range(1 + world.chance(world.habits.repetition)):
                world.after(world.upto(1.0), self._abort)

    def emitted(self, chunk: do.Emit) -> None:
        """Check a chunk, and take it some time later."""
        world = self._world
        assert not self.is_gone, f"{chunk} for a closed channel"
        assert self._request not in world.terminals, f"{chunk} after the terminal"
        assert chunk.output not in self.finals, f"{chunk} after the output's end"
        assert chunk.seq == self._chunks[chunk.output], f"{chunk} is out of order"
        assert chunk.offset == self.units[chunk.output], f"{chunk} leaves a gap"
        if chunk.final:
            self.finals.add(chunk.output)
        if chunk.payload is None:
            return
        world.check_live(chunk.payload)
        self._chunks[chunk.output] += 1
        self.units[chunk.output] += chunk.length
        if chunk.payload.place != INLINE:
            self.viewed[chunk.payload] += 1
        self._take_at = max(self._take_at, world.now) + world.upto(world.habits.take_s)
        world.after(self._take_at - world.now, lambda: self._take(chunk))

    def ended(self, terminal: do.Finish | do.Fail | do.Cancelled | do.Reject) -> None:
        """Check a terminal."""
        if isinstance(terminal, do.Finish):
            assert set(self._chunks) <= self.finals, f"{terminal} before an output's end"
            assert self.finals, f"{terminal} without any output's end"

    def _take(self, chunk: do.Emit) -> None:
        world = self._world
        if self.is_gone or self._is_stuck:
            return
        if world.chance(world.habits.slow_client):
            self._is_stuck = True
            world.after(200.0, self._let_go)
            return
        for _ in range(1 + world.chance(world.habits.repetition)):
            world.tell(
                on.ConsumerDrained(
                    now=world.now, request=self._request, output=chunk.output, up_to=chunk.seq + 1
                )
            )
        self._done_with(chunk.payload)

    def _done_with(self, payload: PayloadRef | None) -> None:
        if payload is not None and payload.place != INLINE:
            self.viewed[payload] -= 1
            if not self.viewed[payload]:
                del self.viewed[payload]
            self._world.tell(
                on.PayloadDone(now=self._world.now, holder=self.channel, payload=payload)
            )

    def _let_go(self) -> None:
        """Give up what a stuck client still looks at, long after its request has failed."""
        if not self.is_gone:
            for payload in list(self.viewed.elements()):
                self._done_with(payload)

    def _abort(self) -> None:
        if not self.is_gone:
            self._world.tell(
                on.RequestAborted(
                    now=self._world.now,
                    request=self._request,
                    channel=self.channel,
                    acknowledge=True,
                )
            )
