"""What a replica knows of its tasks: pure bookkeeping, no thread, no loop, no payload bytes opened.

Rules
  * Nothing is sent beyond a task's send right; what waits for it is bounded by one step's outputs,
    since a task with such outputs gets no step. One without send right gets a step only for the end
    of an input, so that a task that has no more to send does not wait for the right to.
  * Everything about a task that goes on the wire is appended to `TaskTable.outbox`, in order; its
    `Ended` is the last message and is appended once.
  * A message about a task that is not in the table is late: its `Ended` is on the way. It is ignored.

States of a task, and what moves it

    WAITING ──next_batch──► STEPPING ──stepped──► WAITING | PAUSED | CLOSING | FLUSHING | ended
    PAUSED ──resume──► WAITING            cancel: WAITING, PAUSED ──► CLOSING or ended
    CLOSING ──closed──► ended             cancel: FLUSHING ──► ended
    FLUSHING ──grant──► ended             cancel: STEPPING stays until its outcome, which is dropped
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import TYPE_CHECKING, Literal

from stretto.errors import Failure
from stretto.messages.link import Consumed, Ended, Open, Produced, Reported, Up, Viewed
from stretto.types import MAX_METRICS, Boundary, EdgeId, PayloadRef, TaskKey

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Buffer

    from stretto.core.graph import EdgeSpec

PATIENCE = 8
"""A ready task that was passed over so many times goes before those that were not, and so on."""


class TaskState(Enum):
    """What a task waits for."""

    WAITING = "waiting"  # for input, send right or its turn
    STEPPING = "stepping"  # for the outcome of the step it takes part in
    PAUSED = "paused"  # for the moment its backend named
    CLOSING = "closing"  # for the compute thread to release its state
    FLUSHING = "flushing"  # for send right for its last outputs; its state is released
    ENDED = "ended"  # for nothing; it is in no table


@dataclass(frozen=True, slots=True)
class Arrival:
    """Something that came on an input edge: its next chunk, or its end.

    Attributes:
        edge: Which edge.
        payload: The chunk; `None` says that the edge has ended.
        seq: The chunk's number.
        body: The payload's bytes if they are inline.
    """

    edge: EdgeSpec
    payload: PayloadRef | None
    seq: int = 0
    body: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """A chunk whose values are encoded and stored; it lacks only its place in the task's stream."""

    payload: PayloadRef
    body: Buffer | None
    length: int
    kind: Literal["data", "preview"] = "data"
    media_s: float = 0.0
    boundary: Boundary | None = None
    transfer_s: float = 0.0
    finish_reason: str = ""


@dataclass(slots=True, kw_only=True)
class StepResult:
    """What one step did for one task.

    Attributes:
        outputs: Its chunks.
        viewed: Payloads of which no view remains.
        has_backlog: Inputs wait in the compute thread.
        is_end_next: The first of them is the end of an input.
        end: How the task ended, if it did; its state is released then.
        metrics: What the backend told about its replica.
        after_s: The task's next step must wait so long.
    """

    outputs: list[Output] = field(default_factory=list[Output])
    viewed: list[PayloadRef] = field(default_factory=list[PayloadRef])
    has_backlog: bool = False
    is_end_next: bool = False
    end: Literal["finished"] | Failure | None = None
    after_s: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict[str, float])


