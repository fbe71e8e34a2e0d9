"""Payloads on their way in: opened, given to the edge's adapter, kept as inputs for the backend.

Everything here runs in the compute thread. It must not know the loop or the link.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, cast

from stretto.backends.contract import Adapter, Input, Task
from stretto.backends.loading import adapter_factory
from stretto.errors import PayloadLost
from stretto.transport import codec
from stretto.types import INLINE, Boundary, EdgeId, Payload, PayloadRef

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stretto.core.graph import EdgeSpec
    from stretto.messages.link import Open
    from stretto.replica.tasks import Arrival
    from stretto.transport.payload_store import Mapped, PayloadReader


class _Made(NamedTuple):
    """An input, its edge, and how many chunks of that are used up with it."""

    edge: EdgeSpec
    up_to: int
    input: Input


class AdapterShop:
    """Makes adapters by name; each name is looked up once."""

    def __init__(self) -> None:
        self._factories: dict[str, Callable[[], Adapter]] = {}

    def make(self, name: str | None) -> Adapter:
        """Return a new adapter for one task and edge; no name passes payloads on unchanged.

        Raises:
            Exception: The name leads nowhere, or the factory raises.
        """
        if name is None:
            return _unchanged
        if name not in self._factories:
            self._factories[name] = cast("Callable[[], Adapter]", adapter_factory(name))
        return self._factories[name]()


def _unchanged(payload: Payload, final: bool) -> Sequence[Payload]:  # noqa: ARG001, FBT001 - the shape of an Adapter
    return (payload,) if payload else ()


class Intake:
    """The input side of one task.

    A chunk is absorbed only when the task is about to need an input, so what an adapter has made and
    nobody has taken stays bounded by one chunk's worth; but an adapter that makes nothing of a chunk
    gets the next one at once, so its credit never waits for its own output.

    Attributes:
        pending: Inputs that were made and not yet used up.

    Where a later attempt can go on is counted in chunks for an edge without adapter, so that what lies
    before it need not be kept, and in inputs for one with: its adapter must see every chunk again.
    """

    def __init__(self, opening: Open, reader: PayloadReader | None, adapters: AdapterShop) -> None:
        self._reader = reader
        self._adapters = adapters
        self._opening = opening
        self._backlog: deque[Arrival] = deque()
        self._made: dict[EdgeId, Adapter] = {}
        self._open_edges = len(opening.edges)
        self._mapped: list[tuple[PayloadRef, Mapped]] = []
        resumed = {} if opening.resume is None else opening.resume.edges
        self._done = {edge.id: resumed.get(edge.id, (0, 0)) for edge in opening.edges}
        self._left_out = {edge: inputs for edge, (_, inputs) in self._done.items()}
        self.pending: deque[_Made] = deque()
        self._transfer_s = 0.0

    def task(self, options_body: bytes | None) -> Task:
        """Return the task as its backend sees it.

        Raises:
            PayloadLost: The options can't be read.
        """
        opening = self._opening
        return Task(
            key=opening.task,
            stage=opening.task.stage,
            options=self._values(opening.options, options_body),
            skip_units=opening.left_out_units,
            resume=None if opening.resume is None else opening.resume.token,
        )

    def add(self, arrivals: Sequence[Arrival]) -> None:
        """Take what has come."""
        self._backlog.extend(arrivals)

    @property
    def has_backlog(self) -> bool:
        """Say whether something waits to be absorbed or stepped."""
        return bool(self._backlog or self.pending)

    @property
    def is_end_next(self) -> bool:
        """Say whether the end of an edge is what waits first."""
        return not self.pending and bool(self._backlog) and self._backlog[0].payload is None

    def absorb(self, cursors: dict[EdgeId, int]) -> None:
        """Absorb chunks until an input is pending or none is left; note how far in `cursors`.

        Raises:
            PayloadLost: A payload can't be read.
            Exception: What the adapter raises.
        """
        while self._backlog and not self.pending:
            arrival = self._backlog.popleft()
            edge, is_end = arrival.edge, arrival.payload is None
            values = self._values(arrival.payload, arrival.body)
            if edge.id not in self._made:
                self._made[edge.id] = self._adapters.make(edge.adapter)
            payloads = self._made[edge.id](values, is_end)
            inputs = [Input(name=edge.name, payload=payload) for payload in payloads]
            if is_end:
                self._open_edges -= 1
                end = inputs.pop() if inputs else Input(name=edge.name, payload={})
                inputs.append(replace(end, final=True, last=not self._open_edges))
            else:
                cursors[edge.id] = arrival.seq + 1
            inputs = self._not_used_up(edge.id, inputs)
            up_to = 0 if is_end else arrival.seq + 1
            self.pending.extend(_Made(edge, up_to, one) for one in inputs)
            if not inputs:
                self._count(edge, up_to, 0)

    def take(self) -> Input:
        """Use up the input that is pending first."""
        made = self.pending.popleft()
        self._count(made.edge, made.up_to, 1)
        return made.input

    def behind(self, token: bytes) -> Boundary:
        """Return the boundary behind what is used up now."""
        return Boundary(token, dict(self._done))

    def take_transfer_s(self) -> float:
        """Return how long payloads took to come, in seconds, since this was last asked."""
        taken, self._transfer_s = self._transfer_s, 0.0
        return taken

    def _count(self, edge: EdgeSpec, up_to: int, inputs: int) -> None:
        chunks, used = self._done[edge.id]
        if edge.adapter is None:
            self._done[edge.id] = (max(chunks, up_to), 0)
        else:
            self._done[edge.id] = (0, used + inputs)

    def _not_used_up(self, edge: EdgeId, inputs: list[Input]) -> list[Input]:
        """Leave out what an earlier attempt has used up; an edge's end comes all the same."""
        kept: list[Input] = []
        for one in inputs:
            if not self._left_out[edge]:
                kept.append(one)
                continue
            self._left_out[edge] -= 1
            if one.final:
                kept.append(replace(one, payload={}))
                self._done[edge] = (0, self._done[edge][1] - 1)
        return kept

    def viewed(self) -> list[PayloadRef]:
        """Close the mappings of which no view remains, and return their payloads."""
        done: list[PayloadRef] = []
        kept: list[tuple[PayloadRef, Mapped]] = []
        for payload, mapped in self._mapped:
            if mapped.close():
                done.append(payload)
            else:
                kept.append((payload, mapped))
        self._mapped = kept
        return done

    def close(self) -> list[PayloadRef]:
        """Drop everything; return the payloads that are done with."""
        self.pending.clear()
        self._made.clear()
        dropped = [arrival.payload for arrival in self._backlog if arrival.payload is not None]
        self._backlog.clear()
        return self.viewed() + [payload for payload in dropped if payload.place != INLINE]

    def _values(self, payload: PayloadRef | None, body: bytes | None) -> Payload:
        if payload is None:
            return {}
        if body is not None:
            return codec.decode(memoryview(body))
        if self._reader is None:
            raise PayloadLost(
                f"payload {payload.key} is in shared memory, which this replica was not told of"
            )
        began = time.perf_counter()
        mapped = self._reader.open(payload)
        self._transfer_s += time.perf_counter() - began
        self._mapped.append((payload, mapped))
        return codec.decode(mapped.view)
