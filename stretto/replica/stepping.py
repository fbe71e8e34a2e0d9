"""Form 2 of the contract: steps over batches of tasks, in the compute thread.

`StepWorker` is what happens in that thread, `StepDriver` what happens on the loop. A round goes from
the driver to the worker and its results come back; meanwhile messages keep arriving.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from stretto.backends.contract import Finished, Input, More, StepBackend
from stretto.errors import Failure, StageError
from stretto.replica.compute import attempt, failure_of
from stretto.replica.outlet import Outlet, Trimmer, metrics_of
from stretto.replica.tasks import Arrival, HeldTask, StepResult
from stretto.types import EdgeId, PayloadRef, TaskKey

if TYPE_CHECKING:
    from stretto.replica.intake import Intake
    from stretto.replica.parts import Parts

_UNOPENED = object()


class StepSession:
    """One task as the compute thread knows it; the loop only carries it back and forth."""

    __slots__ = ("intake", "options_body", "state", "trimmer")

    def __init__(self, intake: Intake, trimmer: Trimmer, options_body: bytes | None) -> None:
        self.intake = intake
        self.trimmer = trimmer
        self.options_body = options_body
        self.state: object = _UNOPENED


@dataclass(frozen=True, slots=True)
class Part:
    """A task's part in a round: its session, and what has newly come for it."""

    session: StepSession
    arrivals: list[Arrival]


OnAbsorbed = Callable[[list[dict[EdgeId, int]]], None]
"""Told, part by part, up to which chunk of each edge a round has absorbed."""


class StepWorker:
    """What happens in the compute thread; it blocks, and it must not know the loop.

    Each call into the backend is guarded: what it raises fails the tasks concerned and no others.
    """

    def __init__(self, backend: StepBackend[Any], outlet: Outlet, where: str) -> None:
        self._backend = backend
        self._outlet = outlet
        self._where = where
        self.steps = 0

    def close(self, session: StepSession) -> list[PayloadRef]:
        """Release a task's state, once, and return the payloads that are done with."""
        if session.state is not _UNOPENED:
            attempt(lambda: self._backend.close(session.state), self._where)
            session.state = _UNOPENED  # it may hold views of payloads
        return session.intake.close()

    def run(self, parts: Sequence[Part], on_absorbed: OnAbsorbed) -> list[StepResult]:
        """Open, absorb and step; results are in the order of the parts.

        `on_absorbed` is called before the step, since credit must not wait for it.
        """
        results = [StepResult() for _ in parts]
        cursors: list[dict[EdgeId, int]] = [{} for _ in parts]
        for part, result, reached in zip(parts, results, cursors, strict=True):
            self._prepare(part, result, reached)
        if any(cursors):
            on_absorbed(cursors)
        self._step(
            [
                (part.session, result)
                for part, result in zip(parts, results, strict=True)
                if result.end is None and part.session.intake.pending
            ]
        )
        for part, result in zip(parts, results, strict=True):
            session = part.session
            result.viewed = session.intake.viewed() if result.end is None else self.close(session)
            result.has_backlog = session.intake.has_backlog
            result.is_end_next = session.intake.is_end_next
        return results

    def _prepare(self, part: Part, result: StepResult, reached: dict[EdgeId, int]) -> None:
        session = part.session
        session.intake.add(part.arrivals)

        def prepare() -> None:
            if session.state is _UNOPENED:
                session.state = self._backend.open(session.intake.task(session.options_body))
            session.intake.absorb(reached)

        failure = attempt(prepare, self._where)
        if failure is not None:
            result.end = failure

    def _step(self, stepping: list[tuple[StepSession, StepResult]]) -> None:
        if not stepping:
            return
        items = [(session.state, session.intake.pending[0].input) for session, _ in stepping]
        outcomes = attempt(lambda: self._outcomes(items), self._where)
        if isinstance(outcomes, Failure):
            for _, result in stepping:
                result.end = outcomes
            return
        for (session, result), outcome in zip(stepping, outcomes, strict=True):
            failure = attempt(
                lambda s=session, r=result, o=outcome: self._settle(s, r, o), self._where
            )
            if failure is not None:
                result.end = failure

    def _outcomes(self, items: list[tuple[object, Input]]) -> Sequence[object]:
        self.steps += 1
        outcomes = _as_sequence(self._backend.step(items), "the outcomes of a step")
        if len(outcomes) != len(items):
            raise StageError(
                f"the backend's step gave {len(outcomes)} outcomes for {len(items)} items"
            )
        return outcomes

    def _settle(self, session: StepSession, result: StepResult, outcome: object) -> None:
        """Turn an item's outcome into outputs and, perhaps, the task's end."""
        if isinstance(outcome, Exception):
            result.end = failure_of(outcome, self._where)
            return
        made = outcome.chunks if isinstance(outcome, (Finished, More)) else outcome
        chunks = _as_sequence(made, "an item's outcome without Finished, More or an exception")
        result.metrics = metrics_of(chunks)
        item = None if isinstance(outcome, More) else session.intake.take()
        kept = session.trimmer.kept(chunks)
        result.outputs = self._outlet.put_all(kept, session.intake)
        if isinstance(outcome, More):
            result.after_s = outcome.after_s
        elif item is None or item.last or isinstance(outcome, Finished):
            result.end = "finished"


