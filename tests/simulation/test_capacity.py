"""What a load does: queueing theory where it has an answer, and facts that must hold everywhere."""

from __future__ import annotations

import math
from random import Random
from typing import TYPE_CHECKING

import pytest

from stretto.core.graph import Deployment, Limits, StageSpec
from stretto.errors import ConfigError
from stretto.sim.capacity import Report, Spread, StageLoad, Target, measure, percentile, search
from stretto.sim.distributions import LENGTHS, Distribution, Kind, distribution
from stretto.sim.timed import Playback
from stretto.sim.workload import StageModel, Workload
from stretto.types import PipelineName
from tests.core.builders import (
    AUDIO,
    TEXT,
    A,
    B,
    C,
    D,
    deployment,
    diamond,
    edge,
    line_of_2,
    pipeline,
)

if TYPE_CHECKING:
    from stretto.types import StageId

FAR = Limits(
    max_queued=1_000_000,
    queue_timeout_s=1e6,
    request_timeout_s=1e6,
    slow_client_timeout_s=1e6,
)
"""No bound ends a request."""


def workload(
    stages: dict[StageId, str],
    *,
    rate: float = 10.0,
    duration_s: float = 60.0,
    length: str = "4",
    chunk_s: float = 0.5,
    max_batch: int = 1,
    batch_cost: float = 1.0,
    seed: int = 0,
) -> Workload:
    """Return what is asked, with the service times as they are written on the command line."""
    models = {
        stage: StageModel(
            service=distribution(text, stage),
            chunk_s=chunk_s,
            max_batch=max_batch,
            batch_cost=batch_cost,
        )
        for stage, text in stages.items()
    }
    return Workload(
        pipeline=PipelineName("p"),
        output=AUDIO,
        rate=rate,
        duration_s=duration_s,
        length=distribution(length, "length"),
        stages=models,
        seed=seed,
    )


def one_stage(*, replicas: int, slots: int) -> Deployment:
    """Return `text → a → audio`."""
    return deployment(
        pipeline(edge(TEXT, A), outputs=[(AUDIO, A)]),
        limits=FAR,
        stages=[StageSpec(id=A, replicas=replicas, slots=slots)],
    )


def line(a: int, b: int) -> Deployment:
    """Return `text → a ⇒ b → audio` with so many replicas."""
    stages = [StageSpec(id=A, replicas=a), StageSpec(id=B, replicas=b)]
    return line_of_2(limits=FAR, stages=stages)


class TestDistributions:
    """How long things take."""

    @pytest.mark.parametrize(
        ("text", "mean"),
        [
            ("0.02", 0.02),
            ("constant:0.02", 0.02),
            ("uniform:0.01,0.05", 0.03),
            ("exponential:0.02", 0.02),
            ("exponential:0", 0.0),
            ("lognormal:0.02,0.5", 0.02),
            ("rtf:0.1", 0.05),
        ],
    )
    def test_what_is_drawn_has_the_mean_that_is_written(self, text: str, mean: float) -> None:
        """Twenty thousand draws for chunks of half a second."""
        found = distribution(text, "x")
        random = Random(1)  # noqa: S311 - chance that repeats
        drawn = [found.draw(random, 0.5) for _ in range(20_000)]
        assert found.mean(0.5) == pytest.approx(mean)
        assert sum(drawn) / len(drawn) == pytest.approx(mean, rel=0.03)
        assert min(drawn) >= 0.0

    def test_it_is_shown_as_it_is_written(self) -> None:
        """So that a report can be repeated."""
        assert str(distribution("lognormal:0.02,0.5", "x")) == "lognormal:0.02,0.5"
        assert str(distribution("3", "x")) == "constant:3"

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "fast",
            "fast:1",
            "constant:",
            "constant:1,2",
            "constant:nan",
            "constant:inf",
            "lognormal:1",
            "uniform:2,1",
            "rtf:x",
            "-1",
        ],
    )
    def test_a_mistake_names_the_place_and_what_may_stand_there(self, text: str) -> None:
        """The text that was given is repeated."""
        with pytest.raises(
            ConfigError, match=r"--service a: .*(LOW|lognormal:MEAN,SIGMA)"
        ) as error:
            distribution(text, "--service a")
        assert repr(text) in str(error.value)

    def test_a_length_is_no_share_of_itself(self) -> None:
        """`rtf` is neither accepted nor offered."""
        with pytest.raises(ConfigError) as error:
            distribution("rtf:0.5", "--length", LENGTHS)
        assert "rtf:FACTOR" not in str(error.value)
        assert distribution("4", "--length", LENGTHS) == Distribution(Kind.CONSTANT, (4.0,))