class HeldTask:
    """A task that occupies a slot of this replica. Not to be confused with what a backend sees of it.

    Attributes:
        key: Identity.
        opening: The message that opened it.
        options_body: Bytes of its options if they are inline.
        state: See `TaskState`.
        arrivals: What came and was not yet handed to the compute thread.
        has_backlog: Inputs wait in the compute thread.
        is_end_next: The first of them is the end of an input.
        is_started: The compute thread knows it, so it must be closed there.
        is_cancelled: Outcomes are dropped from now on.
        passed_over: How often it was ready and others went first.
        sent_media_s: Playback seconds sent.
    """

    __slots__ = (
        "_granted_bytes",
        "_granted_chunks",
        "_offset",
        "_sent_bytes",
        "arrivals",
        "buffered",
        "edges",
        "end",
        "has_backlog",
        "is_cancelled",
        "is_end_next",
        "is_started",
        "key",
        "opening",
        "options_body",
        "passed_over",
        "sent_chunks",
        "sent_media_s",
        "state",
    )

    def __init__(self, opening: Open, options_body: bytes | None) -> None:
        self.key = opening.task
        self.opening = opening
        self.options_body = options_body
        self.edges: Mapping[EdgeId, EdgeSpec] = {edge.id: edge for edge in opening.edges}
        self.state = TaskState.WAITING
        self.arrivals: deque[Arrival] = deque()
        self.has_backlog = False
        self.is_end_next = False
        self.is_started = False
        self.is_cancelled = False
        self.passed_over = 0
        self.end: Literal["finished"] | Failure | None = None
        self.buffered: deque[Output] = deque()
        self.sent_chunks = 0
        self.sent_media_s = 0.0
        self._sent_bytes = 0
        self._offset = opening.skip_units
        self._granted_chunks = opening.chunks
        self._granted_bytes = opening.bytes

    @property
    def may_send(self) -> bool:
        """Say whether the next chunk may be sent now."""
        return self.sent_chunks < self._granted_chunks and self._sent_bytes < self._granted_bytes

    @property
    def is_ready(self) -> bool:
        """Say whether a step can advance it."""
        if self.state is not TaskState.WAITING or self.buffered:
            return False
        if self.has_backlog:
            return self.is_end_next or self.may_send
        return bool(self.arrivals) and (self.arrivals[0].payload is None or self.may_send)

    def raise_right(self, chunks: int, nbytes: int) -> None:
        """Take a grant; a send right never shrinks."""
        self._granted_chunks = max(self._granted_chunks, chunks)
        self._granted_bytes = max(self._granted_bytes, nbytes)

    def placed(self, output: Output) -> Produced:
        """Return the message that sends an output as the task's next chunk, and count it."""
        is_data = output.kind == "data"
        message = Produced(
            task=self.key,
            seq=self.sent_chunks,
            payload=output.payload,
            offset=self._offset,
            length=output.length if is_data else 0,
            kind=output.kind,
            media_s=output.media_s,
            boundary=output.boundary,
            transfer_s=output.transfer_s,
            finish_reason=output.finish_reason,
        )
        if is_data:
            self.sent_chunks += 1
            self._sent_bytes += output.payload.size_bytes
            self._offset += output.length
            self.sent_media_s += output.media_s
        return message

    def take_arrivals(self) -> list[Arrival]:
        """Hand what has come to the compute thread."""
        arrivals = list(self.arrivals)
        self.arrivals.clear()
        return arrivals


