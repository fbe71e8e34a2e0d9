"""Form 1 of the contract: one async generator per task, driven on the loop.

A generator is advanced only while its task has send right, so nothing is ever kept back here.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Literal

from stretto.errors import Failure
from stretto.replica.compute import attempt, failure_of
from stretto.replica.outlet import Trimmer, metrics_of
from stretto.replica.tasks import HeldTask, TaskState

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from stretto.backends.contract import Chunk, Input, StreamBackend
    from stretto.replica.intake import Intake
    from stretto.replica.parts import Parts
    from stretto.types import EdgeId, PayloadRef, TaskKey

CLOSE_TIMEOUT_S = 2.0
"""How long a generator's clean-up may take; then its task ends without it."""


class _InputError(Exception):
    """An input could not be made; the generator is told, and its task fails with the failure."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.detail)
        self.failure = failure


class _Player:
    """One task's generator, its inputs, and what it waits for."""

    def __init__(self, task: HeldTask, intake: Intake) -> None:
        self.task = task
        self.intake = intake
        self.changed = asyncio.Event()
        self.is_playing = True
        self.running: asyncio.Task[None] | None = None

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a message about the task makes the condition true."""
        while not condition():
            self.changed.clear()
            await self.changed.wait()


class _Inputs:
    """The inputs of one task as its generator takes them."""

    def __init__(self, player: _Player, driver: StreamDriver) -> None:
        self._player = player
        self._driver = driver
        self._is_over = False

    def __aiter__(self) -> AsyncIterator[Input]:
        return self

    async def __anext__(self) -> Input:
        if self._is_over:
            raise StopAsyncIteration
        player = self._player
        while not player.intake.pending:
            await player.until(lambda: player.intake.has_backlog or bool(player.task.arrivals))
            await self._driver.absorb(player)
        item = player.intake.take()
        self._is_over = item.last
        return item


class StreamDriver:
    """Runs the generators of all tasks."""

    def __init__(self, backend: StreamBackend, parts: Parts) -> None:
        self._backend = backend
        self._parts = parts
        self._table = parts.table
        self._compute = parts.compute
        self._where = parts.where
        self._players: dict[TaskKey, _Player] = {}
        self._group = asyncio.TaskGroup()
        self.steps = 0

    async def run(self) -> None:
        """Own the generators until cancelled."""
        async with self._group:
            await asyncio.get_running_loop().create_future()

    def opened(self, task: HeldTask) -> None:
        """Start a task's generator."""
        player = _Player(task, self._parts.intake(task))
        self._players[task.key] = player
        player.running = self._group.create_task(self._hold(player), name=str(task.key))

    def changed(self) -> None:
        """Let every generator look whether what it waits for has come."""
        for player in self._players.values():
            player.changed.set()

    def cancel(self, key: TaskKey) -> None:
        """End a task: its generator is closed."""
        player = self._players.get(key)
        was_cancelled = player is not None and player.task.is_cancelled
        is_started = self._table.cancel(key) is not None
        if player is None or player.running is None or was_cancelled:
            return
        if is_started and player.is_playing:
            player.running.cancel()

    async def clear(self) -> None:
        """Close the input sides; the generators were closed when `run` was cancelled."""
        intakes = [player.intake for player in self._players.values()]
        self._players.clear()
        await self._compute.submit(lambda: [intake.close() for intake in intakes])

    async def absorb(self, player: _Player) -> None:
        """Absorb chunks in the compute thread and report how far.

        Raises:
            _InputError: A payload can't be read or an adapter has failed.
        """
        arrivals = player.task.take_arrivals()

        def work() -> tuple[Failure | None, dict[EdgeId, int], list[PayloadRef]]:
            cursors: dict[EdgeId, int] = {}
            viewed = player.intake.viewed()
            player.intake.add(arrivals)
            return attempt(lambda: player.intake.absorb(cursors), self._where), cursors, viewed

        failure, cursors, viewed = await self._compute.submit(work)
        self._table.absorbed(player.task, cursors)
        self._table.viewed(player.task, viewed)
        self._parts.send()
        if failure is not None:
            raise _InputError(failure)

    async def _hold(self, player: _Player) -> None:
        """Run a task from its start to its end."""
        task = player.task
        if task.state is TaskState.ENDED:  # cancelled before its first turn
            del self._players[task.key]
            return
        task.is_started = True
        end: Literal["finished"] | Failure = "finished"
        try:
            end = await self._play(player)
        except asyncio.CancelledError:
            if not task.is_cancelled:
                raise
            if player.running is not None:
                player.running.uncancel()
        player.is_playing = False
        viewed = await self._compute.submit(player.intake.close)
        del self._players[task.key]
        if task.is_cancelled:
            self._table.closed(task, viewed)
        else:
            self._table.viewed(task, viewed)
            self._table.ended(task, end)
        self._parts.send()

    async def _play(self, player: _Player) -> Literal["finished"] | Failure:
        """Advance the generator to its end; return how it ended."""
        opening, body = player.task.opening, player.task.options_body
        task = await self._compute.submit(
            lambda: attempt(lambda: player.intake.task(body), self._where)
        )
        if isinstance(task, Failure):
            return task
        try:
            chunks = self._backend.run(task, _Inputs(player, self))
            try:
                await self._advance(player, chunks, Trimmer(opening.left_out_units))
            finally:
                await _close(chunks)
        except _InputError as error:
            return error.failure
        except Exception as error:  # noqa: BLE001 - whatever a backend raises fails its task only
            return failure_of(error, self._where)
        return "finished"

    async def _advance(
        self, player: _Player, chunks: AsyncIterator[Chunk], trimmer: Trimmer
    ) -> None:
        held = player.task
        while not held.is_cancelled:
            await player.until(lambda: held.may_send)
            self.steps += 1
            try:
                chunk = await anext(chunks)
            except StopAsyncIteration:
                return
            self._table.report(1, metrics_of((chunk,)))
            outputs = self._parts.outlet.put_all(trimmer.kept((chunk,)), player.intake)
            self._table.produced(held, outputs)
            self._parts.send()
            await asyncio.sleep(0)  # a generator that never waits must not keep the loop


async def _close(chunks: AsyncIterator[Chunk]) -> None:
    """Close a generator; one that has ended, also by being cancelled, has nothing left to do."""
    aclose = getattr(chunks, "aclose", None)
    if aclose is not None:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await aclose()
