"""`stretto simulate`: what a load does to listeners, how many replicas it needs, and storms of faults."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import msgspec

from stretto.cli import exits
from stretto.config.loading import load_settings
from stretto.config.mistakes import did_you_mean
from stretto.config.overrides import flag_overrides
from stretto.errors import ConfigError
from stretto.sim.capacity import Answer, Report, Spread, StageLoad, Target, measure, search
from stretto.sim.distributions import LENGTHS, distribution
from stretto.sim.picture import histogram, svg
from stretto.sim.storm import Broken, Weather, storm, storms
from stretto.sim.workload import StageModel, Workload
from stretto.types import OutputName, StageId

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from stretto.config.settings import Settings
    from stretto.core.graph import Deployment
    from stretto.sim.world import World

T = TypeVar("T")


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What the flags of a capacity run say.

    Attributes:
        rate: Requests per second.
        duration_s: For how long they come.
        length: How long a request's playback is, as it was written.
        service: Each `STAGE=DISTRIBUTION`.
        chunk: Each `STAGE=SECONDS`.
        batch_cost: Each `STAGE=SHARE`.
        replicas: Each `STAGE=N`.
        output: Which output is heard; `None` takes the pipeline's first.
        seed: Decides everything random.
        target_ttfa_p95_s: Find the numbers of replicas for this; `None` runs the given ones.
        target_underruns: The largest share of interrupted requests that they may have.
        most: How many replicas a stage may have in the search.
    """

    rate: float
    duration_s: float
    length: str
    service: Sequence[str]
    chunk: Sequence[str]
    batch_cost: Sequence[str]
    replicas: Sequence[str]
    output: str | None
    seed: int
    target_ttfa_p95_s: float | None
    target_underruns: float | None
    most: int


# ---------------------------------------------------------------------- capacity


def simulate_load(
    pipeline: str,
    environ: Mapping[str, str],
    load: Load,
    say: Callable[[str], None],
    *,
    picture: Path | None = None,
    as_json: bool = False,
) -> int:
    """Simulate a load, or search the numbers of replicas for a target; return 1 if there are none.

    Args:
        pipeline: A built-in pipeline or a YAML file.
        environ: The environment, as `stretto serve` reads it.
        load: What the flags say.
        say: Prints a line.
        picture: Where to draw the result as SVG.
        as_json: Print JSON.

    Raises:
        ConfigError: The pipeline or a flag is wrong; the text names it and what it may be.
        OSError: The picture can't be written.
    """
    overrides = flag_overrides(replicas=load.replicas)
    settings = load_settings([pipeline], environ=environ, overrides=overrides)
    workload = workload_of(settings, load)
    deployed = settings.deployment()
    target = _target(load)
    if target is None:
        _refuse_empty_stages(settings)
        report, answer = measure(deployed, workload), None
    else:
        answer = search(deployed, workload, target, most=load.most)
        report = answer.report
    if picture is not None:
        picture.write_text(svg(report, target), encoding="utf-8")
    if as_json:
        say(msgspec.json.encode(report if answer is None else answer).decode())
    else:
        _tell_report(report, say)
        if answer is not None:
            _tell_answer(answer, load, say)
    return exits.OK if answer is None or answer.is_met else exits.FAILED


def workload_of(settings: Settings, load: Load) -> Workload:
    """Return what is asked of the first pipeline.

    Raises:
        ConfigError: A flag names what is not there, or has no sensible value.
    """
    for flag, value in (("--rate", load.rate), ("--duration", load.duration_s)):
        if not 0.0 < value < float("inf"):
            raise ConfigError(f"{flag}: {value:g} is not possible; use more than 0")
    pipeline = settings.pipelines[0]
    outputs = [each.name for each in pipeline.outputs]
    output = outputs[0] if load.output is None else OutputName(load.output)
    if output not in outputs:
        raise ConfigError(f"--output: no output {output!r}{did_you_mean(output, outputs)}")
    length = distribution(load.length, "--length", LENGTHS)
    if not length.mean():
        raise ConfigError("--length: 0 is not possible; use more than 0")
    return Workload(
        pipeline=pipeline.name,
        output=output,
        rate=load.rate,
        duration_s=load.duration_s,
        length=length,
        stages=_models(settings, load),
        seed=load.seed,
    )


