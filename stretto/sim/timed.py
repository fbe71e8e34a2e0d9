"""Replicas that take the time of a model, and listeners who play what they get: no faults, only load.

A replica makes one step at a time; a step makes one chunk for each of the tasks that have waited for
it longest, up to the stage's largest batch. A task makes its next chunk when its inputs cover the
chunk's playback, when it may send, and when its turn comes.
"""

from __future__ import annotations

from collections import deque
from random import Random
from typing import TYPE_CHECKING

from stretto.core import commands as do
from stretto.core import events as on
from stretto.sim.clients import SimClient
from stretto.sim.replicas import SimChunk, SimReplica
from stretto.sim.workload import UNITS_PER_S
from stretto.types import INLINE

if TYPE_CHECKING:
    from stretto.sim.replicas import SimTask
    from stretto.sim.workload import StageModel, Workload
    from stretto.sim.world import World
    from stretto.types import ChannelId, EdgeId, OutputName, ReplicaId, RequestId, StageId, TaskKey


class Meter:
    """What the replicas of one stage did.

    Args:
        begin: When measuring begins, in virtual seconds.
        end: When it ends; work outside is not counted as busy.

    Attributes:
        busy_s: How long they computed, all together.
        steps: How many steps they made.
        chunks: How many chunks they made.
        waits_s: How long each chunk waited for its step.
        first_waits_s: The same of each task's first chunk only.
    """

    def __init__(self, begin: float, end: float) -> None:
        self.busy_s = 0.0
        self.steps = 0
        self.chunks = 0
        self.waits_s: list[float] = []
        self.first_waits_s: list[float] = []
        self._begin = begin
        self._end = end

    def step(self, begin: float, took_s: float, chunks: int) -> None:
        """Count a step."""
        self.steps += 1
        self.chunks += chunks
        inside = min(begin + took_s, self._end) - max(begin, self._begin)
        self.busy_s += max(inside, 0.0)

    def waited(self, wait_s: float, *, is_first: bool) -> None:
        """Count a chunk's wait for its step."""
        self.waits_s.append(wait_s)
        if is_first:
            self.first_waits_s.append(wait_s)


class Progress:
    """How far a task is, in units of playback.

    Attributes:
        received: What each input edge has brought.
        made: What was made of it.
        length: What the next chunk covers, while the task waits for its step.
        since: When it began to wait; `None` if it does not.
        random: Its own source of chance: the same request takes the same times in every run.
    """

    def __init__(self, edges: list[EdgeId], random: Random) -> None:
        self.received = dict.fromkeys(edges, 0)
        self.made = 0
        self.length = 0
        self.since: float | None = None
        self.random = random


