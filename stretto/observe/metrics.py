"""The metrics of a whole server, kept by the orchestrator: one registry, one owner.

What the router decides is counted here from its events and commands; what it knows anyway is read from
its statistics when somebody asks. API processes report each HTTP exchange with a message that travels with
others. So `/metrics` of any API process answers for all of them, and nothing is lost with one that dies.

No label holds anything that a client wrote.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from stretto.core import commands as do
from stretto.core import events as on

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.metrics_core import Metric

    from stretto.core.commands import AnyCommand
    from stretto.core.events import AnyEvent
    from stretto.core.router import Statistics
    from stretto.messages.channel import HttpDone
    from stretto.types import StageId

FIRST_AUDIO_BUCKETS = (
    *(0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.125, 0.15, 0.2, 0.25),
    *(0.35, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0),
)
"""Seconds; fine below a quarter of a second, where people begin to notice."""

WAIT_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

DURATION_BUCKETS = (
    0.01,
    0.02,
    0.04,
    0.08,
    0.16,
    0.32,
    0.64,
    1.28,
    2.56,
    5.12,
    10.24,
    20.48,
    40.96,
    81.92,
)


_RARE = (do.Fail, do.Reject, do.StartReplica)


class Metrics:
    """Observes the dispatcher; see the module.

    Args:
        epoch: Which life of the orchestrator this is.
    """

    def __init__(self, epoch: int) -> None:
        self._registry = registry = CollectorRegistry()
        self._statistics: Statistics | None = None
        self._epoch = epoch
        registry.register(_Snapshot(self))
        self._rejected = Counter(
            "stretto_requests_rejected_by_reason",
            "Requests that were not accepted, by the reason's code.",
            ["reason"],
            registry=registry,
        )
        self._failed = Counter(
            "stretto_requests_failed_by_kind",
            "Accepted requests that failed, by the class of the error.",
            ["kind"],
            registry=registry,
        )
        self._restarts = Counter(
            "stretto_replica_restarts",
            "Replicas started in place of one that has ended.",
            ["stage"],
            registry=registry,
        )
        self._queue_wait = Histogram(
            "stretto_queue_wait_seconds",
            "From submit to the first reserved slot, of requests with output.",
            buckets=WAIT_BUCKETS,
            registry=registry,
        )
        self._first_chunk = Histogram(
            "stretto_stage_first_chunk_seconds",
            "From a task's dispatch to its first chunk.",
            ["stage"],
            buckets=WAIT_BUCKETS,
            registry=registry,
        )
        self._transfer = Histogram(
            "stretto_payload_transfer_seconds",
            "How long a replica waited for the payloads that a chunk was made of.",
            ["stage"],
            buckets=WAIT_BUCKETS,
            registry=registry,
        )
        self._http = Counter(
            "stretto_http_requests",
            "HTTP exchanges that have ended; 499 is a client that left.",
            ["endpoint", "code"],
            registry=registry,
        )
        self._http_duration = Histogram(
            "stretto_http_request_duration_seconds",
            "From the request's head to the end of the response.",
            ["endpoint"],
            buckets=DURATION_BUCKETS,
            registry=registry,
        )
        self._first_audio = Histogram(
            "stretto_time_to_first_audio_seconds",
            "From the request's head to the first audio of its response.",
            buckets=FIRST_AUDIO_BUCKETS,
            registry=registry,
        )
        self._version = version("stretto")
        self._chunks: dict[StageId, int] = {}
        self._media_s = 0.0

    # ---- what it is told

    def observe(
        self, event: AnyEvent, commands: tuple[AnyCommand, ...], error: str | None = None
    ) -> None:
        """Count an event and the router's answer."""
        del error
        # On the way of every chunk: plain numbers and comparisons of types, a few hundred ns.
        if type(event) is on.ChunkProduced:
            stage = event.task.stage
            self._chunks[stage] = self._chunks.get(stage, 0) + 1
            if event.transfer_s:  # also of a request that is gone: what it cost was paid
                self._transfer.labels(stage).observe(event.transfer_s)
        for command in commands:
            if type(command) is do.Emit:
                self._emitted(command)
            elif type(command) in _RARE:
                self._count(command)

    def flush(self) -> None:
        """Nothing is kept back."""

    def http_done(self, message: HttpDone) -> None:
        """Count an HTTP exchange."""
        self._http.labels(message.endpoint, str(message.code)).inc()
        self._http_duration.labels(message.endpoint).observe(message.duration_s)
        if message.first_audio_s is not None:
            self._first_audio.observe(message.first_audio_s)

    # ---- what it tells

    def render(self, statistics: Statistics) -> str:
        """Return all families in Prometheus' text format."""
        self._statistics = statistics
        return generate_latest(self._registry).decode()

    def snapshot(self) -> Iterator[Metric]:
        """Yield what is read from the router's statistics."""
        yield _labelled("stretto_build_info", "Always 1.", "version", {self._version: 1})
        yield GaugeMetricFamily(
            "stretto_engine_epoch", "Which life of the orchestrator this is.", self._epoch
        )
        chunks = CounterMetricFamily(
            "stretto_chunks", "Chunks that a stage has produced.", labels=["stage"]
        )
        for stage, number in self._chunks.items():
            chunks.add_metric([stage], number)
        yield chunks
        yield CounterMetricFamily(
            "stretto_media_seconds", "Playing time sent to clients.", self._media_s
        )
        if self._statistics is not None:
            yield from _counters(self._statistics)
            yield from _gauges(self._statistics)

    def _emitted(self, command: do.Emit) -> None:
        self._media_s += command.media_s
        if command.timings is not None:
            self._queue_wait.observe(command.timings.queued_s)
            for timing in command.timings.stages:
                if timing.first_chunk_s is not None:
                    self._first_chunk.labels(timing.stage).observe(timing.first_chunk_s)

    def _count(self, command: AnyCommand) -> None:
        match command:
            case do.Fail(failure=failure):
                self._failed.labels(failure.kind.value).inc()
            case do.Reject(failure=failure):
                self._rejected.labels(failure.code or failure.kind.value).inc()
            case do.StartReplica(replica=replica) if replica.incarnation > 1:
                self._restarts.labels(replica.stage).inc()
            case _:
                pass


