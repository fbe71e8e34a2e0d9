"""Metrics add up, name nothing that a client wrote, and are all documented."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families

from stretto.core import events as on
from stretto.core.graph import Limits, StageSpec
from stretto.errors import InvalidTransition
from stretto.messages.channel import HttpDone
from stretto.observe.metrics import Metrics
from stretto.sim.world import World
from stretto.types import PipelineName
from tests.core.builders import (
    API,
    R1,
    R2,
    R3,
    TEXT,
    A,
    B,
    Checked,
    aborted,
    cancelled,
    consumed,
    died,
    failed,
    finished,
    inline,
    line_of_2,
    produced,
    replica,
    started,
    submitted,
    task,
)
from tests.repository.project import ROOT
from tests.simulation.test_world import ROUGH

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

PAGE = ROOT / "docs/reference/metrics.md"


class Observed:
    """A router whose events are counted."""

    def __init__(self, router: Checked) -> None:
        self.router = router
        self.metrics = Metrics(3)

    def feed(self, *events: on.AnyEvent) -> None:
        """Handle events as the dispatcher does."""
        for event in events:
            self.metrics.observe(event, self.router.handle(event))

    def families(self) -> dict[str, Metric]:
        """Return the families by name, as a scraper reads them."""
        text = self.metrics.render(self.router.statistics())
        return {family.name: family for family in text_string_to_metric_families(text)}

    def value(self, name: str, /, **labels: str) -> float:
        """Return one sample's value; 0 if there is none."""
        for family in self.families().values():
            for sample in family.samples:
                if sample.name == name and sample.labels == labels:
                    return sample.value
        return 0.0


def observed(limits: Limits | None = None) -> Observed:
    """Return an observed router of two stages with ready replicas."""
    return Observed(started(line_of_2(limits=limits)))


def test_a_request_is_counted_on_its_way() -> None:
    """Received, accepted, chunks, first chunks, media, finished."""
    seen = observed()
    seen.feed(
        submitted(now=1.0), produced(A, 0, now=1.1), consumed(1, now=1.1), finished(A, now=1.1)
    )
    seen.feed(produced(B, 0, now=1.3), finished(B, now=1.4))
    for outcome in ("received", "accepted", "finished"):
        assert seen.value(f"stretto_requests_{outcome}_total") == 1
    assert seen.value("stretto_chunks_total", stage="a") == 1
    assert seen.value("stretto_media_seconds_total") == 0.1
    assert seen.value("stretto_stage_first_chunk_seconds_count", stage="b") == 1
    assert seen.value("stretto_queue_wait_seconds_count") == 1
    assert seen.value("stretto_engine_epoch") == 3


def test_how_requests_end_badly_is_told_by_kind() -> None:
    """Failures by the error's class, refusals by their code, aborts as cancelled."""
    seen = observed(Limits(max_queued=1))
    seen.feed(submitted(R1), submitted(R2), submitted(R3))
    seen.feed(failed(A, request=R1), aborted(R2), cancelled(A, request=R2))
    assert seen.value("stretto_requests_failed_by_kind_total", kind="stage_error") == 1
    assert seen.value("stretto_requests_cancelled_total") == 1
    rejected = seen.value("stretto_requests_rejected_total")
    by_reason = seen.families()["stretto_requests_rejected_by_reason"].samples
    assert sum(s.value for s in by_reason if s.name.endswith("_total")) == rejected


def test_replicas_are_up_or_down_and_successors_are_counted() -> None:
    """A replica that has died is 0 until its successor is ready."""
    seen = observed()
    assert seen.value("stretto_replica_up", stage="a", replica="0") == 1
    seen.feed(died(replica(A)))
    assert seen.value("stretto_replica_up", stage="a", replica="0") == 0
    assert seen.value("stretto_replica_deaths_total") == 1
    seen.feed(on.DeadlinePassed(now=seen.router.next_deadline() or 0.0))
    assert seen.value("stretto_replica_restarts_total", stage="a") == 1


def test_http_exchanges_are_counted_as_told() -> None:
    """With and without audio."""
    metrics = Metrics(1)
    seen = Observed(started(line_of_2()))
    seen.metrics = metrics
    metrics.http_done(HttpDone("/v1/audio/speech", 200, 1.5, 0.07))
    metrics.http_done(HttpDone("other", 404, 0.001))
    assert seen.value("stretto_http_requests_total", endpoint="/v1/audio/speech", code="200") == 1
    assert seen.value("stretto_http_requests_total", endpoint="other", code="404") == 1
    assert seen.value("stretto_time_to_first_audio_seconds_count") == 1
    assert seen.value("stretto_time_to_first_audio_seconds_bucket", le="0.08") == 1
    assert seen.value("stretto_time_to_first_audio_seconds_bucket", le="0.06") == 0


