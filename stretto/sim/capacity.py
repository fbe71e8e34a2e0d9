"""How long do listeners wait at this load, and how many replicas keep that short?

`measure` runs the real router with timed replicas for one set of replica counts. `search` runs it for
several until it has counts that meet a target and of which none can be one smaller.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from stretto.sim.timed import Listener, Meter, TimedReplica
from stretto.sim.workload import Workload
from stretto.sim.world import Habits, World
from stretto.types import ChannelId, StageId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from stretto.core.graph import Deployment, StageSpec
    from stretto.types import InputName, ReplicaId, RequestId

CHANNEL = ChannelId("1.1")
HABITS = Habits(load_s=0.0, latency_s=0.001, take_s=0.0)
"""Nothing goes wrong; a message between the orchestrator and a replica takes up to a millisecond."""

BEGIN_S = 1.0
"""When the first request may come: all replicas are ready by then."""

CHECK_EVERY = 10_000
"""The router's invariants are checked after each so many events."""


FULL = 0.95
"""A stage that computes for a larger share of the time is taken to be the bottleneck."""


MOST_REPLICAS = 256
"""So many replicas a stage may have in a search."""


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """How some seconds are spread; all 0 if there are none."""

    mean: float = 0.0
    p50: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    max: float = 0.0

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Return the spread of values."""
        ordered = sorted(values)
        if not ordered:
            return cls()
        p50, p95, p99 = (percentile(ordered, share) for share in (0.5, 0.95, 0.99))
        return cls(mean=sum(ordered) / len(ordered), p50=p50, p95=p95, p99=p99, max=ordered[-1])


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the smallest of some ascending values that so large a share of them does not exceed."""
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]


class StageLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What a stage had to do.

    Attributes:
        stage: Which.
        replicas: How many served it.
        utilisation: The share of its replicas' time that they computed while requests came.
        chunks: How many chunks they made.
        batch: How many tasks a step advanced on average.
        slot_wait_s: How long a task that had input waited for a slot; at an entry stage this is the queue.
        step_wait_s: How long a chunk waited for its step, in a replica.
        first_wait_s: The same of each task's first chunk.
    """

    stage: StageId
    replicas: int
    utilisation: float
    chunks: int
    batch: float
    slot_wait_s: Spread
    step_wait_s: Spread
    first_wait_s: Spread


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What listeners and stages went through at one load.

    Attributes:
        workload: What was asked.
        requests: How many requests came.
        finished: How many ended well.
        failed: How many were accepted and ended badly.
        refused: How many were not accepted.
        ttfa_s: From submit to the first chunk of the output, of finished requests.
        ttfas_s: Each of these times, ascending.
        interrupted: How many finished requests had an underrun.
        underrun_s: How long these were silent in the middle, each in all.
        queue_s: How long finished requests waited to be started.
        stages: Stage by stage.
        events: How many events the router handled.
    """

    workload: Workload
    requests: int
    finished: int
    failed: int
    refused: int
    ttfa_s: Spread
    ttfas_s: tuple[float, ...]
    interrupted: int
    underrun_s: Spread
    queue_s: Spread
    stages: tuple[StageLoad, ...]
    events: int

    @property
    def replicas(self) -> dict[StageId, int]:
        """Return how many replicas each stage had."""
        return {each.stage: each.replicas for each in self.stages}

    @property
    def interrupted_share(self) -> float:
        """Return the share of finished requests that had an underrun."""
        return self.interrupted / self.finished if self.finished else 0.0

    def ttfa_of_all_s(self, share: float) -> float:
        """Return a percentile of the time to first audio; a request that did not finish waited for ever."""
        missed = self.requests - len(self.ttfas_s)
        times = [*self.ttfas_s, *(math.inf for _ in range(missed))]
        return percentile(times, share) if times else 0.0


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """What a number of replicas must achieve.

    Attributes:
        ttfa_p95_s: The longest time to first audio of 95 % of all requests; others may take longer or fail.
        interrupted_share: The largest share of requests with an underrun; `None` asks for nothing.
    """

    ttfa_p95_s: float
    interrupted_share: float | None = None

    def is_met(self, report: Report) -> bool:
        """Say whether a run achieves it; a run without any request does not tell."""
        share = self.interrupted_share
        is_smooth = share is None or report.interrupted_share <= share
        return is_smooth and report.ttfa_of_all_s(0.95) <= self.ttfa_p95_s


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What a search has found.

    Attributes:
        target: What was asked for.
        is_met: The report meets it; else no number of replicas up to the bound does.
        report: With the numbers that were found, or with the bound at every stage.
        runs: How many loads were simulated.
    """

    target: Target
    is_met: bool
    report: Report
    runs: int


# ---------------------------------------------------------------------- one load


def measure(deployed: Deployment, workload: Workload) -> Report:
    """Simulate a load until its last request has ended.

    Args:
        deployed: What is served, by how many replicas.
        workload: What is asked.
    """
    end = BEGIN_S + workload.duration_s
    meters = {stage.id: Meter(BEGIN_S, end) for stage in deployed.stages}
    listeners: list[Listener] = []

    def replica(world: World, which: ReplicaId) -> TimedReplica:
        return TimedReplica(world, which, workload, meters[which.stage])

    def listener(world: World, request: RequestId, channel: ChannelId) -> Listener:
        listeners.append(Listener(world, request, channel, workload.output))
        return listeners[-1]

    world = World(
        deployed,
        seed=workload.seed,
        habits=HABITS,
        check_every=CHECK_EVERY,
        replica=replica,
        client=listener,
    )
    world.open_channel(CHANNEL)
    _plan_arrivals(world, deployed, workload)
    world.run()
    world.finish()
    return _report(world, workload, listeners, meters)


def _plan_arrivals(world: World, deployed: Deployment, workload: Workload) -> None:
    inputs = next(each.inputs for each in deployed.pipelines if each.name == workload.pipeline)
    for arrival in workload.arrivals():
        world.at(
            BEGIN_S + arrival.at_s,
            lambda units=arrival.units: _submit(world, workload, inputs, units),
        )


def _submit(world: World, workload: Workload, inputs: tuple[InputName, ...], units: int) -> None:
    world.submit(CHANNEL, workload.pipeline, inputs, units=units)


def _report(
    world: World,
    workload: Workload,
    listeners: list[Listener],
    meters: Mapping[StageId, Meter],
) -> Report:
    counters = world.router.statistics().counters
    finished = [each for each in listeners if each.is_finished]
    underruns = [each.playback.underrun_s for each in finished if each.playback.underruns]
    ttfas = sorted(
        each.playback.first_at - each.submitted_at
        for each in finished
        if each.playback.first_at is not None
    )
    return Report(
        workload=workload,
        requests=counters.received,
        finished=counters.finished,
        failed=counters.failed,
        refused=counters.rejected,
        ttfa_s=Spread.of(ttfas),
        ttfas_s=tuple(ttfas),
        interrupted=len(underruns),
        underrun_s=Spread.of(underruns),
        queue_s=Spread.of(each.queued_s for each in finished),
        stages=tuple(
            _stage_load(stage, meters[stage.id], finished, workload.duration_s)
            for stage in world.router.deployment.stages
        ),
        events=world.events.total(),
    )


def _stage_load(
    stage: StageSpec, meter: Meter, finished: list[Listener], duration_s: float
) -> StageLoad:
    return StageLoad(
        stage=stage.id,
        replicas=stage.replicas,
        utilisation=meter.busy_s / (stage.replicas * duration_s),
        chunks=meter.chunks,
        batch=meter.chunks / meter.steps if meter.steps else 0.0,
        slot_wait_s=Spread.of(each.slot_waits_s.get(stage.id, 0.0) for each in finished),
        step_wait_s=Spread.of(meter.waits_s),
        first_wait_s=Spread.of(meter.first_waits_s),
    )


# ---------------------------------------------------------------------- the search


def search(
    deployed: Deployment,
    workload: Workload,
    target: Target,
    *,
    most: int = MOST_REPLICAS,
    run: Callable[[Deployment, Workload], Report] = measure,
) -> Answer:
    """Find numbers of replicas that meet a target, of which no single one can be smaller.

    It begins with what the load keeps busy, adds replicas where first chunks wait longest until the
    target is met, and then takes from each stage in turn what it can do without.

    Args:
        deployed: What is served; its own numbers of replicas are not used.
        workload: What is asked, the same in every run.
        target: What must be achieved.
        most: How many replicas a stage may have.
        run: Simulates one load.
    """
    found = _Search(deployed, workload, target, most, run)
    return found.answer()


class _Search:
    """Remembers what was run, since growing and shrinking may come by the same numbers."""

    def __init__(
        self,
        deployed: Deployment,
        workload: Workload,
        target: Target,
        most: int,
        run: Callable[[Deployment, Workload], Report],
    ) -> None:
        self._deployed = deployed
        self._workload = workload
        self._target = target
        self._most = most
        self._run = run
        self._reports: dict[tuple[int, ...], Report] = {}
        offered = workload.offered()
        self._stages = [stage.id for stage in deployed.stages]
        # Batching may need fewer than the load keeps busy; shrinking finds out.
        self._start = {s: min(max(math.ceil(offered[s]), 1), most) for s in self._stages}

    def answer(self) -> Answer:
        report = self._at(dict.fromkeys(self._stages, self._most))
        is_met = self._target.is_met(report)
        if is_met:
            report = self._shrunk(self._grown())
        return Answer(target=self._target, is_met=is_met, report=report, runs=len(self._reports))

    def _at(self, counts: Mapping[StageId, int]) -> Report:
        key = tuple(counts[stage] for stage in self._stages)
        if key not in self._reports:
            self._reports[key] = self._run(with_replicas(self._deployed, counts), self._workload)
        return self._reports[key]

    def _grown(self) -> Report:
        """Add replicas until the target is met; at the bound it is."""
        report = self._at(self._start)
        while not self._target.is_met(report):
            counts = report.replicas
            stage = max(
                (each for each in report.stages if each.replicas < self._most), key=_pressure
            ).stage
            counts[stage] = min(counts[stage] + max(counts[stage] // 8, 1), self._most)
            report = self._at(counts)
        return report

    def _shrunk(self, report: Report) -> Report:
        """Take away what is not needed, until no stage can do with one less."""
        while True:
            smaller = report
            for stage in self._stages:
                smaller = self._least(smaller, stage)
            if smaller.replicas == report.replicas:
                return report
            report = smaller

    def _least(self, report: Report, stage: StageId) -> Report:
        """Return the run with the fewest replicas of one stage that still meets the target."""
        while report.replicas[stage] > 1:
            fewer = self._at({**report.replicas, stage: report.replicas[stage] - 1})
            if not self._target.is_met(fewer):
                break
            report = fewer
        return report


def _pressure(load: StageLoad) -> tuple[float, float]:
    """Return how much a stage holds up its tasks; a stage that can't keep up first."""
    is_full = load.utilisation > FULL
    return (
        load.utilisation if is_full else 0.0,
        load.slot_wait_s.p95 + load.first_wait_s.p95 + load.step_wait_s.mean,
    )


def with_replicas(deployed: Deployment, counts: Mapping[StageId, int]) -> Deployment:
    """Return a deployment with other numbers of replicas; stages that are not named keep theirs."""
    stages = (
        msgspec.structs.replace(stage, replicas=counts.get(stage.id, stage.replicas))
        for stage in deployed.stages
    )
    return msgspec.structs.replace(deployed, stages=tuple(stages))