class _Snapshot:
    """Collects what is known only when somebody asks."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """Yield the families of this moment."""
        return self._metrics.snapshot()


def _counters(statistics: Statistics) -> Iterator[Metric]:
    counters = statistics.counters
    for name, meaning in (
        ("received", "Requests that API processes have submitted."),
        ("rejected", "Requests that were not accepted."),
        ("accepted", "Requests that were accepted: each ends in one of the next three ways."),
        ("finished", "Accepted requests that finished."),
        ("failed", "Accepted requests that failed."),
        ("cancelled", "Accepted requests that were aborted."),
    ):
        yield CounterMetricFamily(f"stretto_requests_{name}", meaning, getattr(counters, name))
    yield CounterMetricFamily("stretto_retries", "Tasks that were repeated.", counters.retried)
    yield CounterMetricFamily(
        "stretto_late_events", "Messages about what had ended before.", counters.late
    )
    yield CounterMetricFamily(
        "stretto_replica_deaths", "Replicas that have died.", counters.replica_deaths
    )


def _gauges(statistics: Statistics) -> Iterator[Metric]:
    for name, meaning, value in (
        ("requests_queued", "Requests that wait for their first slots.", statistics.queued),
        ("requests_running", "Requests that run.", statistics.running),
        (
            "requests_draining",
            "Ended requests with a cancellation to be confirmed.",
            statistics.draining,
        ),
        ("payloads_held", "Payloads that somebody holds.", statistics.held_payloads),
        ("channels", "API processes and other clients.", statistics.channels),
        ("calls_open", "Calls that wait for answers of replicas.", statistics.calls),
    ):
        yield GaugeMetricFamily(f"stretto_{name}", meaning, value)
    stages = statistics.stages
    yield _labelled(
        "stretto_stage_slots",
        "Tasks that the ready replicas of a stage hold at most.",
        "stage",
        {stage.stage: stage.capacity for stage in stages},
    )
    yield _labelled(
        "stretto_stage_tasks",
        "Tasks that are bound to a replica.",
        "stage",
        {stage.stage: stage.bound for stage in stages},
    )
    yield _labelled(
        "stretto_stage_reserved",
        "Slots that are promised to requests.",
        "stage",
        {stage.stage: stage.reserved for stage in stages},
    )
    up = GaugeMetricFamily(
        "stretto_replica_up", "1 if the replica is ready.", labels=["stage", "replica"]
    )
    for stage in stages:
        for replica, phase in stage.replicas:
            up.add_metric([replica.stage, str(replica.slot)], float(phase == "ready"))
    yield up
    reported = GaugeMetricFamily(
        "stretto_replica_reported",
        "What a replica's backend told last, by its own names; `running` and `waiting` are its tasks.",
        labels=["stage", "replica", "name"],
    )
    for stage in stages:
        for each in stage.reported:
            tasks = {"running": float(each.running), "waiting": float(each.waiting)}
            for name, value in (tasks | each.values).items():
                reported.add_metric([stage.stage, str(each.replica.slot), name], value)
    yield reported


def _labelled(name: str, meaning: str, label: str, values: dict[str, int]) -> Metric:
    family = GaugeMetricFamily(name, meaning, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