def test_outcomes_add_up_after_a_storm() -> None:
    """Received is rejected or accepted; accepted is finished, failed or cancelled; gauges are zero."""
    metrics = Metrics(1)
    limits = Limits(max_queued=8, retention_bytes=6000, cancel_timeout_s=1.0)
    stages = tuple(StageSpec(id=s, slots=2, replicas=2, chunk_timeout_s=3.0) for s in (A, B))
    deployed = line_of_2(limits=limits, stages=stages)
    world = World(deployed, seed=11, habits=ROUGH, observe=metrics.observe)
    world.open_channel(API)

    def arrive() -> None:
        world.submit(API, deployed.pipelines[0].name, (TEXT,), ())

    for number in range(100):
        world.after(number * 0.05, arrive)
    world.run(until=60.0)
    world.finish()
    text = metrics.render(world.router.statistics())
    samples = {
        s.name: s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
        if not s.labels
    }
    count = {
        name: samples[f"stretto_requests_{name}_total"]
        for name in ("received", "rejected", "accepted", "finished", "failed", "cancelled")
    }
    assert count["received"] == 100
    assert count["failed"] > 0
    assert count["received"] == count["rejected"] + count["accepted"]
    assert count["accepted"] == count["finished"] + count["failed"] + count["cancelled"]
    by_kind = [
        s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
        if s.name == "stretto_requests_failed_by_kind_total"
    ]
    assert sum(by_kind) == count["failed"]
    for gauge in ("requests_queued", "requests_running", "requests_draining", "payloads_held"):
        assert samples[f"stretto_{gauge}"] == 0, gauge


def test_no_label_and_no_name_holds_what_a_client_wrote() -> None:
    """Nothing but stages, slots, codes, kinds and templates of routes."""
    seen = observed()
    seen.feed(submitted())
    labels = {
        label
        for family in seen.families().values()
        for sample in family.samples
        for label in sample.labels
    }
    assert labels <= {"stage", "replica", "version", "reason", "kind", "endpoint", "code", "le"}


def test_every_family_is_documented_with_its_type_and_labels() -> None:
    """The page has all of them, and no others."""
    listed = {
        name: (kind, frozenset(re.findall(r"`(\w+)`", labels)))
        for name, kind, labels in re.findall(
            r"^\| `(stretto_\w+)` \| (\w+) \| ([^|]*) \|", PAGE.read_text(), re.MULTILINE
        )
    }
    seen = observed()
    seen.metrics.http_done(HttpDone("other", 404, 0.001, 0.1))
    seen.feed(
        submitted(R1),
        on.ChunkProduced(now=0.0, task=task(A), seq=0, payload=inline("slow"), transfer_s=0.1),
        on.StatsReported(now=0.0, replica=replica(B), running=1, waiting=0, values={"x": 2.0}),
        consumed(1),
        produced(B, 0),
        failed(B),
        died(replica(A)),
        on.RequestSubmitted(
            now=0.0,
            channel=submitted().channel,
            request=R2,
            pipeline=PipelineName("nope"),
            inputs=(),
        ),
    )
    seen.feed(on.DeadlinePassed(now=seen.router.next_deadline() or 0.0))
    found: dict[str, tuple[str, frozenset[str]]] = {}
    for family in seen.families().values():
        if family.name.endswith("_created"):
            continue
        labels = frozenset(x for s in family.samples for x in s.labels) - {"le"}
        name = f"{family.name}_total" if family.type == "counter" else family.name
        found[name] = (family.type, labels)
    assert found == listed


def test_row_E9_a_transfer_is_counted_although_its_request_is_gone() -> None:
    """What it cost was paid; the request is looked up later, and in vain."""
    seen = observed()
    gone = on.ChunkProduced(now=0.0, task=task(B), seq=0, payload=inline("late"), transfer_s=0.25)
    seen.feed(gone)
    assert seen.value("stretto_payload_transfer_seconds_count", stage="b") == 1
    assert seen.value("stretto_payload_transfer_seconds_sum", stage="b") == 0.25
    assert seen.value("stretto_late_events_total") == 1


def test_row_M4_and_row_E21_what_a_replica_told_goes_with_it() -> None:
    """The last report is shown, until its replica has died."""
    seen = observed()
    for value in (1.0, 2.0):
        report = on.StatsReported(
            now=0.0, replica=replica(B), running=3, waiting=4, values={"kv_use": value}
        )
        seen.feed(report)
    labels = {"stage": "b", "replica": "0"}
    assert seen.value("stretto_replica_reported", **labels, name="kv_use") == 2.0
    assert seen.value("stretto_replica_reported", **labels, name="waiting") == 4.0
    seen.feed(died(replica(B)))
    assert "stretto_replica_reported" in seen.families()
    assert not seen.families()["stretto_replica_reported"].samples


def test_an_event_that_the_router_refuses_is_no_event() -> None:
    """It has no commands, so nothing is counted twice."""
    seen = observed()
    seen.feed(submitted())
    try:
        seen.router.handle(submitted())
    except InvalidTransition as error:
        seen.metrics.observe(submitted(), (), error.detail)
    assert seen.value("stretto_requests_accepted_total") == 1