def _as_sequence(value: object, what: str) -> Sequence[object]:
    if not isinstance(value, Sequence):
        raise StageError(
            f"the backend returned a {type(value).__name__}; {what}: a list is expected"
        )
    return cast("Sequence[object]", value)


class StepDriver:
    """The loop's side: chooses who takes part in the next round and takes over what it did."""

    def __init__(
        self, backend: StepBackend[Any], parts: Parts, *, max_batch: int, max_wait_s: float
    ) -> None:
        self._worker = StepWorker(backend, parts.outlet, parts.where)
        self._parts = parts
        self._table = parts.table
        self._compute = parts.compute
        self._max_batch = max_batch
        self._max_wait_s = max_wait_s
        self._sessions: dict[TaskKey, StepSession] = {}
        self._timers: dict[TaskKey, asyncio.TimerHandle] = {}
        self._changed = asyncio.Event()

    @property
    def steps(self) -> int:
        """How many steps the backend was asked for."""
        return self._worker.steps

    def opened(self, task: HeldTask) -> None:
        """Do nothing yet: the task starts with its first round."""

    def changed(self) -> None:
        """Look for work again: messages have arrived."""
        self._changed.set()

    def cancel(self, key: TaskKey) -> None:
        """End a task; its state is released in the next round."""
        if timer := self._timers.pop(key, None):
            timer.cancel()
        self._table.cancel(key)

    async def clear(self) -> None:
        """Close every session, after the round that may still be computing."""
        for timer in self._timers.values():
            timer.cancel()
        sessions = list(self._sessions.values())
        self._sessions.clear()
        await self._compute.submit(lambda: [self._worker.close(each) for each in sessions])

    async def run(self) -> None:
        """Do rounds as long as there is work; wait, without any timer, while there is none."""
        while True:
            self._changed.clear()
            closing = self._table.closing()
            if not closing:
                await self._wait_for_company()
            batch = self._table.next_batch(self._max_batch)
            if not closing and not batch:
                self._parts.send()
                await self._changed.wait()
                continue
            parts = [Part(self._session(task), task.take_arrivals()) for task in batch]
            ending = [self._sessions.pop(task.key) for task in closing]
            work = self._compute.submit(lambda e=ending, p=parts, b=batch: self._round(e, p, b))
            self._parts.send()  # what the last round did travels while this one computes
            viewed, results = await work
            del parts, ending
            for task, payloads in zip(closing, viewed, strict=True):
                self._table.closed(task, payloads)
            metrics: dict[str, float] = {}
            for result in results:
                metrics |= result.metrics
            self._table.report(len(batch), metrics)
            for task, result in zip(batch, results, strict=True):
                self._take_over(task, result)

    async def _wait_for_company(self) -> None:
        """Give tasks that are not ready a short time to join those that are, if so configured."""
        ready = len(self._table.ready())
        if not self._max_wait_s or not 0 < ready < min(self._max_batch, len(self._table)):
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._max_wait_s):
                while len(self._table.ready()) < min(self._max_batch, len(self._table)):
                    self._changed.clear()
                    await self._changed.wait()

    def _session(self, task: HeldTask) -> StepSession:
        session = self._sessions.get(task.key)
        if session is None:
            trimmer = Trimmer(task.opening.left_out_units)
            session = StepSession(self._parts.intake(task), trimmer, task.options_body)
            self._sessions[task.key] = session
        return session

    def _round(
        self, ending: list[StepSession], parts: list[Part], batch: list[HeldTask]
    ) -> tuple[list[list[PayloadRef]], list[StepResult]]:
        """Do a round; this runs in the compute thread."""
        viewed = [self._worker.close(session) for session in ending]
        results = self._worker.run(
            parts, lambda cursors: self._compute.report(self._absorbed, batch, cursors)
        )
        return viewed, results

    def _absorbed(self, batch: list[HeldTask], cursors: list[dict[EdgeId, int]]) -> None:
        for task, reached in zip(batch, cursors, strict=True):
            self._table.absorbed(task, reached)
        self._parts.send()

    def _take_over(self, task: HeldTask, result: StepResult) -> None:
        self._table.stepped(task, result)
        if result.end is not None:
            del self._sessions[task.key]
        elif not task.is_cancelled and 0 < result.after_s < math.inf:
            loop = asyncio.get_running_loop()
            self._timers[task.key] = loop.call_later(result.after_s, self._resume, task.key)

    def _resume(self, key: TaskKey) -> None:
        del self._timers[key]
        self._table.resume(key)
        self._changed.set()
