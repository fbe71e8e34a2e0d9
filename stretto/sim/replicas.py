"""A simulated replica process: it loads, computes in virtual time, obeys its send right, and may break.

Messages of one link keep their order in both directions; only the news of a death may overtake them.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from stretto.core import commands as do
from stretto.core import events as on
from stretto.errors import Failure, FailureKind
from stretto.types import INLINE, Boundary, PayloadRef

if TYPE_CHECKING:
    from collections.abc import Callable

    from stretto.core.graph import StageSpec
    from stretto.sim.world import World
    from stretto.types import CallClass, CallId, EdgeId, ReplicaId, TaskKey

METHODS: tuple[tuple[str, CallClass], ...] = (
    ("look", "control"),
    ("tidy", "exclusive"),
    ("sleep", "exclusive"),
    ("wake", "exclusive"),
)
"""What can be called at every replica; a call takes as long as a step."""

ToReplica: TypeAlias = do.Dispatch | do.Feed | do.CloseInput | do.CancelTask | do.Grant


class SimChunk(NamedTuple):
    """A chunk that was made: its payload, its units, and the boundary behind it, if there is one."""

    payload: PayloadRef
    length: int
    boundary: Boundary | None


class SimTask:
    """One open task: its inputs, what it made and may not send yet, and what it views."""

    def __init__(self, opening: do.Dispatch) -> None:
        self.key = opening.task
        done = {} if opening.resume is None else opening.resume.edges
        self.consumed = {edge.id: done.get(edge.id, (0, 0))[0] for edge in opening.edges}
        self.open_edges = dict(self.consumed)
        self.offset = opening.skip_units
        self.left_out = opening.skip_units - opening.resume_units
        self.arrivals: deque[tuple[EdgeId, int, PayloadRef, int]] = deque()
        self.unsent: deque[SimChunk] = deque()
        self.views: Counter[PayloadRef] = Counter()
        self.chunks = opening.chunks
        self.bytes = opening.bytes
        self.sent = 0
        self.sent_bytes = 0
        self.is_busy = False
        self.is_cancelled = False

    @property
    def may_send(self) -> bool:
        """Say whether the next chunk may be sent."""
        return self.sent < self.chunks and self.sent_bytes < self.bytes


class SimReplica:
    """One process of one stage.

    Args:
        world: Where it lives.
        replica: Its identity.
    """

    def __init__(self, world: World, replica: ReplicaId) -> None:
        self.id = replica
        self.is_alive = True
        self.is_frozen = False
        self.is_asleep = False
        self._world = world
        self._habits = world.habits
        self._tasks: dict[TaskKey, SimTask] = {}
        self._up_at = self._down_at = world.now
        self._is_telling = False
        self._is_cut = False
        world.after(world.upto(self._habits.load_s), self._load)

    def views(self, payload: PayloadRef) -> bool:
        """Say whether a task here is still looking at the payload."""
        return any(task.views[payload] for task in self._tasks.values())

    def take(self, command: ToReplica) -> None:
        """Let a command travel here."""
        self._down_at = max(self._down_at, self._world.now + self._latency())
        units = self._world.units_of(command.payload) if isinstance(command, do.Feed) else 0
        self._world.at(self._down_at, lambda: self._arrived(command, units))

    def called(self, command: do.CallReplica) -> None:
        """Let a call travel here."""
        self._down_at = max(self._down_at, self._world.now + self._latency())
        self._world.at(self._down_at, lambda: self._call(command))

    def die(self, reason: str) -> None:
        """End at once; the news travels behind what was sent before, overtakes it, or takes its place."""
        if not self.is_alive:
            return
        self.stop()
        self._is_cut = self._world.chance(self._habits.loss)
        if self._world.chance(0.3):
            self._up_at = self._world.now
        for _ in range(1 + self._world.chance(self._habits.repetition)):
            self._send(lambda now: on.ReplicaDied(now=now, replica=self.id, reason=reason))

    def stop(self) -> None:
        """Be killed; what it made and did not announce is reclaimed."""
        self.is_alive = False
        for task in list(self._tasks.values()):
            self._forget(task)

    # ------------------------------------------------------------------ messages

    def _latency(self) -> float:
        held_up_s = self._habits.delay_s if self._world.chance(self._habits.delay) else 0.0
        return self._world.upto(self._habits.latency_s + held_up_s)

    def _send(self, make: Callable[[float], on.AnyEvent]) -> None:
        world = self._world
        self._up_at = max(self._up_at, world.now + self._latency())
        world.at(self._up_at, lambda: self._deliver(make(world.now)))

    def _deliver(self, event: on.AnyEvent) -> None:
        if not self._is_cut or isinstance(event, on.ReplicaDied):
            self._world.tell(event)
            return
        for payload in on.payloads_of(event):
            self._world.reclaim(payload)

    def _load(self) -> None:
        if not self.is_alive:
            return
        self._send(lambda now: on.ReplicaJoined(now=now, replica=self.id))
        self._send(
            lambda now: on.ReplicaProgressed(now=now, replica=self.id, what="", fraction=0.5)
        )
        if self._world.chance(self._habits.start_failure):
            self._send(
                lambda now: on.ReplicaStartFailed(now=now, replica=self.id, reason="no model")
            )
            self.stop()
            return
        stage = self._stage
        self._send(
            lambda now: on.ReplicaReady(
                now=now,
                replica=self.id,
                slots=stage.slots,
                recovery=stage.recovery,
                methods=METHODS,
            )
        )

    @property
    def _stage(self) -> StageSpec:
        stages = self._world.router.deployment.stages
        return next(stage for stage in stages if stage.id == self.id.stage)

    def _tell_alive_later(self) -> None:
        if not self._is_telling:
            self._is_telling = True
            self._world.after(self._stage.progress_timeout_s / 6, self._tell_alive)

    def _tell_alive(self) -> None:
        self._is_telling = False
        if self.is_alive and not self.is_frozen and self._tasks:
            self._send(lambda now: on.ReplicaAlive(now=now, replica=self.id))
            self._tell_alive_later()

    def _arrived(self, command: ToReplica, units: int) -> None:
        if not self.is_alive:
            return
        if isinstance(command, do.Dispatch):
            assert command.task not in self._tasks, f"{command.task} was opened twice"
            assert not self.is_asleep, f"{command.task} was opened at a sleeping replica"
            self._tasks[command.task] = SimTask(command)
            self._tell_alive_later()
            return
        task = self._tasks.get(command.task)
        if task is None:
            return
        match command:
            case do.Feed(edge=edge, seq=seq, payload=payload):
                assert task.open_edges[edge] == seq, f"{command} is out of order"
                task.open_edges[edge] += 1
                task.arrivals.append((edge, seq, payload, units))
                if payload.place != INLINE:
                    self._world.check_live(payload)
                    task.views[payload] += 1
            case do.CloseInput(edge=edge):
                del task.open_edges[edge]
            case do.Grant(chunks=chunks, bytes=nbytes):
                task.chunks, task.bytes = chunks, nbytes
            case do.CancelTask():
                task.is_cancelled = True
        self._go_on(task)

    # ------------------------------------------------------------------ work

    def _go_on(self, task: SimTask) -> None:
        if task.is_busy or self.is_frozen:
            return
        if task.is_cancelled:
            self._end(task, lambda now: on.TaskCancelled(now=now, task=task.key))
            return
        while task.unsent and task.may_send:
            self._produce(task, task.unsent.popleft())
        if task.unsent:
            return
        if task.arrivals:
            task.is_busy = True
            edge, seq, payload, units = task.arrivals.popleft()
            task.consumed[edge] = seq + 1
            self._send(
                lambda now: on.InputConsumed(now=now, task=task.key, edge=edge, up_to=seq + 1)
            )
            self._world.after(
                self._world.upto(self._habits.step_s), lambda: self._stepped(task, payload, units)
            )
        elif not task.open_edges:
            self._end(task, lambda now: on.TaskFinished(now=now, task=task.key))

    def _stepped(self, task: SimTask, payload: PayloadRef, units: int) -> None:
        if not self.is_alive:
            return
        task.is_busy = False
        if self._world.chance(self._habits.report):
            self._report()
        if self._world.chance(self._habits.death):
            self.die("died while it computed")
        elif self._world.chance(self._habits.freeze):
            self.is_frozen = True
        elif self._world.chance(self._habits.task_failure):
            failure = Failure(kind=FailureKind.STAGE_ERROR, detail="the model refused")
            self._end(task, lambda now: on.TaskFailed(now=now, task=task.key, failure=failure))
        else:
            if payload.place != INLINE:
                task.views[payload] -= 1
                self._send(lambda now: on.PayloadDone(now=now, holder=task.key, payload=payload))
            self._make(task, units * self._habits.chunks_per_input)
            self._go_on(task)

    def _report(self) -> None:
        waiting = len(self._tasks) - 1
        self._send(
            lambda now: on.StatsReported(
                now=now, replica=self.id, running=1, waiting=waiting, values={"kv_use": 0.5}
            )
        )

    def _call(self, command: do.CallReplica) -> None:
        is_alone = command.call_class == "exclusive"
        assert not (is_alone and self.is_alive and self._tasks), f"{command} beside tasks"
        self._world.after(
            self._world.upto(self._habits.step_s),
            lambda: self._answer(command.call, command.method),
        )

    def _answer(self, call: CallId, method: str) -> None:
        if not self.is_alive or self.is_frozen:
            return
        if self._world.chance(self._habits.death):
            self.die("died while it was called")
            return
        if method in ("sleep", "wake"):
            self.is_asleep = method == "sleep"
        failure = (
            Failure(kind=FailureKind.STAGE_ERROR, detail="the model refused")
            if self._world.chance(self._habits.task_failure)
            else None
        )
        is_asleep = self.is_asleep
        for _ in range(1 + self._world.chance(self._habits.repetition)):
            self._send(
                lambda now: on.RpcAnswered(
                    now=now, call=call, replica=self.id, failure=failure, is_asleep=is_asleep
                )
            )

    def _make(self, task: SimTask, units: int) -> None:
        """Make one input's units, cut differently in each attempt, without those to leave out."""
        longest = self._habits.units_per_chunk + 3 * (task.key.attempt % 3)
        while units:
            length = min(units, longest)
            units -= length
            kept = max(length - task.left_out, 0)
            task.left_out -= length - kept
            if not kept:
                continue
            boundary = None
            if not units and self._world.chance(self._habits.boundary):
                boundary = Boundary(b"", {edge: (at, 0) for edge, at in task.consumed.items()})
            payload = self._world.payload(self._habits.chunk_bytes, units=kept)
            task.unsent.append(SimChunk(payload, kept, boundary))

    def _produce(self, task: SimTask, chunk: SimChunk) -> None:
        seq, offset = task.sent, task.offset
        task.sent += 1
        task.sent_bytes += chunk.payload.size_bytes
        task.offset += chunk.length
        self._send(
            lambda now: on.ChunkProduced(
                now=now,
                task=task.key,
                seq=seq,
                payload=chunk.payload,
                offset=offset,
                length=chunk.length,
                media_s=0.01,
                boundary=chunk.boundary,
            )
        )

    def _end(self, task: SimTask, make: Callable[[float], on.AnyEvent]) -> None:
        self._forget(task)
        self._send(make)

    def _forget(self, task: SimTask) -> None:
        del self._tasks[task.key]
        for chunk in task.unsent:
            self._world.reclaim(chunk.payload)