class TestTheory:
    """Loads that have a known answer."""

    @pytest.mark.slow
    def test_one_server_and_one_line(self) -> None:
        """M/M/1: the mean time in the system is 1 / (service rate - arrival rate)."""
        asked = workload({A: "exponential:0.1"}, rate=5.0, duration_s=2000.0, length="0.5")
        report = measure(one_stage(replicas=1, slots=1000), asked)
        assert report.finished == report.requests > 9_000
        assert report.ttfa_s.mean == pytest.approx(1 / (10.0 - 5.0), rel=0.1)
        assert report.stages[0].utilisation == pytest.approx(0.5, rel=0.03)

    @pytest.mark.slow
    def test_three_servers_and_the_routers_line(self) -> None:
        """M/M/3 with one slot each: the mean wait in the queue is Erlang's.

        One such run strays from it by a tenth, so the mean of four is compared.
        """
        servers, rate, mean_s, seeds = 3, 18.0, 0.1, range(4)
        load = rate * mean_s
        full = load**servers / math.factorial(servers) / (1 - load / servers)
        waits = full / (sum(load**n / math.factorial(n) for n in range(servers)) + full)
        found = [
            measure(
                one_stage(replicas=servers, slots=1),
                workload(
                    {A: f"exponential:{mean_s}"},
                    rate=rate,
                    duration_s=300.0,
                    length="0.5",
                    seed=seed,
                ),
            ).queue_s.mean
            for seed in seeds
        ]
        assert sum(found) / len(seeds) == pytest.approx(waits / (servers / mean_s - rate), rel=0.15)

    def test_an_empty_house(self) -> None:
        """Without others, the first audio takes the service times of both stages and the way."""
        asked = workload({A: "0.1", B: "rtf:0.2"}, rate=0.1)
        report = measure(line(1, 1), asked)
        assert 0.2 <= report.ttfa_s.p50 <= 0.2 + 6 * 0.001
        assert report.interrupted == 0


class TestLoads:
    """What a report says."""

    def test_a_stage_slower_than_playback_interrupts_it(self) -> None:
        """Eight chunks of half a second that take 0.6 s each: seven times a tenth of silence."""
        report = measure(line(1, 1), workload({A: "0.01", B: "rtf:1.2"}, rate=0.05))
        assert report.interrupted == report.finished > 0
        assert report.underrun_s.p50 == pytest.approx(0.7, abs=0.01)

    def test_batching_shares_a_step(self) -> None:
        """At no cost a replica takes several times as many tasks as it can take one by one."""
        alone = workload({A: "0.001", B: "0.05"}, rate=3.0, max_batch=8)
        one_by_one = measure(line(1, 1), alone)
        batched = measure(
            line(1, 1), workload({A: "0.001", B: "0.05"}, rate=3.0, max_batch=8, batch_cost=0.0)
        )
        assert one_by_one.stages[1].utilisation > 0.9
        assert batched.stages[1].utilisation < 0.8
        assert batched.stages[1].batch > 1.2
        assert batched.ttfa_s.p95 < one_by_one.ttfa_s.p95

    def test_every_chunk_of_every_shape_is_made(self) -> None:
        """Each stage makes each request's playback, whatever its edges wait for and its chunks cover."""
        stages = dict.fromkeys((A, B, C, D), "0.001")
        asked = workload(stages, rate=1.0, duration_s=20.0, length="uniform:0.1,9", chunk_s=0.7)
        report = measure(diamond(limits=FAR), asked)
        expected = sum(math.ceil(each.units / 700) for each in asked.arrivals())
        assert [each.chunks for each in report.stages] == [expected] * 4
        assert report.finished == report.requests

    def test_what_the_limits_refuse_is_counted(self) -> None:
        """A full queue refuses, a long wait fails; both count against a target."""
        limits = Limits(max_queued=2, queue_timeout_s=5.0)
        deployed = deployment(
            pipeline(edge(TEXT, A), outputs=[(AUDIO, A)]),
            limits=limits,
            stages=[StageSpec(id=A, replicas=1, slots=1)],
        )
        report = measure(deployed, workload({A: "1"}, rate=2.0, length="2"))
        assert min(report.failed, report.refused, report.finished) > 0
        assert report.finished + report.failed + report.refused == report.requests
        assert report.ttfa_of_all_s(0.95) == math.inf
        assert not Target(ttfa_p95_s=1e9).is_met(report)

    @pytest.mark.slow
    def test_the_same_seed_gives_the_same_report(self) -> None:
        """And another one another."""
        asked = {A: "exponential:0.02", B: "rtf:0.05"}
        one, same, other = (
            measure(line(2, 2), workload(asked, seed=n, duration_s=5.0)) for n in (1, 1, 2)
        )
        assert one == same
        assert one.ttfas_s != other.ttfas_s

    @pytest.mark.slow
    def test_more_replicas_see_the_same_requests(self) -> None:
        """Arrivals, lengths and service times do not depend on the numbers of replicas."""
        service = {A: "lognormal:0.02,0.5", B: "rtf:0.05"}
        asked = workload(service, rate=5.0, length="lognormal:4,0.5")
        few, many = measure(line(2, 2), asked), measure(line(8, 8), asked)
        assert [each.chunks for each in few.stages] == [each.chunks for each in many.stages]
        busy = [[each.utilisation * each.replicas for each in one.stages] for one in (few, many)]
        assert busy[0] == pytest.approx(busy[1], rel=0.01)

    def test_playback_waits_only_for_what_is_late(self) -> None:
        """What comes early is kept for later."""
        playback = Playback()
        for at, media_s in ((1.0, 1.0), (1.1, 1.0), (3.5, 1.0), (4.5005, 1.0)):
            playback.arrived(at, media_s)
        assert playback.first_at == 1.0
        assert playback.underruns == 1
        assert playback.underrun_s == pytest.approx(0.5)

    def test_spreads(self) -> None:
        """Percentiles are values that occurred; nothing is spread over nothing."""
        assert Spread.of([]) == Spread()
        assert percentile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.0
        assert Spread.of(range(1, 101)) == Spread(mean=50.5, p50=50, p95=95, p99=99, max=100)


