"""A simulated world: the real router, and replicas and clients that behave and misbehave by a seed.

Everything happens in timed callbacks on one heap; there is no event loop, no thread and no real clock.
The same seed gives the same world. After each event, or each so many, the router's invariants are
checked; what the world itself promises (no payload lost or freed early, chunks in order, one terminal)
is asserted as it goes.

    world = World(deployment, seed=7)
    world.open_channel(channel)
    world.submit(channel, pipeline, inputs=(text,))
    world.run()
    world.finish()
"""

from __future__ import annotations

import heapq
from collections import Counter
from random import Random
from typing import TYPE_CHECKING, assert_never

import msgspec

from stretto.core import commands as do
from stretto.core import events as on
from stretto.core.router import Router
from stretto.sim.clients import SimClient
from stretto.sim.replicas import SimReplica, ToReplica
from stretto.types import (
    INLINE,
    SHARED_MEMORY,
    CallId,
    ChannelId,
    InputName,
    OutputName,
    PayloadRef,
    PipelineName,
    ReplicaId,
    RequestId,
    StageId,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from stretto.core.graph import Deployment


class Habits(msgspec.Struct, frozen=True, kw_only=True):
    """How the world behaves; probabilities are per occasion, times in virtual seconds.

    Attributes:
        latency_s: Longest way of a message, on links and on channels.
        load_s: Longest loading time of a replica.
        step_s: Longest computing time per input chunk.
        chunks_per_input: How many units a task makes of each unit of its input.
        units_per_chunk: Units in a chunk; repeated tasks cut theirs differently.
        chunk_bytes: Largest payload; a quarter of them is inline.
        take_s: Longest time that a client takes for a chunk.
        slow_client: A client takes nothing at all from some point on.
        abort: A client aborts at a random time.
        start_failure: A replica says that it can't start.
        task_failure: A step fails its task.
        death: A step kills its replica.
        freeze: A step never ends, and neither does its replica react any more.
        loss: A death loses what was on its way from the replica, too.
        delay: A message of a link is held up, and all behind it.
        delay_s: Longest time that it is held up.
        boundary: A replica names a boundary behind an input.
        repetition: A message that may come twice does.
        report: A step tells its backend's numbers.
    """

    latency_s: float = 0.002
    load_s: float = 0.5
    step_s: float = 0.02
    chunks_per_input: int = 3
    units_per_chunk: int = 10
    chunk_bytes: int = 200_000
    take_s: float = 0.02
    slow_client: float = 0.0
    abort: float = 0.0
    start_failure: float = 0.0
    task_failure: float = 0.0
    death: float = 0.0
    freeze: float = 0.0
    loss: float = 0.0
    delay: float = 0.0
    delay_s: float = 15.0
    boundary: float = 0.0
    repetition: float = 0.0
    report: float = 0.0


class World:
    """Everything around one router.

    Args:
        deployment: What is served.
        seed: Decides everything that is random.
        habits: See `Habits`.
        observe: Sees each event with the router's answer.
        check_every: The router's invariants are checked after each so many events, and at the end.
        replica: Makes the replicas.
        client: Makes the clients.

    Attributes:
        now: Virtual seconds.
        random: The only source of chance.
        terminals: How each request ended: a class name of `commands`.
        answers: How each call ended.
        events: Count of events by class name.
        checks: How often the invariants were checked.
    """

    def __init__(
        self,
        deployment: Deployment,
        *,
        seed: int,
        habits: Habits | None = None,
        observe: Callable[[on.AnyEvent, tuple[do.AnyCommand, ...]], None] | None = None,
        check_every: int = 1,
        replica: Callable[[World, ReplicaId], SimReplica] = SimReplica,
        client: Callable[[World, RequestId, ChannelId], SimClient] = SimClient,
    ) -> None:
        self.router = Router(deployment)
        self.random = Random(seed)  # noqa: S311 - a simulation wants chance that repeats
        self.habits = habits or Habits()
        self.now = 0.0
        self.terminals: dict[RequestId, str] = {}
        self.answers: dict[CallId, do.AnswerRpc | None] = {}
        self.events: Counter[str] = Counter()
        self.checks = 0
        self.replicas: dict[ReplicaId, SimReplica] = {}
        self.clients: dict[RequestId, SimClient] = {}
        self._companions: dict[RequestId, list[RequestId]] = {}
        self.has_exited = False
        self._observe = observe
        self._check_every = check_every
        self._until_check = check_every
        self._make_replica = replica
        self._make_client = client
        self._live_payloads: dict[PayloadRef, int] = {}
        self._fed_to: dict[PayloadRef, dict[ReplicaId, None]] = {}
        self._emitted_to: dict[PayloadRef, dict[RequestId, None]] = {}
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._counter = 0
        self._timer_at: float | None = None
        self.tell(on.EngineStarted(now=0.0))

    # ------------------------------------------------------------------ what drives it

    def after(self, delay_s: float, callback: Callable[[], None]) -> None:
        """Call back in virtual time."""
        self.at(self.now + delay_s, callback)

    def at(self, when: float, callback: Callable[[], None]) -> None:
        """Call back at a moment; what is due at the same moment keeps its order."""
        self._counter += 1
        heapq.heappush(self._heap, (when, self._counter, callback))

    def run(self, until: float | None = None) -> None:
        """Let time pass until nothing is due any more, or until a moment."""
        while self._heap and (until is None or self._heap[0][0] <= until):
            self.now, _, callback = heapq.heappop(self._heap)
            callback()
        if until is not None:
            self.now = max(self.now, until)

    def tell(self, event: on.AnyEvent) -> None:
        """Give the router an event, check it, and carry out what it wants."""
        self.events[type(event).__name__] += 1
        commands = self.router.handle(event)
        self._until_check -= 1
        if not self._until_check:
            self._until_check = self._check_every
            self._check()
        if self._observe is not None:
            self._observe(event, commands)
        for command in commands:
            self._execute(command)
        self._set_timer()

    def _check(self) -> None:
        self.checks += 1
        self.router.check_invariants()

    def chance(self, probability: float) -> bool:
        """Say whether something of this probability happens now."""
        return probability > 0 and self.random.random() < probability

    def upto(self, longest: float) -> float:
        """Return a random share of `longest`."""
        return longest * self.random.random()

    def _set_timer(self) -> None:
        when = self.router.next_deadline()
        if when is None or (self._timer_at is not None and self._timer_at <= when):
            return
        self._timer_at = when
        self.after(max(when - self.now, 0.0), self._ring)

    def _ring(self) -> None:
        self._timer_at = None
        when = self.router.next_deadline()
        if when is not None and when <= self.now:
            self.tell(on.DeadlinePassed(now=self.now))
        else:
            self._set_timer()

    # ------------------------------------------------------------------ what happens in it

    def open_channel(self, channel: ChannelId) -> None:
        """Let an API process connect."""
        self.tell(on.ChannelOpened(now=self.now, channel=channel))

    def submit(  # noqa: PLR0913 - what a request may be
        self,
        channel: ChannelId,
        pipeline: PipelineName,
        inputs: tuple[InputName, ...],
        outputs: tuple[OutputName, ...] = (),
        *,
        units: int | None = None,
        is_open: bool = False,
        companions: int = 0,
        companion_of: RequestId | None = None,
    ) -> RequestId:
        """Submit a request now, for a client that takes its outputs.

        Args:
            channel: Who asks.
            pipeline: What is asked.
            inputs: What it brings.
            outputs: What it wants; empty means all.
            units: How many units each input counts as; `None` for a usual chunk, and a random priority.
            is_open: More of each input follows; see `append` and `close_input`.
            companions: So many requests follow that go with this one.
            companion_of: The request that this one goes with.
        """
        request = RequestId(f"{channel}-{len(self.clients) + 1}")
        self.clients[request] = self._make_client(self, request, channel)
        if companion_of is not None:
            self._companions.setdefault(companion_of, []).append(request)
        self.tell(
            on.RequestSubmitted(
                now=self.now,
                channel=channel,
                request=request,
                pipeline=pipeline,
                inputs=tuple((name, self.payload(100, INLINE, units)) for name in inputs),
                outputs=outputs,
                open_inputs=inputs if is_open else (),
                options=self.payload(20, INLINE) if self.chance(0.5) else None,
                priority=self.random.randrange(2) if units is None else 0,
                companions=companions,
                companion_of=companion_of,
            )
        )
        self.clients[request].begin()
        return request

    def append(self, request: RequestId, name: InputName) -> None:
        """Let a client send more of an open input, unless it has vanished."""
        if not self.clients[request].is_gone:
            more = self.payload(100, INLINE)
            self.tell(on.InputAppended(now=self.now, request=request, input=name, payload=more))

    def close_input(self, request: RequestId, name: InputName) -> None:
        """Let a client end an open input, unless it has vanished."""
        if not self.clients[request].is_gone:
            self.tell(on.InputClosed(now=self.now, request=request, input=name))

    def call(
        self,
        channel: ChannelId,
        method: str,
        stages: tuple[StageId, ...] = (),
        timeout_s: float = 10.0,
    ) -> None:
        """Have a method called now; see `stretto.sim.replicas.METHODS`."""
        call = CallId(f"{channel}-call-{len(self.answers) + 1}")
        self.answers[call] = None
        self.tell(
            on.RpcRequested(
                now=self.now,
                call=call,
                channel=channel,
                method=method,
                stages=stages,
                timeout_s=timeout_s,
            )
        )

    def close_channel(self, channel: ChannelId) -> None:
        """Let an API process vanish."""
        for client in self.clients.values():
            if client.channel == channel:
                client.is_gone = True
        self.tell(on.ChannelClosed(now=self.now, channel=channel))

    def kill(self, replica: ReplicaId) -> None:
        """Kill a replica's process."""
        self.replicas[replica].die("killed")

    def finish(self) -> None:
        """Shut down, wait for the end, and check that nothing is left anywhere."""
        self.tell(on.ShutdownRequested(now=self.now, drain_s=60.0))
        self.run()
        for channel in {client.channel: None for client in self.clients.values()}:
            self.close_channel(channel)
        self._check()
        statistics = self.router.statistics()
        assert self.has_exited, "no exit"
        assert not self._live_payloads, f"payloads never released: {list(self._live_payloads)[:3]}"
        assert set(self.terminals) == set(self.clients), "a request without its terminal"
        assert None not in self.answers.values(), "a call without its answer"
        gauges = (
            statistics.queued,
            statistics.running,
            statistics.draining,
            statistics.deadlines,
            statistics.calls,
        )
        assert not any(gauges), f"gauges: {statistics}"
        assert not any(stage.bound or stage.reserved for stage in statistics.stages), "slots"

    def payload(
        self, size_bytes: int, place: str | None = None, units: int | None = None
    ) -> PayloadRef:
        """Make a payload of at most so many bytes; it counts as a usual chunk unless units are given."""
        if place is None:
            place = INLINE if self.chance(0.25) else SHARED_MEMORY
        self._counter += 1
        made = PayloadRef(place, str(self._counter), self.random.randint(1, size_bytes))
        self._live_payloads[made] = self.habits.units_per_chunk if units is None else units
        return made

    def reclaim(self, payload: PayloadRef) -> None:
        """Remove a payload that its producer had not announced."""
        del self._live_payloads[payload]

    def units_of(self, payload: PayloadRef) -> int:
        """Return how many units a payload holds that has not been released."""
        return self._live_payloads[payload]

    def check_live(self, payload: PayloadRef) -> None:
        """Assert that a payload can still be read."""
        assert payload in self._live_payloads, f"{payload} was released too early"

    # ------------------------------------------------------------------ what the router wants

    def _execute(self, command: do.AnyCommand) -> None:  # noqa: C901 - one arm per command
        match command:
            case do.Dispatch() | do.Feed() | do.CloseInput() | do.CancelTask() | do.Grant():
                self._tell_replica(command)
            case do.Emit():
                self._tell_client(command)
            case do.Finish() | do.Fail() | do.Cancelled() | do.Reject():
                assert command.request not in self.terminals, f"{command.request} ended twice"
                if isinstance(command, do.Finish):
                    self._check_party(command.request)
                self.terminals[command.request] = type(command).__name__
                self.clients[command.request].ended(command)
            case do.Release():
                self.check_live(command.payload)
                self._check_unviewed(command.payload)
                del self._live_payloads[command.payload]
            case do.CallReplica():
                self.replicas[command.replica].called(command)
            case do.AnswerRpc():
                assert self.answers[command.call] is None, f"{command.call} was answered twice"
                self.answers[command.call] = command
            case do.StartReplica():
                self.replicas[command.replica] = self._make_replica(self, command.replica)
            case do.StopReplica():
                self.replicas[command.replica].stop()
            case do.Exit():
                self.has_exited = True
            case (
                do.AdmitReplica()
                | do.RefuseReplica()
                | do.DrainReplica()
                | do.Announce()
                | do.AnnounceTarget()
                | do.AnswerOrder()
                | do.AcknowledgeAbort()
            ):
                pass
            case _:
                assert_never(command)

    def _check_party(self, leader: RequestId) -> None:
        """Assert that all have finished well, or were never let in, who went with one that finishes."""
        for companion in self._companions.get(leader, ()):
            end = self.terminals.get(companion)
            assert end in ("Finish", "Reject"), f"{leader} finishes, {companion}: {end}"

    def _tell_replica(self, command: ToReplica) -> None:
        if isinstance(command, do.Feed):
            self._fed_to.setdefault(command.payload, {})[command.replica] = None
        self.replicas[command.replica].take(command)

    def _tell_client(self, chunk: do.Emit) -> None:
        if chunk.payload is not None:
            self._emitted_to.setdefault(chunk.payload, {})[chunk.request] = None
        self.clients[chunk.request].emitted(chunk)

    def _check_unviewed(self, payload: PayloadRef) -> None:
        for each in self._fed_to.pop(payload, ()):
            assert not self.replicas[each].views(payload), (
                f"{payload} was released while {each} views it"
            )
        for each in self._emitted_to.pop(payload, ()):
            client = self.clients[each]
            assert client.is_gone or payload not in client.viewed, (
                f"{payload} was released under a client"
            )
