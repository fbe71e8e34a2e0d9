"""Storms: small worlds in which everything goes wrong that can, each from a seed.

Replicas die, freeze, fail to start and come back; messages are delayed, lost with their link, or come
twice; clients send piece by piece, in parties, stall, abort, or vanish with their API process; operators
drain, scale, and call methods that want a replica for themselves; bursts overfill the queue. The invariants
are checked after every event. A world that ends is shut down and must leave nothing behind.
"""

from __future__ import annotations

import traceback
from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from stretto.core import events as on
from stretto.core.graph import (
    Deployment,
    EdgeMode,
    EdgeSpec,
    Limits,
    OutputSpec,
    PipelineSpec,
    StageSpec,
)
from stretto.sim.replicas import METHODS
from stretto.sim.world import Habits, World
from stretto.types import ChannelId, InputName, OutputName, PipelineName, StageId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from stretto.types import RequestId

CHANNELS = (ChannelId("1.1"), ChannelId("1.2"))
LIMITS = Limits(max_queued=6, retention_bytes=6000, cancel_timeout_s=1.0, client_window_bytes=2000)
HABITS = Habits(
    chunk_bytes=800,
    abort=0.1,
    slow_client=0.01,
    start_failure=0.1,
    task_failure=0.01,
    death=0.02,
    freeze=0.005,
    loss=0.3,
    delay=0.001,
    boundary=0.3,
    repetition=0.2,
    report=0.2,
)
"""Everything that can go wrong does; with these windows both chunks and bytes bind."""

REQUESTS = 12
BURST = 15
"""So many requests come at once in some storms: more than there are slots and places in the queue."""

CALLS = 6
"""So many methods are called in some storms."""

_A, _B, _C, _D = (StageId(name) for name in "abcd")
_TEXT = InputName("text")


class Weather(msgspec.Struct, frozen=True, kw_only=True):
    """What storms have seen.

    Attributes:
        worlds: How many there were.
        requests: How many requests they were asked.
        events: How many events their routers handled.
        virtual_s: How many seconds passed in them.
        terminals: How the requests ended, by class name of `commands`.
        deaths: Replicas that died or were evicted.
        repeated: Tasks that were repeated after a death.
    """

    worlds: int = 0
    requests: int = 0
    events: int = 0
    virtual_s: float = 0.0
    terminals: dict[str, int] = {}
    deaths: int = 0
    repeated: int = 0


class Broken(msgspec.Struct, frozen=True, kw_only=True):
    """A storm that a world did not survive.

    Attributes:
        seed: What brings it back.
        error: The type and text of what was raised.
        trace: Where.
    """

    seed: int
    error: str
    trace: str


def weather_of(world: World) -> Weather:
    """Return what one world has seen."""
    counters = world.router.statistics().counters
    return Weather(
        worlds=1,
        requests=len(world.clients),
        events=world.events.total(),
        virtual_s=world.now,
        terminals=dict(Counter(world.terminals.values())),
        deaths=counters.replica_deaths,
        repeated=counters.retried,
    )


def together(weathers: Iterable[Weather]) -> Weather:
    """Return the sum of what several worlds have seen."""
    seen = list(weathers)
    terminals: Counter[str] = Counter()
    for each in seen:
        terminals.update(each.terminals)
    return Weather(
        worlds=sum(each.worlds for each in seen),
        requests=sum(each.requests for each in seen),
        events=sum(each.events for each in seen),
        virtual_s=sum(each.virtual_s for each in seen),
        terminals=dict(sorted(terminals.items())),
        deaths=sum(each.deaths for each in seen),
        repeated=sum(each.repeated for each in seen),
    )


def storm(seed: int, deployed: Deployment | None = None) -> World:
    """Return a world after its storm, shut down and checked.

    Args:
        seed: Decides everything.
        deployed: What is served; `None` takes one of `shapes` by the seed.

    Raises:
        AssertionError: The router, or what it did to the world, contradicts itself.
        InvalidTransition: The router took something for impossible that has happened.
    """
    shape = list(shapes().values())[seed % len(shapes())] if deployed is None else deployed
    world = World(shape, seed=seed, habits=HABITS)
    for channel in CHANNELS:
        world.open_channel(channel)
    ends_at = _plan_arrivals(world)
    if world.chance(0.5):
        world.after(world.upto(ends_at), lambda: _operate(world))
    if world.chance(0.5):
        for _ in range(CALLS):
            world.after(world.upto(ends_at), lambda: _call(world))
    if world.chance(0.5):
        world.after(ends_at + 0.1, lambda: world.close_channel(CHANNELS[0]))
    world.run(until=ends_at + 30.0)
    world.finish()
    return world


def storms(
    seeds: Iterable[int],
    deployed: Deployment | None = None,
    run: Callable[[int, Deployment | None], World] = storm,
) -> tuple[Weather, Broken | None]:
    """Run the storms of some seeds until one breaks its world; return what was seen, and that one.

    Args:
        seeds: One world each.
        deployed: What is served; `None` takes one of `shapes` by the seed.
        run: Runs one storm.
    """
    seen: list[Weather] = []
    for seed in seeds:
        try:
            seen.append(weather_of(run(seed, deployed)))
        except Exception as error:  # noqa: BLE001 - a world may break in any way; its seed is told
            return together(seen), Broken(
                seed=seed,
                error=f"{type(error).__name__}: {error}",
                trace=traceback.format_exc(),
            )
    return together(seen), None