class TimedReplica(SimReplica):
    """A replica that computes as its stage's model says.

    Args:
        world: Where it lives.
        replica: Its identity.
        workload: How it works, and the seed of its times.
        meter: Told what it does.
    """

    def __init__(self, world: World, replica: ReplicaId, workload: Workload, meter: Meter) -> None:
        super().__init__(world, replica)
        self._model: StageModel = workload.stages[replica.stage]
        self._seed = workload.seed * len(workload.stages) + list(workload.stages).index(
            replica.stage
        )
        self._meter = meter
        self._progress: dict[TaskKey, Progress] = {}
        self._line: deque[SimTask] = deque()
        self._is_computing = False

    def _go_on(self, task: SimTask) -> None:
        if task.is_busy:
            return
        if task.is_cancelled:
            self._end(task, lambda now: on.TaskCancelled(now=now, task=task.key))
            return
        while task.unsent and task.may_send:
            self._produce(task, task.unsent.popleft())
        progress = self._progress_of(task)
        if task.unsent or progress.since is not None:
            return
        while not (length := self._next_length(task, progress)) and task.arrivals:
            self._consume(task, progress)
        if length:
            progress.length, progress.since = length, self._world.now
            self._line.append(task)
            self._step()
        elif not task.open_edges:
            self._end(task, lambda now: on.TaskFinished(now=now, task=task.key))

    def _progress_of(self, task: SimTask) -> Progress:
        progress = self._progress.get(task.key)
        if progress is None:
            number = int(task.key.request.rpartition("-")[2])
            random = Random((self._seed << 32) + number)  # noqa: S311 - chance that repeats
            progress = self._progress[task.key] = Progress(list(task.consumed), random)
        return progress

    def _next_length(self, task: SimTask, progress: Progress) -> int:
        """Return what the next chunk can cover; 0 if its inputs are not there yet, or all is made.

        An edge that has ended and was read to its end holds nothing up; when all have, the rest is made.
        """
        unread = {edge for edge, _, _, _ in task.arrivals}
        open_ends = [
            units
            for edge, units in progress.received.items()
            if edge in task.open_edges or edge in unread
        ]
        left = min(open_ends or progress.received.values()) - progress.made
        if not open_ends:
            left = max(progress.received.values()) - progress.made
            return min(left, self._model.chunk_units)
        return self._model.chunk_units if left >= self._model.chunk_units else 0

    def _consume(self, task: SimTask, progress: Progress) -> None:
        edge, seq, _, units = task.arrivals.popleft()
        task.consumed[edge] = seq + 1
        progress.received[edge] += units
        self._send(lambda now: on.InputConsumed(now=now, task=task.key, edge=edge, up_to=seq + 1))

    def _step(self) -> None:
        """Begin a step for those who have waited longest."""
        if self._is_computing:
            return
        batch: list[SimTask] = []
        while self._line and len(batch) < self._model.max_batch:
            task = self._line.popleft()
            if self._tasks.get(task.key) is task:
                batch.append(task)
        if not batch:
            return
        self._is_computing = True
        now = self._world.now
        took_s = self._model.step_s([self._alone_s(task) for task in batch])
        self._meter.step(now, took_s, len(batch))
        self._world.after(took_s, lambda: self._stepped_all(batch))

    def _alone_s(self, task: SimTask) -> float:
        """Take a task into a step; return how long its chunk would take alone."""
        progress = self._progress[task.key]
        assert progress.since is not None
        self._meter.waited(self._world.now - progress.since, is_first=not progress.made)
        task.is_busy = True
        return self._model.service.draw(progress.random, progress.length / UNITS_PER_S)

    def _stepped_all(self, batch: list[SimTask]) -> None:
        for task in batch:
            if not self.is_alive:
                return
            progress = self._progress[task.key]
            progress.made += progress.length
            progress.since = None
            task.is_busy = False
            payload = self._world.payload(1, INLINE, progress.length)
            task.unsent.append(SimChunk(payload, progress.length, None))
            self._go_on(task)
        self._is_computing = False
        self._step()

    def _forget(self, task: SimTask) -> None:
        self._progress.pop(task.key, None)
        super()._forget(task)


AUDIBLE_S = 0.001
"""Shorter gaps are none."""


class Playback:
    """How a stream sounds to who plays it from its first chunk on, and waits when nothing is there.

    Attributes:
        first_at: When the first chunk came, in virtual seconds; `None` if none has.
        underrun_s: How long it was silent in the middle.
        underruns: How often.
    """

    __slots__ = ("_plays_until", "first_at", "underrun_s", "underruns")

    def __init__(self) -> None:
        self.first_at: float | None = None
        self.underrun_s = 0.0
        self.underruns = 0
        self._plays_until = 0.0

    def arrived(self, at: float, media_s: float) -> None:
        """Take a chunk of so many seconds of playback."""
        if self.first_at is None:
            self.first_at = self._plays_until = at
        late_s = at - self._plays_until
        if late_s > AUDIBLE_S:
            self.underrun_s += late_s
            self.underruns += 1
            self._plays_until = at
        self._plays_until += media_s


class Listener(SimClient):
    """A client that plays one output and takes every chunk at once.

    Args:
        world: Where it lives.
        request: What it waits for.
        channel: Its API process.
        output: What it plays.

    Attributes:
        submitted_at: When it asked, in virtual seconds.
        playback: How that sounds.
        queued_s: How long its request waited in the queue, if it has ended well.
        slot_waits_s: How long each of its tasks waited for a slot once it had input.
        is_finished: Its request has ended well.
    """

    def __init__(
        self, world: World, request: RequestId, channel: ChannelId, output: OutputName
    ) -> None:
        super().__init__(world, request, channel)
        self.submitted_at = world.now
        self.playback = Playback()
        self.queued_s = 0.0
        self.slot_waits_s: dict[StageId, float] = {}
        self.is_finished = False
        self._output = output

    def emitted(self, chunk: do.Emit) -> None:
        """Check a chunk, play it, and take it."""
        super().emitted(chunk)
        if chunk.output == self._output and chunk.payload is not None:
            self.playback.arrived(self._world.now, chunk.length / UNITS_PER_S)

    def ended(self, terminal: do.Finish | do.Fail | do.Cancelled | do.Reject) -> None:
        """Check a terminal, and note where the time went."""
        super().ended(terminal)
        if isinstance(terminal, do.Finish):
            self.is_finished = True
            self.queued_s = terminal.timings.queued_s
            self.slot_waits_s = {each.stage: each.waited_s for each in terminal.timings.stages}
