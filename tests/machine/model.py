"""A tiny reference model: what replicas, clients and payloads look like from the outside of the router.

It follows the router's commands, and asserts of each that it may come now. It decides nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, assert_never

from stretto.core import commands as do
from stretto.types import (
    INLINE,
    CallId,
    ChannelId,
    EdgeId,
    IncarnationNumber,
    OutputName,
    PayloadRef,
    ReplicaId,
    TaskKey,
)

if TYPE_CHECKING:
    from stretto.types import RequestId, StageId


@dataclass
class OpenTask:
    """A task that is open at a replica."""

    replica: ReplicaId
    fed: dict[EdgeId, int]
    chunks: int
    bytes: int
    consumed: Counter[EdgeId] = field(default_factory=Counter[EdgeId])
    closed: set[EdgeId] = field(default_factory=set[EdgeId])
    produced: int = 0
    bytes_produced: int = 0
    is_cancelled: bool = False

    @property
    def may_produce(self) -> bool:
        """Say whether the replica has the right to send a chunk."""
        return self.produced < self.chunks and self.bytes_produced < self.bytes


@dataclass
class Asked:
    """A request as its client sees it; `companions` and `leader` say with whom it goes."""

    channel: ChannelId
    leader: RequestId | None = None
    companions: int = 0
    terminal: str | None = None
    chunks: Counter[OutputName] = field(default_factory=Counter[OutputName])
    drained: Counter[OutputName] = field(default_factory=Counter[OutputName])
    finals: set[OutputName] = field(default_factory=set[OutputName])


class Model:
    """The outside world as the router's commands describe it.

    Attributes:
        replicas: Phase by live replica: `starting`, `loading`, `ready` or `draining`.
        tasks: Open tasks.
        asked: All requests.
        payloads: All payloads that were not released.
        views: Who looks at which payload in shared memory, and how often.
        channels: Open channels.
        calls: All calls, and the channel of each.
        answered: The calls that were answered.
        called: What each replica was called for and has not answered: the command of each call.
        asleep: Replicas that have said so.
        has_exited: Everything was stopped.
    """

    def __init__(self) -> None:
        self.replicas: dict[ReplicaId, str] = {}
        self.incarnations: dict[tuple[StageId, int], IncarnationNumber] = {}
        self.tasks: dict[TaskKey, OpenTask] = {}
        self.asked: dict[RequestId, Asked] = {}
        self.payloads: dict[PayloadRef, None] = {}
        self.views: dict[TaskKey | ChannelId, Counter[PayloadRef]] = {}
        self.channels: dict[ChannelId, None] = {}
        self.calls: dict[CallId, ChannelId] = {}
        self.answered: dict[CallId, do.AnswerRpc] = {}
        self.called: dict[tuple[ReplicaId, CallId], do.CallReplica] = {}
        self.asleep: set[ReplicaId] = set()
        self.has_exited = False

    def ended(self, task: TaskKey) -> None:
        """A task has ended at its replica."""
        del self.tasks[task]
        self.views.pop(task, None)

    def party(self, request: RequestId) -> dict[RequestId, Asked]:
        """Return all that were submitted to go with a request, itself and the refused ones included."""
        leader = self.asked[request].leader or request
        return {each: asked for each, asked in self.asked.items() if leader in (each, asked.leader)}

    def check_party(self, request: RequestId) -> None:
        """Assert, after an event, that a request has not outlived one that it goes with."""
        ends = [each.terminal for each in self.party(request).values()]
        assert not {"Fail", "Cancelled"} & set(ends) or None not in ends, f"{request}: {ends}"

    def _check_complete(self, request: RequestId) -> None:
        """Assert that nobody of a request's party is missing and none of it has failed."""
        party = self.party(request)
        ends = [each.terminal for each in party.values()]
        expected = party[self.asked[request].leader or request].companions
        assert len(ends) - ends.count("Reject") == 1 + expected, f"{request} starts incomplete"
        assert not {"Fail", "Cancelled"} & set(ends), f"{request} starts without a companion"

    def gone(self, replica: ReplicaId) -> None:
        """A replica is no more, nor is what it held."""
        self.replicas.pop(replica, None)
        self.asleep.discard(replica)
        for called in [key for key in self.called if key[0] == replica]:
            del self.called[called]
        for key, open_task in list(self.tasks.items()):
            if open_task.replica == replica:
                self.ended(key)

    def apply(  # noqa: C901, PLR0912 - one arm per command
        self, command: do.AnyCommand
    ) -> None:
        """Follow a command, if it may come now."""
        answers = (do.Reject, do.Release, do.AcknowledgeAbort, do.AnswerRpc, do.RefuseReplica)
        assert not self.has_exited or isinstance(command, answers), f"{command} after the exit"
        match command:
            case do.Dispatch() | do.Feed() | do.CloseInput() | do.Grant() | do.CancelTask():
                self._to_replica(command)
            case do.Emit() | do.Finish() | do.Fail() | do.Cancelled() | do.Reject():
                self._to_client(command)
            case do.Release():
                for holder, viewed in self.views.items():
                    assert not viewed[command.payload], f"{holder} views {command.payload}"
                del self.payloads[command.payload]
            case do.StartReplica():
                self._start(command.replica)
            case do.AdmitReplica():
                self._start(command.replica)
                self.replicas[command.replica] = "loading"
            case do.DrainReplica():
                assert command.replica in self.replicas
                self.replicas[command.replica] = "draining"
            case do.StopReplica():
                assert command.replica in self.replicas
                self.gone(command.replica)
            case do.CallReplica():
                self._call(command)
            case do.AnswerRpc():
                assert command.channel == self.calls[command.call]
                assert command.call not in self.answered, f"{command} is its second answer"
                self.answered[command.call] = command
            case (
                do.Announce()
                | do.AnnounceTarget()
                | do.AnswerOrder()
                | do.AcknowledgeAbort()
                | do.RefuseReplica()
            ):
                pass
            case do.Exit():
                assert not self.replicas
                assert not self.tasks
                self.has_exited = True
            case _:
                assert_never(command)

    def _start(self, replica: ReplicaId) -> None:
        place = (replica.stage, replica.slot)
        assert replica.incarnation > self.incarnations.get(place, 0), "an incarnation was reused"
        assert all((live.stage, live.slot) != place for live in self.replicas)
        self.incarnations[place] = replica.incarnation
        self.replicas[replica] = "starting"

    def _call(self, command: do.CallReplica) -> None:
        assert self.replicas[command.replica] in ("ready", "draining")
        assert command.call not in self.answered, f"{command} after its answer"
        if command.call_class == "exclusive":
            assert not any(task.replica == command.replica for task in self.tasks.values())
            assert not self.is_alone(command.replica)
        assert (command.replica, command.call) not in self.called
        self.called[command.replica, command.call] = command

    def is_alone(self, replica: ReplicaId) -> bool:
        """Say whether an exclusive call runs there."""
        return any(
            called == replica and command.call_class == "exclusive"
            for (called, _), command in self.called.items()
        )

    def _to_replica(
        self, command: do.Dispatch | do.Feed | do.CloseInput | do.Grant | do.CancelTask
    ) -> None:
        if isinstance(command, do.Dispatch):
            assert self.replicas[command.replica] == "ready", f"{command} to one that is not ready"
            assert command.replica not in self.asleep, f"{command} to one that sleeps"
            assert not self.is_alone(command.replica), f"{command} beside an exclusive call"
            assert command.task not in self.tasks
            assert self.asked[command.task.request].terminal is None
            self._check_complete(command.task.request)
            assert command.options is None or command.options in self.payloads
            fed = {edge.id: 0 for edge in command.edges}
            self.tasks[command.task] = OpenTask(command.replica, fed, command.chunks, command.bytes)
            return
        task = self.tasks[command.task]
        assert task.replica == command.replica
        assert not task.is_cancelled, f"{command} to a cancelled task"
        match command:
            case do.Feed(edge=edge, seq=seq, payload=payload):
                assert edge not in task.closed
                assert seq == task.fed[edge], f"{command} is out of order"
                assert payload in self.payloads
                task.fed[edge] += 1
                self._view(command.task, payload)
            case do.CloseInput(edge=edge):
                assert edge not in task.closed
                task.closed.add(edge)
            case do.Grant(chunks=chunks, bytes=nbytes):
                assert (chunks, nbytes) != (task.chunks, task.bytes)
                assert chunks >= task.chunks
                assert nbytes >= task.bytes
                task.chunks, task.bytes = chunks, nbytes
            case do.CancelTask():
                task.is_cancelled = True
            case _:
                assert_never(command)

    def _to_client(self, command: do.Emit | do.Finish | do.Fail | do.Cancelled | do.Reject) -> None:
        asked = self.asked[command.request]
        assert asked.channel == command.channel
        assert asked.terminal is None, f"{command} after {asked.terminal}"
        if not isinstance(command, do.Emit):
            asked.terminal = type(command).__name__
            if isinstance(command, do.Finish):
                assert set(asked.chunks) <= asked.finals
                assert asked.finals
                others = {each.terminal for each in self.party(command.request).values()}
                assert asked.leader or others <= {"Finish", "Reject"}, f"{command} is not the last"
            return
        assert command.output not in asked.finals, f"{command} after the end"
        if command.payload is not None:
            assert command.payload in self.payloads
            self._view(command.channel, command.payload)
        if command.kind == "data":
            assert command.seq == asked.chunks[command.output], f"{command} is out of order"
            asked.chunks[command.output] += command.payload is not None
        if command.final:
            asked.finals.add(command.output)

    def _view(self, holder: TaskKey | ChannelId, payload: PayloadRef) -> None:
        if payload.place != INLINE:
            self.views.setdefault(holder, Counter())[payload] += 1