class TaskTable:
    """All tasks of a replica, and what is to be sent about them.

    Attributes:
        outbox: Messages to send, each with the bytes of its payload if they are inline.
        unsent: Payloads of outputs that will never be announced; their store frees them.
    """

    def __init__(self) -> None:
        self._tasks: dict[TaskKey, HeldTask] = {}
        self.outbox: list[tuple[Up, Buffer | None]] = []
        self.unsent: list[PayloadRef] = []
        self._told: dict[str, float] = {}

    def __len__(self) -> int:
        """Return how many slots are occupied."""
        return len(self._tasks)

    def get(self, key: TaskKey) -> HeldTask | None:
        """Return the task, or `None` if it has ended."""
        return self._tasks.get(key)

    def open(self, message: Open, options_body: bytes | None) -> HeldTask:
        """Take a new task."""
        task = HeldTask(message, options_body)
        self._tasks[task.key] = task
        return task

    def feed(
        self, key: TaskKey, edge: EdgeId, seq: int, payload: PayloadRef, body: bytes | None
    ) -> None:
        """Take an edge's next chunk."""
        if task := self._tasks.get(key):
            task.arrivals.append(Arrival(task.edges[edge], payload, seq, body))

    def close_input(self, key: TaskKey, edge: EdgeId) -> None:
        """Take an edge's end. It stays by itself, lest timing decide which items a backend gets."""
        if task := self._tasks.get(key):
            task.arrivals.append(Arrival(task.edges[edge], None))

    def grant(self, key: TaskKey, chunks: int, nbytes: int) -> None:
        """Raise a task's send right and send what waited for it."""
        if task := self._tasks.get(key):
            task.raise_right(chunks, nbytes)
            self._flush(task)

    def cancel(self, key: TaskKey) -> HeldTask | None:
        """Take a task's inputs and outputs away; return it if it now waits for the compute thread."""
        task = self._tasks.get(key)
        if task is None:
            return None
        task.is_cancelled = True
        task.arrivals.clear()
        self._drop(task.buffered)
        task.buffered.clear()
        if task.state in (TaskState.WAITING, TaskState.PAUSED):
            task.state = TaskState.CLOSING
        if task.state is TaskState.FLUSHING or not task.is_started:
            self._end(task)
            return None
        return task

    def ready(self) -> list[HeldTask]:
        """Return the tasks that a step can advance."""
        return [task for task in self._tasks.values() if task.is_ready]

    def next_batch(self, limit: int) -> list[HeldTask]:
        """Choose who takes part in the next step.

        Tasks that have sent nothing go first (the first audio counts most), then those with the least
        playback time sent (nearest to running dry), then those passed over most often. Every
        `PATIENCE` times that a task is passed over outweigh all of this, so everybody's turn comes.
        """
        ready = self.ready()
        if len(ready) > limit:
            ready.sort(
                key=lambda task: (
                    -(task.passed_over // PATIENCE),
                    task.sent_chunks > 0,
                    task.sent_media_s,
                    -task.passed_over,
                )
            )
        for task in ready[limit:]:
            task.passed_over += 1
        batch = ready[:limit]
        for task in batch:
            task.state = TaskState.STEPPING
            task.is_started = True
            task.passed_over = 0
        return batch

    def closing(self) -> list[HeldTask]:
        """Return the tasks that wait for the compute thread to release their state."""
        return [task for task in self._tasks.values() if task.state is TaskState.CLOSING]

    def absorbed(self, task: HeldTask, cursors: Mapping[EdgeId, int]) -> None:
        """Report absorbed chunks: their credit flows back."""
        if task.is_cancelled:
            return
        for edge, up_to in cursors.items():
            self.outbox.append((Consumed(task.key, edge, up_to), None))

    def viewed(self, task: HeldTask, payloads: list[PayloadRef]) -> None:
        """Report payloads of which no view remains."""
        for payload in payloads:
            self.outbox.append((Viewed(task.key, payload), None))

    def produced(self, task: HeldTask, outputs: list[Output]) -> None:
        """Send a task's outputs, or keep them until it has the right to."""
        if task.is_cancelled:
            self._drop(outputs)
            return
        for output in outputs:
            if output.kind == "data":
                task.buffered.append(output)
            else:
                self.outbox.append((task.placed(output), output.body))
        self._flush(task)

    def stepped(self, task: HeldTask, result: StepResult) -> None:
        """Take over what a step did for a task."""
        self.viewed(task, result.viewed)
        task.has_backlog = result.has_backlog
        task.is_end_next = result.is_end_next
        self.produced(task, result.outputs)
        if result.end is not None:
            self.ended(task, result.end)
        elif task.is_cancelled:
            task.state = TaskState.CLOSING
        else:
            task.state = TaskState.PAUSED if result.after_s else TaskState.WAITING

    def report(self, running: int, metrics: Mapping[str, float]) -> None:
        """Tell what the backend says about this replica, if it says anything.

        Args:
            running: Tasks in the step that said it.
            metrics: By name; several tasks may say too much together, so what is over the limit is left out.
        """
        if metrics:
            waiting = max(len(self._tasks) - running, 0)
            self._told = dict(islice(metrics.items(), MAX_METRICS))
            self.outbox.append((Reported(running, waiting, self._told), None))

    def resume(self, key: TaskKey) -> None:
        """Let a paused task take part in steps again."""
        task = self._tasks.get(key)
        if task is not None and task.state is TaskState.PAUSED:
            task.state = TaskState.WAITING

    def closed(self, task: HeldTask, viewed: list[PayloadRef]) -> None:
        """End a cancelled task whose state is released."""
        self.viewed(task, viewed)
        self._end(task)

    def ended(self, task: HeldTask, end: Literal["finished"] | Failure) -> None:
        """End a task whose state is released; finishing waits until its outputs are sent."""
        task.end = end
        if isinstance(end, Failure):
            self._drop(task.buffered)
            task.buffered.clear()
        task.state = TaskState.FLUSHING
        self._flush(task)

    def _flush(self, task: HeldTask) -> None:
        while task.buffered and task.may_send:
            output = task.buffered.popleft()
            self.outbox.append((task.placed(output), output.body))
        if task.state is TaskState.FLUSHING and not task.buffered:
            self._end(task)

    def _end(self, task: HeldTask) -> None:
        task.state = TaskState.ENDED
        del self._tasks[task.key]
        if task.is_cancelled:
            message = Ended(task.key, "cancelled")
        elif isinstance(task.end, Failure):
            message = Ended(task.key, "failed", task.end)
        else:
            message = Ended(task.key, "finished")
        self.outbox.append((message, None))
        if self._told and not self._tasks:
            self.outbox.append((Reported(0, 0, self._told), None))
            self._told = {}

    def _drop(self, outputs: deque[Output] | list[Output]) -> None:
        self.unsent += [output.payload for output in outputs]