def _models(settings: Settings, load: Load) -> dict[StageId, StageModel]:
    stages = [stage.id for stage in settings.stages]
    service = _by_stage("--service", load.service, stages, distribution)
    chunk = _by_stage("--chunk", load.chunk, stages, _seconds)
    cost = _by_stage("--batch-cost", load.batch_cost, stages, _share)
    missing = [stage for stage in stages if stage not in service]
    if missing:
        raise ConfigError(
            f"--service: how long does a step of {', '.join(missing)} take? "
            f"Give each, for example --service {missing[0]}=lognormal:0.02,0.5"
        )
    return {
        stage.id: StageModel(
            service=service[stage.id],
            chunk_s=chunk.get(stage.id, 0.5),
            max_batch=stage.max_batch,
            batch_cost=cost.get(stage.id, 1.0),
        )
        for stage in settings.stages
    }


def _by_stage(
    flag: str, items: Sequence[str], stages: Sequence[StageId], read: Callable[[str, str], T]
) -> dict[StageId, T]:
    """Return the values of a flag that is given as `STAGE=VALUE`, by stage."""
    values: dict[StageId, T] = {}
    for item in items:
        name, equals, text = item.partition("=")
        stage = StageId(name)
        if not equals or not text:
            raise ConfigError(f"{flag} {item}: write STAGE=VALUE; stages: {', '.join(stages)}")
        if stage not in stages:
            raise ConfigError(f"{flag} {item}: no stage {name!r}{did_you_mean(name, stages)}")
        values[stage] = read(text, f"{flag} {name}")
    return values


def _seconds(text: str, where: str) -> float:
    value = _number(text, where)
    if value < 0.001:  # noqa: PLR2004 - the unit of playback is a millisecond
        raise ConfigError(f"{where}: {text} is too little; use 0.001 seconds or more")
    return value


def _share(text: str, where: str) -> float:
    value = _number(text, where)
    if value > 1.0:
        raise ConfigError(f"{where}: {text} is too much; use 0 to 1")
    return value


def _number(text: str, where: str) -> float:
    return distribution(f"constant:{text}", where, LENGTHS[:1]).numbers[0]


def _target(load: Load) -> Target | None:
    if load.target_ttfa_p95_s is None:
        if load.target_underruns is not None:
            raise ConfigError("--target-underruns: give --target-ttfa-p95 too")
        return None
    if load.target_ttfa_p95_s <= 0.0:
        raise ConfigError(
            f"--target-ttfa-p95: {load.target_ttfa_p95_s:g} is not possible; use more than 0"
        )
    return Target(ttfa_p95_s=load.target_ttfa_p95_s, interrupted_share=load.target_underruns)


def _refuse_empty_stages(settings: Settings) -> None:
    for stage in settings.stages:
        if not stage.replicas:
            raise ConfigError(
                f"--replicas: stage {stage.id} has none; give it some, "
                f"for example --replicas {stage.id}=1"
            )


def _tell_report(report: Report, say: Callable[[str], None]) -> None:
    asked = report.workload
    say(
        f"{asked.pipeline}: {asked.rate:g} requests/s of {asked.length} s for {asked.duration_s:g} s "
        f"of virtual time, seed {asked.seed}"
    )
    say(
        f"{report.requests} requests: {report.finished} finished, {report.failed} failed, "
        f"{report.refused} refused; {report.events} events"
    )
    say("")
    say(f"{'':18} {'mean':>9} {'p50':>9} {'p95':>9} {'p99':>9} {'max':>9}")
    _tell_spread("TTFA", report.ttfa_s, say)
    _tell_spread("in the queue", report.queue_s, say)
    _tell_spread("underruns", report.underrun_s, say)
    say(
        f"{report.interrupted} of {report.finished} finished requests had underruns "
        f"({report.interrupted_share:.1%}); their length is of these only"
    )
    say("")
    say(
        f"{'stage':18} {'replicas':>8} {'busy':>7} {'batch':>6} "
        f"{'slot wait p95':>14} {'first wait p95':>15} {'step wait p95':>14}"
    )
    for each in report.stages:
        _tell_stage(each, say)
    say("")
    say("time to first audio")
    for line in histogram(report.ttfas_s):
        say(line)


