"""Any order of events: the router against a tiny reference model, by Hypothesis.

Events are made up as a world could send them: a replica respects its send right, a client drains what
it got. Late and impossible events come too. After each step the router's own invariants hold, and the
model agrees with every command.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from stretto.core import events as on
from stretto.core.graph import Deployment, EdgeMode, Limits, StageSpec
from stretto.core.requests import RequestState
from stretto.core.router import LEGAL, Router
from stretto.errors import Failure, FailureKind, InvalidTransition
from stretto.sim.replicas import METHODS
from stretto.types import (
    INLINE,
    SHARED_MEMORY,
    CallId,
    ChannelId,
    PayloadRef,
    ReplicaId,
    RequestId,
    StageId,
    TaskKey,
)
from tests.core.builders import (
    AUDIO,
    TEXT,
    VOICE,
    WORDS,
    A,
    B,
    C,
    D,
    deployment,
    diamond,
    edge,
    line_of_2,
    line_of_3,
    pipeline,
    shared,
)
from tests.machine.model import Asked, Model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.types import EdgeId

T = TypeVar("T")

SHORT = Limits(
    max_queued=4,
    queue_timeout_s=5.0,
    request_timeout_s=25.0,
    slow_client_timeout_s=4.0,
    input_timeout_s=4.0,
    cancel_timeout_s=2.0,
    drain_timeout_s=6.0,
    stage_unavailable_timeout_s=3.0,
    retention_bytes=2000,
    client_window_chunks=3,
    client_window_bytes=900,
    breaker_deaths=3,
    breaker_rearm_s=10.0,
)
"""Bounds so near that a run of some fifty events meets them."""

SMALL = tuple(
    StageSpec(id=stage, replicas=2, slots=1, chunk_timeout_s=3.0, start_timeout_s=5.0)
    for stage in (A, B, C, D)
)


PREFER = on.Affinity(key="k")
REQUIRE = on.Affinity(key="k", mode="require")


class RouterMachine(RuleBasedStateMachine):
    """Steps that any world may take; a subclass names the deployment."""

    deployed: ClassVar[Deployment]

    def __init__(self) -> None:
        super().__init__()
        self.router = Router(self.deployed)
        self.model = Model()
        self.now = 0.0
        self.numbers = 0
        self.connections = 0
        self.former: list[on.AnyEvent] = []
        self.submissions: dict[RequestId, on.RequestSubmitted] = {}

    # ------------------------------------------------------------------ how a step is taken

    def tell(self, event: on.AnyEvent) -> None:
        """Give the router an event; the model follows the commands, `LEGAL` the request's state."""
        request = request_of(event)
        before = RequestState.DONE if request is None else self.router.state_of(request)
        for command in self.router.handle(event):
            self.model.apply(command)
        self.router.check_invariants()
        for each in self.model.asked:
            self.model.check_party(each)
        if request is not None and type(event) in LEGAL:
            after = self.router.state_of(request)
            outcomes = LEGAL[type(event)][before]
            is_of_former_attempt = isinstance(event, on.TaskEvent) and after is before
            assert is_of_former_attempt or after in (outcomes or (before,)), f"{before}, {after}"

    def payload(self, size_bytes: int = 100, place: str = INLINE) -> PayloadRef:
        """Make a payload."""
        self.numbers += 1
        made = PayloadRef(place, str(self.numbers), size_bytes)
        self.model.payloads[made] = None
        return made

    def pick(self, data: st.DataObject, options: Sequence[T]) -> T:
        """Choose one."""
        return options[data.draw(st.integers(0, len(options) - 1))]

    def working(self) -> list[TaskKey]:
        """Return the open tasks that may send a chunk."""
        return [key for key, task in self.model.tasks.items() if task.may_produce]

    def hungry(self) -> list[tuple[TaskKey, EdgeId]]:
        """Return the open tasks and edges that have something to absorb."""
        return [
            (key, edge_id)
            for key, task in self.model.tasks.items()
            for edge_id, fed in task.fed.items()
            if task.consumed[edge_id] < fed
        ]

    def in_phase(self, *phases: str) -> list[ReplicaId]:
        """Return the replicas in one of some phases."""
        return [replica for replica, phase in self.model.replicas.items() if phase in phases]

    # ------------------------------------------------------------------ channels and requests

    @initialize()
    def start(self) -> None:
        """The engine starts, and one API process connects."""
        self.tell(on.EngineStarted(now=self.now))
        self.open_channel()
        for replica in list(self.model.replicas):
            self.load(replica)
            self.load(replica)

    @precondition(lambda self: len(self.model.channels) < 2)
    @rule()
    def open_channel(self) -> None:
        """An API process connects."""
        self.numbers += 1
        channel = ChannelId(f"1.{self.numbers}")
        self.model.channels[channel] = None
        self.tell(on.ChannelOpened(now=self.now, channel=channel))

    @precondition(lambda self: self.model.channels)
    @rule(data=st.data(), twice=st.booleans())
    def close_channel(self, data: st.DataObject, *, twice: bool) -> None:
        """An API process vanishes, with its views."""
        channel = self.pick(data, list(self.model.channels))
        self.model.views.pop(channel, None)
        self.tell(on.ChannelClosed(now=self.now, channel=channel))
        del self.model.channels[channel]
        if twice:
            self.tell(on.ChannelClosed(now=self.now, channel=channel))

    @precondition(lambda self: self.model.channels)
    @rule(
        data=st.data(),
        priority=st.integers(0, 1),
        options=st.booleans(),
        affinity=st.sampled_from((None, None, PREFER, REQUIRE)),
        companions=st.sampled_from((0, 0, 0, 1, 2)),
    )
    def submit(
        self,
        data: st.DataObject,
        priority: int,
        affinity: on.Affinity | None,
        companions: int,
        *,
        options: bool,
    ) -> None:
        """A client asks for all or some outputs of a pipeline, from some of its inputs, some open."""
        pipeline = self.pick(data, self.deployed.pipelines)
        wanted = data.draw(st.sets(st.sampled_from([o.name for o in pipeline.outputs])))
        inputs = data.draw(st.sets(st.sampled_from(pipeline.inputs), min_size=1))
        given = data.draw(st.sets(st.sampled_from(sorted(inputs)))) if priority else inputs
        channel = self.pick(data, list(self.model.channels))
        self.numbers += 1
        self.ask(
            on.RequestSubmitted(
                now=self.now,
                channel=channel,
                request=RequestId(f"{channel}-{self.numbers}"),
                pipeline=pipeline.name,
                inputs=tuple((name, self.payload()) for name in sorted(given)),
                open_inputs=tuple(sorted(inputs)) if priority else (),
                outputs=tuple(sorted(wanted)),
                options=self.payload() if options else None,
                priority=priority,
                affinity=affinity,
                companions=companions,
            )
        )

    @precondition(lambda self: any(each.companions for each in self.model.asked.values()))
    @rule(data=st.data(), is_open=st.booleans())
    def accompany(self, data: st.DataObject, *, is_open: bool) -> None:
        """A companion comes, perhaps one too many, or too late."""
        leaders = [request for request, each in self.model.asked.items() if each.companions]
        leader = self.submissions[self.pick(data, leaders)]
        if leader.channel not in self.model.channels:
            return
        self.numbers += 1
        inputs = tuple(dict.fromkeys((*(name for name, _ in leader.inputs), *leader.open_inputs)))
        self.ask(
            on.RequestSubmitted(
                now=self.now,
                channel=leader.channel,
                request=RequestId(f"{leader.channel}-{self.numbers}"),
                pipeline=leader.pipeline,
                inputs=() if is_open else tuple((name, self.payload()) for name in inputs),
                open_inputs=inputs if is_open else (),
                outputs=leader.outputs,
                companion_of=leader.request,
            )
        )

    def ask(self, event: on.RequestSubmitted) -> None:
        """Submit a request."""
        self.submissions[event.request] = event
        self.model.asked[event.request] = Asked(
            event.channel, leader=event.companion_of, companions=event.companions
        )
        self.tell(event)

    @precondition(lambda self: self.model.asked)
    @rule(
        data=st.data(),
        sizes=st.lists(st.sampled_from((1, 100, 900)), max_size=4),
        ends=st.booleans(),
        twice=st.booleans(),
    )
    def send_more(self, data: st.DataObject, sizes: list[int], *, ends: bool, twice: bool) -> None:
        """A client sends more of an input, which may be closed, and perhaps ends it."""
        submitted = self.submissions[self.pick(data, list(self.model.asked))]
        names = [*submitted.open_inputs, *(name for name, _ in submitted.inputs)]
        name = self.pick(data, names)
        for size_bytes in sizes:
            payload = self.payload(size_bytes)
            self.tell(
                on.InputAppended(
                    now=self.now, request=submitted.request, input=name, payload=payload
                )
            )
        for _ in range(ends + (ends and twice)):
            self.tell(on.InputClosed(now=self.now, request=submitted.request, input=name))

    @precondition(lambda self: self.model.asked)
    @rule(data=st.data(), acknowledge=st.booleans())
    def abort(self, data: st.DataObject, *, acknowledge: bool) -> None:
        """A client aborts a request, which may have ended."""
        request = self.pick(data, list(self.model.asked))
        channel = self.model.asked[request].channel
        self.tell(
            on.RequestAborted(
                now=self.now, request=request, channel=channel, acknowledge=acknowledge
            )
        )

    @precondition(lambda self: self.model.asked)
    @rule(data=st.data())
    def drain(self, data: st.DataObject) -> None:
        """A client takes some of the chunks it got."""
        request = self.pick(data, list(self.model.asked))
        asked = self.model.asked[request]
        if self.router.state_of(request) is RequestState.QUEUED or not asked.chunks:
            return
        output = self.pick(data, sorted(asked.chunks))
        up_to = data.draw(st.integers(asked.drained[output], asked.chunks[output]))
        asked.drained[output] = up_to
        self.tell(on.ConsumerDrained(now=self.now, request=request, output=output, up_to=up_to))

    # ------------------------------------------------------------------ tasks

    @precondition(lambda self: self.working())
    @rule(
        data=st.data(),
        size_bytes=st.sampled_from((1, 200, 900)),
        place=st.sampled_from((INLINE, SHARED_MEMORY)),
        kind=st.sampled_from(("data", "data", "data", "preview")),
    )
    def produce(
        self, data: st.DataObject, size_bytes: int, place: str, kind: Literal["data", "preview"]
    ) -> None:
        """A task makes its next chunk, within its send right; it may have been cancelled."""
        self.make_chunk(self.pick(data, self.working()), size_bytes, place, kind)

    def make_chunk(
        self, key: TaskKey, size_bytes: int, place: str, kind: Literal["data", "preview"]
    ) -> None:
        """Let a task make its next chunk."""
        task = self.model.tasks[key]
        seq = task.produced
        if kind == "data":
            task.produced += 1
            task.bytes_produced += size_bytes
        self.tell(self.chunk(key, seq, self.payload(size_bytes, place), kind))

    def chunk(
        self,
        key: TaskKey,
        seq: int,
        payload: PayloadRef,
        kind: Literal["data", "preview"] = "data",
    ) -> on.ChunkProduced:
        """Make the event."""
        event = on.ChunkProduced(
            now=self.now, task=key, seq=seq, payload=payload, length=1, kind=kind
        )
        self.former.append(event)
        return event

    @precondition(lambda self: self.model.tasks)
    @rule(size_bytes=st.sampled_from((1, 300)), place=st.sampled_from((INLINE, SHARED_MEMORY)))
    def go_on(self, size_bytes: int, place: str) -> None:
        """Every task absorbs all it was fed and makes a chunk, so that a run gets somewhere."""
        for key in list(self.model.tasks):
            for hungry, edge_id in self.hungry():
                if hungry == key:
                    task = self.model.tasks[key]
                    up_to = task.consumed[edge_id] = task.fed[edge_id]
                    self.tell(on.InputConsumed(now=self.now, task=key, edge=edge_id, up_to=up_to))
            if key in self.working():
                self.make_chunk(key, size_bytes, place, "data")

    @precondition(lambda self: self.hungry())
    @rule(data=st.data())
    def consume(self, data: st.DataObject) -> None:
        """A task absorbs some of what it was fed."""
        key, edge_id = self.pick(data, self.hungry())
        task = self.model.tasks[key]
        up_to = data.draw(st.integers(task.consumed[edge_id] + 1, task.fed[edge_id]))
        task.consumed[edge_id] = up_to
        self.tell(on.InputConsumed(now=self.now, task=key, edge=edge_id, up_to=up_to))

    @precondition(lambda self: any(self.model.views.values()))
    @rule(data=st.data())
    def look_away(self, data: st.DataObject) -> None:
        """A replica or an API process is done with a payload."""
        viewed = [(h, ref) for h, refs in self.model.views.items() for ref in refs if refs[ref]]
        if viewed:
            holder, payload = self.pick(data, viewed)
            self.model.views[holder][payload] -= 1
            self.tell(on.PayloadDone(now=self.now, holder=holder, payload=payload))

    @precondition(lambda self: self.model.tasks)
    @rule(data=st.data(), how=st.sampled_from(("well", "well", "badly")))
    def end(self, data: st.DataObject, how: str) -> None:
        """A task ends, told to or not, with or without having taken all its input."""
        key = self.pick(data, list(self.model.tasks))
        task = self.model.tasks[key]
        self.model.ended(key)
        if how == "badly":
            failure = Failure(kind=FailureKind.STAGE_ERROR, detail="no")
            event: on.AnyEvent = on.TaskFailed(now=self.now, task=key, failure=failure)
        elif task.is_cancelled:
            event = on.TaskCancelled(now=self.now, task=key)
        else:
            event = on.TaskFinished(now=self.now, task=key)
        self.former.append(event)
        self.tell(event)

    # ------------------------------------------------------------------ replicas

    @precondition(lambda self: self.in_phase("starting", "loading"))
    @rule(data=st.data())
    def go_on_loading(self, data: st.DataObject) -> None:
        """A replica says hello, or becomes ready."""
        self.load(self.pick(data, self.in_phase("starting", "loading")))

    def load(self, replica: ReplicaId) -> None:
        """Take the next step of starting."""
        if self.model.replicas[replica] == "starting":
            self.model.replicas[replica] = "loading"
            self.tell(on.ReplicaJoined(now=self.now, replica=replica))
            self.tell(on.ReplicaProgressed(now=self.now, replica=replica, what="x", fraction=0.5))
        else:
            self.model.replicas[replica] = "ready"
            recovery = "replay" if replica.stage == B else "retry"
            ready = on.ReplicaReady(
                now=self.now, replica=replica, slots=1, recovery=recovery, methods=METHODS
            )
            self.tell(ready)

    @precondition(lambda self: self.model.replicas)
    @rule(
        data=st.data(),
        how=st.sampled_from(("dies", "dies twice", "can't start", "drains", "is replaced")),
    )
    def lose(self, data: st.DataObject, how: str) -> None:
        """A replica dies, gives up, or is drained."""
        replica = self.pick(data, list(self.model.replicas))
        if how in ("drains", "is replaced"):
            replace = how == "is replaced"
            self.tell(on.DrainRequested(now=self.now, replica=replica, replace=replace))
        elif how == "can't start" and replica in self.in_phase("loading"):
            self.tell(on.ReplicaStartFailed(now=self.now, replica=replica, reason="no"))
        else:
            for _ in how.split():
                self.tell(on.ReplicaDied(now=self.now, replica=replica, reason="exit 9"))

    @rule(data=st.data(), replicas=st.integers(0, 3))
    def scale(self, data: st.DataObject, replicas: int) -> None:
        """An operator changes the size of a stage."""
        stage = data.draw(st.sampled_from((A, B)))
        self.tell(on.ScaleRequested(now=self.now, stage=stage, replicas=replicas))

    @rule(
        stage=st.sampled_from((A, B, StageId("nowhere"))),
        nonce=st.sampled_from(("x", "y")),
        is_new=st.booleans(),
    )
    def offer(self, stage: StageId, nonce: str, *, is_new: bool) -> None:
        """A process from elsewhere offers itself, perhaps again."""
        self.connections += is_new
        connection = self.connections
        self.tell(on.ReplicaOffered(now=self.now, stage=stage, nonce=nonce, connection=connection))

    @precondition(lambda self: self.model.tasks)
    @rule(data=st.data(), age_s=st.sampled_from((0.0, 0.0, 99.0)))
    def tell_alive(self, data: st.DataObject, age_s: float) -> None:
        """A replica with work reacts; its step may have hung."""
        replica = self.pick(data, list(self.model.tasks.values())).replica
        self.tell(on.ReplicaAlive(now=self.now, replica=replica, step_age_s=age_s))

    @precondition(lambda self: self.model.incarnations)
    @rule(data=st.data(), values=st.dictionaries(st.sampled_from("xy"), st.just(0.5)))
    def report(self, data: st.DataObject, values: dict[str, float]) -> None:
        """A replica's backend tells numbers; the replica may be gone."""
        (stage, slot), incarnation = self.pick(data, list(self.model.incarnations.items()))
        replica = ReplicaId(stage, slot, incarnation)
        self.tell(
            on.StatsReported(now=self.now, replica=replica, running=1, waiting=0, values=values)
        )
        told = {
            each.replica for stage in self.router.statistics().stages for each in stage.reported
        }
        assert told <= set(self.model.replicas), "who is gone tells nothing"
        assert (replica in told) == (replica in self.model.replicas)

    # ------------------------------------------------------------------ calls

    @precondition(lambda self: self.model.channels)
    @rule(
        data=st.data(),
        method=st.sampled_from(("look", "tidy", "tidy", "sleep", "wake", "wake", "nothing")),
        timeout_s=st.sampled_from((0.1, 4.0)),
        everywhere=st.booleans(),
    )
    def call(self, data: st.DataObject, method: str, timeout_s: float, *, everywhere: bool) -> None:
        """Somebody wants a method called, at one stage's replicas or at all."""
        channel = self.pick(data, list(self.model.channels))
        stage = self.pick(data, self.deployed.stages).id
        self.numbers += 1
        call = CallId(f"{channel}-call-{self.numbers}")
        self.model.calls[call] = channel
        self.tell(
            on.RpcRequested(
                now=self.now,
                call=call,
                channel=channel,
                method=method,
                stages=() if everywhere else (stage,),
                timeout_s=timeout_s,
            )
        )

    @precondition(lambda self: self.model.called)
    @rule(data=st.data(), twice=st.booleans(), well=st.booleans())
    def answer(self, data: st.DataObject, *, twice: bool, well: bool) -> None:
        """A replica answers a call, which may have ended."""
        replica, call = self.pick(data, list(self.model.called))
        method = self.model.called.pop((replica, call)).method
        if method == "sleep" and well:
            self.model.asleep.add(replica)
        if method == "wake" and well:
            self.model.asleep.discard(replica)
        failure = None if well else Failure(kind=FailureKind.STAGE_ERROR, detail="no")
        for _ in range(1 + twice):
            self.tell(
                on.RpcAnswered(
                    now=self.now,
                    call=call,
                    replica=replica,
                    failure=failure,
                    is_asleep=replica in self.model.asleep,
                )
            )

    # ------------------------------------------------------------------ time, lateness, nonsense

    @rule(delay_s=st.sampled_from((0.0, 0.5, 3.0, 20.0)))
    def wait(self, delay_s: float) -> None:
        """Time passes, and every deadline on the way is met."""
        self.pass_time(self.now + delay_s)

    def pass_time(self, until: float) -> None:
        """Let time pass until some moment; a timer that rings too early does no harm."""
        while (when := self.router.next_deadline()) is not None and when <= until:
            self.now = max(self.now, when)
            self.tell(on.DeadlinePassed(now=self.now))
        self.now = max(self.now, until)
        self.tell(on.DeadlinePassed(now=self.now))

    @precondition(lambda self: len(self.model.asked) > 6)
    @rule()
    def shut_down(self) -> None:
        """The engine takes nothing new."""
        self.tell(on.ShutdownRequested(now=self.now, drain_s=8.0))

    @precondition(lambda self: self.former)
    @rule(data=st.data())
    def repeat_what_is_late(self, data: st.DataObject) -> None:
        """Something of a task that is not open any more arrives again, or late."""
        event = self.pick(data, self.former)
        key = getattr(event, "task", None)
        if not isinstance(key, TaskKey) or key in self.model.tasks:
            return
        if self.router.state_of(key.request) is RequestState.RUNNING:
            return
        if isinstance(event, on.ChunkProduced):
            event = self.chunk(key, event.seq, self.payload())
        try:
            self.tell(event)
        except InvalidTransition:
            self.break_request(key.request, event)

    @precondition(lambda self: self.model.tasks)
    @rule(data=st.data(), what=st.sampled_from(("gap", "too far", "uncalled", "slots")))
    def say_the_impossible(self, data: st.DataObject, what: str) -> None:
        """An impossible event raises, changes nothing, and then ends its request alone."""
        key = self.pick(data, list(self.model.tasks))
        if self.router.state_of(key.request) is not RequestState.RUNNING:
            return
        task = self.model.tasks[key]
        edge_id = next(iter(task.fed))
        if task.is_cancelled:
            return
        events: dict[str, on.AnyEvent] = {
            "gap": self.chunk(key, task.produced + 1, self.payload()),
            "too far": on.InputConsumed(
                now=self.now, task=key, edge=edge_id, up_to=task.fed[edge_id] + 1
            ),
            "uncalled": on.TaskCancelled(now=self.now, task=key),
            "slots": on.ReplicaReady(now=self.now, replica=task.replica, slots=1),
        }
        del self.model.payloads[PayloadRef(INLINE, str(self.numbers), 100)]
        event = events[what]
        for payload in on.payloads_of(event):
            self.model.payloads[payload] = None
        before = pickle.dumps(self.router)
        with pytest.raises(InvalidTransition):
            self.router.handle(event)
        assert pickle.dumps(self.router) == before, "an impossible event changed something"
        if what != "slots":
            self.break_request(key.request, event)

    def break_request(self, request: RequestId, event: on.AnyEvent) -> None:
        """Do what the shell does when the router refuses an event."""
        failure = Failure(kind=FailureKind.INVALID_TRANSITION, detail="a bug")
        self.tell(
            on.RequestBroken(
                now=self.now, request=request, failure=failure, payloads=on.payloads_of(event)
            )
        )

    # ------------------------------------------------------------------ the end

    def teardown(self) -> None:
        """Everything ends by itself or by its deadlines, and then nothing is left."""
        if not self.model.replicas and not self.model.asked:
            return
        self.tell(on.ShutdownRequested(now=self.now, drain_s=1.0))
        while self.model.tasks and self.numbers % 2:
            key = next(iter(self.model.tasks))
            is_cancelled = self.model.tasks[key].is_cancelled
            self.model.ended(key)
            make = on.TaskCancelled if is_cancelled else on.TaskFinished
            self.tell(make(now=self.now, task=key))
        self.pass_time(self.now + 100.0)
        assert self.model.has_exited
        for channel in list(self.model.channels):
            self.model.views.pop(channel, None)
            self.tell(on.ChannelClosed(now=self.now, channel=channel))
        statistics = self.router.statistics()
        assert all(asked.terminal for asked in self.model.asked.values())
        assert not self.model.payloads, "payloads were never released"
        assert not self.model.replicas
        assert set(self.model.answered) == set(self.model.calls)
        gauges = (statistics.queued, statistics.running, statistics.draining, statistics.calls)
        assert not any((*gauges, statistics.held_payloads, statistics.deadlines))
        assert not any(stage.bound or stage.reserved for stage in statistics.stages)