class TestSearch:
    """The smallest numbers of replicas."""

    @pytest.mark.slow
    def test_it_finds_numbers_of_which_none_can_be_smaller(self) -> None:
        """With one less of either stage, a run of its own misses the target."""
        asked = workload({A: "exponential:0.02", B: "rtf:0.08"}, duration_s=20.0)
        target = Target(ttfa_p95_s=0.2, interrupted_share=0.0)
        answer = search(line(1, 1), asked, target, most=16)
        found = answer.report.replicas
        assert answer.is_met
        assert target.is_met(measure(line(found[A], found[B]), asked))
        for a, b in ((found[A] - 1, found[B]), (found[A], found[B] - 1)):
            assert min(a, b) < 1 or not target.is_met(measure(line(a, b), asked))

    def test_what_no_number_meets_is_said_after_one_run(self) -> None:
        """The service times alone take longer."""
        asked = workload({A: "0.3", B: "0.3"}, rate=1.0, duration_s=5.0)
        answer = search(line(1, 1), asked, Target(ttfa_p95_s=0.5), most=8)
        assert not answer.is_met
        assert answer.runs == 1
        assert answer.report.replicas == {A: 8, B: 8}

    @pytest.mark.parametrize(("needs_a", "needs_b"), [(1, 1), (3, 1), (1, 7), (16, 16), (5, 12)])
    def test_it_goes_to_the_boundary_from_either_side(self, needs_a: int, needs_b: int) -> None:
        """Too few are added where first chunks wait, too many are taken away."""

        def run(deployed: Deployment, asked: Workload) -> Report:
            a, b = (stage.replicas for stage in deployed.stages)
            return stub(asked, {A: (a, needs_a - a), B: (b, needs_b - b)})

        asked = workload({A: "0.1", B: "0.1"}, rate=6.0, duration_s=10.0)
        answer = search(line(1, 1), asked, Target(ttfa_p95_s=0.5), most=16, run=run)
        assert answer.is_met
        assert answer.report.replicas == {A: needs_a, B: needs_b}


def stub(asked: Workload, stages: dict[StageId, tuple[int, int]]) -> Report:
    """Return a report that meets a target of half a second if no stage lacks replicas."""
    lacks = any(lack > 0 for _, lack in stages.values())
    return Report(
        workload=asked,
        requests=1,
        finished=1,
        failed=0,
        refused=0,
        ttfa_s=Spread(),
        ttfas_s=(1.0 if lacks else 0.1,),
        interrupted=0,
        underrun_s=Spread(),
        queue_s=Spread(),
        stages=tuple(
            StageLoad(
                stage=stage,
                replicas=replicas,
                utilisation=0.5,
                chunks=1,
                batch=1.0,
                slot_wait_s=Spread(),
                step_wait_s=Spread(),
                first_wait_s=Spread(p95=max(lack, 0)),
            )
            for stage, (replicas, lack) in stages.items()
        ),
        events=1,
    )