def _plan_arrivals(world: World) -> float:
    """Let requests come one by one and, in some storms, many at once; return when the last has come."""
    at_s = 0.0
    for _ in range(REQUESTS):
        at_s += world.upto(0.3)
        world.after(at_s, lambda: _arrive(world))
    if world.chance(0.3):
        burst_at = world.upto(at_s)
        for _ in range(BURST):
            world.after(burst_at, lambda: _arrive(world))
    return at_s


def _arrive(world: World) -> None:
    pipeline = world.random.choice(world.router.deployment.pipelines)
    outputs = () if world.chance(0.5) else (world.random.choice(pipeline.outputs).name,)
    is_open = world.chance(0.3)
    companions = world.random.randint(1, 2) if world.chance(0.2) else 0
    channel = world.random.choice(CHANNELS)

    def submit(companion_of: RequestId | None = None) -> RequestId:
        request = world.submit(
            channel,
            pipeline.name,
            pipeline.inputs,
            outputs,
            is_open=is_open,
            companions=0 if companion_of else companions,
            companion_of=companion_of,
        )
        if is_open:
            for name in pipeline.inputs:
                _plan_input(world, request, name)
        return request

    leader = submit()

    def accompany() -> None:
        if not world.clients[leader].is_gone:
            submit(leader)

    for _ in range(companions):
        if world.chance(0.9):
            world.after(world.upto(0.2), accompany)


def _plan_input(world: World, request: RequestId, name: InputName) -> None:
    """Let some more of an open input come, and its end, unless the client forgets it."""
    at_s = 0.0
    for _ in range(world.random.randrange(4)):
        at_s += world.upto(0.5)
        world.after(at_s, lambda: world.append(request, name))
    if world.chance(0.9):
        world.after(at_s + world.upto(0.5), lambda: world.close_input(request, name))


def _operate(world: World) -> None:
    """Drain a replica and scale every stage."""
    which = world.random.choice(list(world.replicas))
    replace = world.chance(0.5)
    world.tell(on.DrainRequested(now=world.now, replica=which, replace=replace))
    for stage in world.router.deployment.stages:
        number = world.random.randint(1, 3)
        world.tell(on.ScaleRequested(now=world.now, stage=stage.id, replicas=number))


def _call(world: World) -> None:
    """Have a method called at the replicas of one stage, or of all."""
    which = () if world.chance(0.5) else (world.random.choice(world.router.deployment.stages).id,)
    method, _ = world.random.choice(METHODS)
    world.call(world.random.choice(CHANNELS), method, which, timeout_s=world.upto(5.0))


# ---------------------------------------------------------------------- what is stormed


def shapes(limits: Limits = LIMITS) -> dict[str, Deployment]:
    """Return small deployments of every shape: lines, a diamond, and two pipelines over shared stages."""
    words, audio = OutputName("words"), OutputName("audio")
    line = (_edge(None, _A), _edge(_A, _B))
    diamond = (
        _edge(None, _A),
        _edge(_A, _B, EdgeMode.FULL),
        _edge(_A, _C),
        _edge(_B, _D, name="left"),
        _edge(_C, _D, name="right"),
    )
    chat = _pipeline("chat", line, {words: _A, audio: _B})
    speech = _pipeline("speech", (_edge(None, _B),), {audio: _B})
    return {
        "line of 2": _deployment(limits, _pipeline("p", line, {audio: _B})),
        "line of 3": _deployment(limits, _pipeline("p", (*line, _edge(_B, _C)), {audio: _C})),
        "diamond": _deployment(limits, _pipeline("p", diamond, {audio: _D})),
        "shared": _deployment(limits, chat, speech),
    }


def _edge(
    source: StageId | None, target: StageId, mode: EdgeMode = EdgeMode.STREAM, name: str = "in"
) -> EdgeSpec:
    return EdgeSpec(
        target=target,
        name=name,
        source=source,
        request_input=_TEXT if source is None else None,
        mode=mode,
        window_chunks=4,
        window_bytes=1000,
    )


def _pipeline(
    name: str, edges: tuple[EdgeSpec, ...], outputs: dict[OutputName, StageId]
) -> PipelineSpec:
    return PipelineSpec(
        name=PipelineName(name),
        inputs=(_TEXT,),
        edges=edges,
        outputs=tuple(OutputSpec(name=output, stage=stage) for output, stage in outputs.items()),
    )


def _deployment(limits: Limits, *pipelines: PipelineSpec) -> Deployment:
    used = dict.fromkeys(edge.target for pipeline in pipelines for edge in pipeline.edges)
    stages = (StageSpec(id=stage, slots=2, replicas=2, chunk_timeout_s=3.0) for stage in used)
    return Deployment(stages=tuple(stages), pipelines=pipelines, limits=limits)