def request_of(event: on.AnyEvent) -> RequestId | None:
    """Return the request that an event is about."""
    match event:
        case on.RequestSubmitted() | on.RequestAborted() | on.RequestBroken():
            return event.request
        case on.InputAppended() | on.InputClosed():
            return event.request
        case on.ConsumerDrained():
            return event.request
        case on.ChunkProduced() | on.InputConsumed():
            return event.task.request
        case on.TaskFinished() | on.TaskFailed() | on.TaskCancelled():
            return event.task.request
        case _:
            return None


class LineOfTwo(RouterMachine):
    """`text → a ⇒ b → audio`."""

    deployed = line_of_2(limits=SHORT, nbytes=500, stages=SMALL)


class LineOfThree(RouterMachine):
    """`text → a ⇒ b ⇒ c → audio`."""

    deployed = line_of_3(limits=SHORT, stages=SMALL)


class Diamond(RouterMachine):
    """A full edge beside a stream, both ending in one stage."""

    deployed = diamond(limits=SHORT, stages=SMALL)


class Shared(RouterMachine):
    """Two pipelines over one stage, and a request that wants only the first stage's words."""

    deployed = shared(limits=SHORT, stages=SMALL)


class TwoInputs(RouterMachine):
    """A stage that the request feeds directly too, so that it may end before its source has started."""

    deployed = deployment(
        pipeline(
            edge(TEXT, A),
            edge(VOICE, C, name="voice"),
            edge(A, B),
            edge(B, C, mode=EdgeMode.FULL),
            outputs=[(AUDIO, C), (WORDS, A)],
            inputs=(TEXT, VOICE),
        ),
        limits=SHORT,
        stages=SMALL,
    )


PROFILE = settings(
    max_examples=40,
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
    # Shrinking a failure takes minutes; by hand, add `Phase.shrink` and raise `--timeout`.
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=(HealthCheck.too_slow,),
)

for machine in (LineOfTwo, LineOfThree, Diamond, Shared, TwoInputs):
    machine.TestCase.settings = PROFILE

TestLineOfTwo = LineOfTwo.TestCase
TestLineOfThree = LineOfThree.TestCase
TestDiamond = Diamond.TestCase
TestShared = Shared.TestCase
TestTwoInputs = TwoInputs.TestCase
