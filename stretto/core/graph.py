"""What is deployed: stages, the pipelines over them, and the subgraph that one request runs.

Everything here is immutable data plus pure functions on it. It must not know backends or processes.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import msgspec

from stretto.errors import ConfigError
from stretto.types import EdgeId, InputName, OutputName, PipelineName, Recovery, StageId

if TYPE_CHECKING:
    from collections.abc import Iterable


class EdgeMode(Enum):
    """How a source's chunks reach the consumer."""

    STREAM = "stream"  # chunk by chunk, while the source still runs
    FULL = "full"  # all of them, after the source has finished


class EdgeSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An edge from a stage, or from a request's input, to a stage.

    Attributes:
        target: The consuming stage.
        name: The input's name in the consuming stage.
        source: The producing stage; `None` if the request supplies it.
        request_input: The pipeline's input, if `source` is `None`.
        mode: Stream or full.
        adapter: `module:name` of a factory run in the consuming replica; opaque here.
        window_chunks: How many chunks may be on the way, unconsumed.
        window_bytes: How many bytes may be on the way, unconsumed; one chunk always may.
    """

    target: StageId
    name: str
    source: StageId | None = None
    request_input: InputName | None = None
    mode: EdgeMode = EdgeMode.STREAM
    adapter: str | None = None
    window_chunks: int = 16
    window_bytes: int = 4 * 1024 * 1024

    @property
    def id(self) -> EdgeId:
        """Return the edge's identity within its pipeline."""
        origin = self.source if self.source is not None else f"request.{self.request_input}"
        return EdgeId(f"{origin}->{self.target}.{self.name}")


class OutputSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A named output of a pipeline and the stage that makes it."""

    name: OutputName
    stage: StageId


class StageSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A stage as the router sees it.

    Attributes:
        id: Unique in the deployment.
        replicas: How many processes serve it.
        slots: How many tasks one replica holds at a time.
        recovery: The most that may be done with a dead replica's tasks; see `stretto.types.Recovery`.
        chunk_timeout_s: Longest silence of a running task that could go on; then its request fails.
        progress_timeout_s: Longest silence of a replica that has work; then it is evicted.
        start_timeout_s: Longest silence of a replica that starts or loads.
    """

    id: StageId
    replicas: int = 1
    slots: int = 32
    recovery: Recovery = "replay"
    chunk_timeout_s: float = 60.0
    progress_timeout_s: float = 30.0
    start_timeout_s: float = 120.0


class PipelineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A DAG of stages with named inputs and at least one output."""

    name: PipelineName
    inputs: tuple[InputName, ...]
    edges: tuple[EdgeSpec, ...]
    outputs: tuple[OutputSpec, ...]


class Limits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Bounds and deadlines of the router; all times in seconds.

    Attributes:
        max_queued: Requests that may wait per pipeline; one more is rejected.
        queue_timeout_s: Longest wait in the queue.
        input_timeout_s: Longest wait for more of an open input; closing it ends the wait.
        request_timeout_s: Longest life of a request from submit to its terminal.
        slow_client_timeout_s: Longest time without a credit from the client while output waits for one.
        cancel_timeout_s: Longest time between `CancelTask` and the task's end; then the replica is evicted.
        drain_timeout_s: Longest time that a draining replica or engine waits for its tasks.
        stage_unavailable_timeout_s: Longest wait for a stage that has no usable replica.
        retention_bytes: Payload bytes that one request may keep for full edges and for retries.
        client_window_chunks: Output chunks that may be on the way to the client, untaken.
        client_window_bytes: Output bytes that may be on the way to the client, untaken.
        respawn_min_s: First back-off after a death; doubles per death in a row.
        respawn_max_s: Largest back-off.
        breaker_deaths: So many deaths without a finished task within `breaker_window_s` park a slot.
        breaker_window_s: See `breaker_deaths`.
        breaker_rearm_s: When a parked slot is tried again.
        poison_deaths: So many deaths in a row on one task end its request.
    """

    max_queued: int = 256
    queue_timeout_s: float = 60.0
    input_timeout_s: float = 60.0
    request_timeout_s: float = 600.0
    slow_client_timeout_s: float = 30.0
    cancel_timeout_s: float = 5.0
    drain_timeout_s: float = 60.0
    stage_unavailable_timeout_s: float = 30.0
    retention_bytes: int = 64 * 1024 * 1024
    client_window_chunks: int = 64
    client_window_bytes: int = 1024 * 1024
    respawn_min_s: float = 0.1
    respawn_max_s: float = 10.0
    breaker_deaths: int = 5
    breaker_window_s: float = 60.0
    breaker_rearm_s: float = 60.0
    poison_deaths: int = 3


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """Stage pools and the pipelines over them. Build it with `validated`."""

    stages: tuple[StageSpec, ...]
    pipelines: tuple[PipelineSpec, ...]
    limits: Limits = Limits()


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The subgraph that a request runs, frozen at submit.

    Attributes:
        pipeline: Where it comes from.
        stages: In topological order.
        edges_in: Per stage, in declaration order.
        edges_out: Per stage, in declaration order.
        request_edges: Edges fed by the request's inputs.
        outputs: Per stage, the names of the outputs it makes.
        groups: Per stage, all stages that stream concurrently with it, itself included; a slot of
            each is reserved together.
        buffered: Edges whose source must never wait for the consumer: full edges, and stream edges
            that reconverge behind one.
    """

    pipeline: PipelineName
    stages: tuple[StageId, ...]
    edges_in: dict[StageId, tuple[EdgeSpec, ...]]
    edges_out: dict[StageId, tuple[EdgeSpec, ...]]
    request_edges: tuple[EdgeSpec, ...]
    outputs: dict[StageId, tuple[OutputName, ...]]
    groups: dict[StageId, tuple[StageId, ...]]
    buffered: frozenset[EdgeId]


def validated(deployment: Deployment) -> Deployment:
    """Return the deployment if it is sound.

    Raises:
        ConfigError: With every mistake, one per line.
    """
    mistakes = _stage_mistakes(deployment) + _limit_mistakes(deployment.limits)
    known = {stage.id for stage in deployment.stages}
    for pipeline in deployment.pipelines:
        mistakes += [f"pipeline {pipeline.name!r}: {text}" for text in _mistakes(pipeline, known)]
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return deployment


def _stage_mistakes(deployment: Deployment) -> list[str]:
    mistakes = _duplicates("stage", [stage.id for stage in deployment.stages])
    mistakes += _duplicates("pipeline", [pipeline.name for pipeline in deployment.pipelines])
    if not deployment.pipelines:
        mistakes.append("no pipeline: name at least one")
    used = {stage for pipeline in deployment.pipelines for stage in _stages_of(pipeline)}
    for stage in deployment.stages:
        if stage.id not in used:
            mistakes.append(f"stage {stage.id!r} is in no pipeline")
        if stage.replicas < 0:
            mistakes.append(f"stage {stage.id!r}: replicas is {stage.replicas}, use 0 or more")
        if stage.slots < 1:
            mistakes.append(f"stage {stage.id!r}: slots is {stage.slots}, use 1 or more")
        for name in ("chunk_timeout_s", "progress_timeout_s", "start_timeout_s"):
            if getattr(stage, name) <= 0:
                mistakes.append(
                    f"stage {stage.id!r}: {name} is {getattr(stage, name)}, use more than 0"
                )
    return mistakes


def _limit_mistakes(limits: Limits) -> list[str]:
    values = msgspec.structs.asdict(limits)
    return [
        f"limit {name} is {value}, use more than 0" for name, value in values.items() if value <= 0
    ]


def _mistakes(pipeline: PipelineSpec, known: set[StageId]) -> list[str]:
    mistakes = _duplicates("input", list(pipeline.inputs))
    mistakes += _duplicates("edge", [edge.id for edge in pipeline.edges])
    mistakes += _duplicates("output", [output.name for output in pipeline.outputs])
    for edge in pipeline.edges:
        mistakes += _edge_mistakes(edge, pipeline, known)
    if not pipeline.outputs:
        mistakes.append("it has no output: name at least one stage under `outputs`")
    for output in pipeline.outputs:
        if output.stage not in known:
            mistakes.append(f"output {output.name!r} names the unknown stage {output.stage!r}")
    cycle = _cycle(pipeline)
    if cycle:
        mistakes.append(f"its edges form a cycle: {' -> '.join(cycle)}")
    fed = _closure(
        {e.target for e in pipeline.edges if e.source is None}, _successors(pipeline.edges)
    )
    wanted = _closure({output.stage for output in pipeline.outputs}, _predecessors(pipeline.edges))
    for stage in sorted(_stages_of(pipeline) & known):
        if stage not in fed:
            mistakes.append(f"stage {stage!r} can't be reached from the request's inputs")
        elif stage not in wanted:
            mistakes.append(f"stage {stage!r} leads to no output")
    return mistakes


def _edge_mistakes(edge: EdgeSpec, pipeline: PipelineSpec, known: set[StageId]) -> list[str]:
    mistakes: list[str] = []
    if edge.target not in known:
        mistakes.append(f"edge {edge.id!r} leads to the unknown stage {edge.target!r}")
    if edge.source is not None and edge.source not in known:
        mistakes.append(f"edge {edge.id!r} has the unknown source {edge.source!r}")
    if edge.source is None and edge.request_input not in pipeline.inputs:
        mistakes.append(f"edge {edge.id!r} has the unknown source 'request.{edge.request_input}'")
    if edge.window_chunks < 1 or edge.window_bytes < 1:
        mistakes.append(f"edge {edge.id!r} has an empty window: use 1 or more")
    return mistakes


def _stages_of(pipeline: PipelineSpec) -> set[StageId]:
    stages = {edge.target for edge in pipeline.edges} | {
        output.stage for output in pipeline.outputs
    }
    return stages | {edge.source for edge in pipeline.edges if edge.source is not None}


def _duplicates(what: str, names: list[str]) -> list[str]:
    return [
        f"{what} {name!r} is defined twice"
        for name in sorted({n for n in names if names.count(n) > 1})
    ]


def _successors(edges: Iterable[EdgeSpec]) -> dict[StageId, list[StageId]]:
    result: dict[StageId, list[StageId]] = {}
    for edge in edges:
        if edge.source is not None:
            result.setdefault(edge.source, []).append(edge.target)
    return result


def _predecessors(edges: Iterable[EdgeSpec]) -> dict[StageId, list[StageId]]:
    result: dict[StageId, list[StageId]] = {}
    for edge in edges:
        if edge.source is not None:
            result.setdefault(edge.target, []).append(edge.source)
    return result


def _closure(start: set[StageId], step: dict[StageId, list[StageId]]) -> set[StageId]:
    """Return `start` and all that can be reached from it."""
    seen = set(start)
    todo = sorted(start)
    while todo:
        for stage in step.get(todo.pop(), ()):
            if stage not in seen:
                seen.add(stage)
                todo.append(stage)
    return seen


def _cycle(pipeline: PipelineSpec) -> list[StageId]:
    """Return the stages of one cycle, first repeated last; empty if there is none."""
    successors = _successors(pipeline.edges)
    done: set[StageId] = set()
    for start in successors:
        path: list[StageId] = []
        stack: list[tuple[StageId, bool]] = [(start, False)]
        while stack:
            stage, leaving = stack.pop()
            if leaving:
                path.pop()
                done.add(stage)
            elif stage in path:
                return [*path[path.index(stage) :], stage]
            elif stage not in done:
                path.append(stage)
                stack.append((stage, True))
                stack += [(successor, False) for successor in successors.get(stage, ())]
    return []


def induce(
    pipeline: PipelineSpec, inputs: tuple[InputName, ...], outputs: tuple[OutputName, ...]
) -> Plan | None:
    """Return the subgraph between the supplied inputs and the wanted outputs; `None` if they do not connect.

    Every wanted output must be reachable from a supplied input. A stage on the way gets those of its
    edges whose source is in the subgraph or supplied; the others do not exist for this request.
    """
    entries = {edge.target for edge in pipeline.edges if edge.request_input in inputs}
    fed = _closure(entries, _successors(pipeline.edges))
    ends = {output.stage for output in pipeline.outputs if output.name in outputs}
    members = fed & _closure(ends, _predecessors(pipeline.edges))
    if not ends or not ends <= members:
        return None
    edges = tuple(
        edge
        for edge in pipeline.edges
        if edge.target in members
        and (edge.source in members if edge.source is not None else edge.request_input in inputs)
    )
    stages = _topological(members, edges)
    return Plan(
        pipeline=pipeline.name,
        stages=stages,
        edges_in={s: tuple(e for e in edges if e.target == s) for s in stages},
        edges_out={s: tuple(e for e in edges if e.source == s) for s in stages},
        request_edges=tuple(e for e in edges if e.source is None),
        outputs={
            s: tuple(o.name for o in pipeline.outputs if o.stage == s and o.name in outputs)
            for s in stages
        },
        groups=_groups(stages, edges),
        buffered=frozenset(e.id for e in edges if _must_buffer(e, edges)),
    )


def _topological(members: set[StageId], edges: tuple[EdgeSpec, ...]) -> tuple[StageId, ...]:
    waiting = {
        s: {e.source for e in edges if e.target == s and e.source is not None} for s in members
    }
    order: list[StageId] = []
    while waiting:
        ready = sorted(stage for stage, sources in waiting.items() if sources <= set(order))
        order += ready
        for stage in ready:
            del waiting[stage]
    return tuple(order)


def _groups(
    stages: tuple[StageId, ...], edges: tuple[EdgeSpec, ...]
) -> dict[StageId, tuple[StageId, ...]]:
    """Return, per stage, the stages connected with it by stream edges."""
    together: dict[StageId, list[StageId]] = {stage: [] for stage in stages}
    for edge in edges:
        if edge.source is not None and edge.mode is EdgeMode.STREAM:
            together[edge.source].append(edge.target)
            together[edge.target].append(edge.source)
    groups = {stage: _closure({stage}, together) for stage in stages}
    return {stage: tuple(s for s in stages if s in groups[stage]) for stage in stages}


def _must_buffer(edge: EdgeSpec, edges: tuple[EdgeSpec, ...]) -> bool:
    """Say whether the edge's source must not wait for the consumer.

    A full edge never makes its source wait. A stream edge must not either if its consumer may be
    waiting for something behind a full edge that can't end while this edge's source waits:

        A ──full───► B ──┐
        └──stream──► C ──► D      C->D: D may wait for B, B for A's end, A for C, C for D

    Waiting spreads from a source upstream over stream edges. So the edge must buffer if the target can
    be reached, not by way of the source, from a full edge whose source needs a stage that would wait.
    """
    if edge.source is None or edge.mode is EdgeMode.FULL:
        return True
    would_wait = _upstream(edge.source, (e for e in edges if e.mode is EdgeMode.STREAM))
    awaited = _upstream(edge.target, (e for e in edges if e.source != edge.source))
    return any(
        full.mode is EdgeMode.FULL
        and full.source is not None
        and full.target in awaited
        and not would_wait.isdisjoint(_upstream(full.source, edges))
        for full in edges
    )


def _upstream(stage: StageId, edges: Iterable[EdgeSpec]) -> set[StageId]:
    """Return the stage and all that feed it, directly or not."""
    return _closure({stage}, _predecessors(edges))