def _tell_spread(name: str, spread: Spread, say: Callable[[str], None]) -> None:
    numbers = (spread.mean, spread.p50, spread.p95, spread.p99, spread.max)
    say(f"{name:18} {' '.join(f'{number:7.3f} s' for number in numbers)}")


def _tell_stage(load: StageLoad, say: Callable[[str], None]) -> None:
    waits = (load.slot_wait_s, load.first_wait_s, load.step_wait_s)
    shown = [f"{each.p95:.3f} s" for each in waits]
    say(
        f"{load.stage:18} {load.replicas:8} {load.utilisation:7.1%} {load.batch:6.2f} "
        f"{shown[0]:>14} {shown[1]:>15} {shown[2]:>14}"
    )


def _tell_answer(answer: Answer, load: Load, say: Callable[[str], None]) -> None:
    wanted = f"TTFA p95 of {answer.target.ttfa_p95_s:g} s"
    if answer.target.interrupted_share is not None:
        wanted += (
            f" with underruns in at most {answer.target.interrupted_share:.1%} of the requests"
        )
    say("")
    if not answer.is_met:
        say(
            f"{wanted} is not met by {load.most} replicas of each stage, as above: "
            "the service times alone, or another bound of the file, take longer"
        )
        return
    counts = answer.report.replicas
    flags = " ".join(f"--replicas {stage}={number}" for stage, number in counts.items())
    say(f"{wanted} is met by {sum(counts.values())} replicas: {flags}")
    say(f"with one less of any stage it is not; {answer.runs} loads were simulated")


# ---------------------------------------------------------------------- storms


def simulate_storms(
    pipeline: str | None,
    environ: Mapping[str, str],
    say: Callable[[str], None],
    *,
    seeds: int,
    first: int = 0,
    as_json: bool = False,
    run: Callable[[int, Deployment | None], World] = storm,
) -> int:
    """Run storms of faults over small worlds; return 1 if one breaks its world, and print its seed.

    Args:
        pipeline: What is served; `None` takes small pipelines of every shape.
        environ: The environment, as `stretto serve` reads it.
        say: Prints a line.
        seeds: How many storms.
        first: The first one's seed.
        as_json: Print JSON.
        run: Runs one storm.

    Raises:
        ConfigError: The pipeline or a flag is wrong.
    """
    if seeds < 1:
        raise ConfigError(f"--seeds: {seeds} is not possible; use 1 or more")
    deployed = None
    if pipeline is not None:
        deployed = load_settings([pipeline], environ=environ).deployment()
    seen, broken = storms(range(first, first + seeds), deployed, run)
    if as_json:
        say(msgspec.json.encode({"seen": seen, "broken": broken}).decode())
    else:
        _tell_weather(seen, say)
        if broken is not None:
            _tell_broken(broken, pipeline, say)
    return exits.OK if broken is None else exits.FAILED


def _tell_weather(seen: Weather, say: Callable[[str], None]) -> None:
    say(
        f"{seen.worlds} storms: {seen.requests} requests and {seen.events} events "
        f"in {seen.virtual_s / 3600:.1f} hours of virtual time"
    )
    ends = ", ".join(f"{number} {name}" for name, number in seen.terminals.items())
    say(f"terminals: {ends or 'none'}")
    say(f"{seen.deaths} replicas died or were evicted, {seen.repeated} tasks were repeated")
    say(f"the invariants held after each event of {seen.worlds} worlds, and nothing was left")


def _tell_broken(broken: Broken, pipeline: str | None, say: Callable[[str], None]) -> None:
    say("")
    say(broken.trace.rstrip())
    say("")
    say(f"seed {broken.seed} breaks its world: {broken.error.splitlines()[0]}")
    named = "" if pipeline is None else f"{pipeline} "
    say(f"again: stretto simulate {named}--storm --seeds 1 --seed {broken.seed}")
