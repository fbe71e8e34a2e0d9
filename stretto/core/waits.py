"""What a request waits for, since when, and how it fails when that takes too long (contract row F11).

Each wait is charged to the one who causes it: a stage without a replica, busy slots, a replica that
does not go on, or a client that does not take its output. Waits on another part of the same request
are that part's. The request's whole life has a deadline too; that one is the router's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from stretto.core.requests import Request, RequestState, Task, TaskState
from stretto.core.slots import ReplicaPhase
from stretto.errors import Failure, FailureKind

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from stretto.core.graph import Limits
    from stretto.core.slots import Pool
    from stretto.types import StageId


class Wait(NamedTuple):
    """One wait: until when, in monotonic seconds, and how the request fails then."""

    until: float
    failure: Failure


def waits_of(request: Request, pools: Mapping[StageId, Pool], limits: Limits) -> Iterator[Wait]:
    """Yield what a queued or running request waits for."""
    if request.state is RequestState.QUEUED:
        yield from _queue_waits(request, pools, limits)
        return
    yield from _input_waits(request, limits)
    for stage, task in request.tasks.items():
        if task.state is TaskState.READY:
            needed = (stage,) if task.has_reserved else request.plan.groups[stage]
            yield from _slot_waits(stage, needed, task.ready_at, pools, limits)
        elif task.state is TaskState.BOUND and not task.is_cancelled:
            yield from _progress_waits(task, pools[stage].spec.chunk_timeout_s, limits)


def _queue_waits(request: Request, pools: Mapping[StageId, Pool], limits: Limits) -> Iterator[Wait]:
    """Yield the wait for the first slots, or for the input without which none are needed."""
    ready = [task.ready_at for task in request.tasks.values() if task.state is TaskState.READY]
    if not request.is_complete:
        timeout_s = limits.queue_timeout_s
        missing = request.party_size - len(request.party)
        detail = f"{missing} of its companions did not come in {timeout_s:g} s"
        yield Wait(request.submitted_at + timeout_s, _too_long(detail, "client"))
    elif not request.is_leader:
        return  # its leader waits for both
    elif ready:
        yield from _party_waits(request, min(ready), pools, limits)
        yield from _slot_waits("queue", request.plan.stages, min(ready), pools, limits)
    else:
        yield from _input_waits(request, limits)


def _party_waits(
    request: Request, since: float, pools: Mapping[StageId, Pool], limits: Limits
) -> Iterator[Wait]:
    """Yield the wait for more slots than a stage has, of requests that only start together."""
    for stage in request.plan.stages:
        if 0 < pools[stage].capacity < request.party_size:
            detail = (
                f"it and its companions need {request.party_size} slots of stage {stage} at once, "
                f"which has {pools[stage].capacity}"
            )
            yield Wait(since + limits.queue_timeout_s, _too_long(detail, str(stage)))


def _input_waits(request: Request, limits: Limits) -> Iterator[Wait]:
    """Yield the wait for the client to send more."""
    name = request.awaited_input()
    if name is not None:
        timeout_s = limits.input_timeout_s
        detail = f"the client sent no more of input {name} for {timeout_s:g} s and did not close it"
        yield Wait(request.input_at + timeout_s, _too_long(detail, "client"))


def shortest_s(request: Request, pools: Mapping[StageId, Pool], limits: Limits) -> float:
    """Return how often a request's waits must be looked at so that none is seen too late."""
    return min(
        limits.queue_timeout_s,
        limits.slow_client_timeout_s,
        limits.input_timeout_s,
        limits.stage_unavailable_timeout_s,
        *(pools[stage].spec.chunk_timeout_s for stage in request.plan.stages),
    )


def _slot_waits(
    where: str,
    needed: tuple[StageId, ...],
    since: float,
    pools: Mapping[StageId, Pool],
    limits: Limits,
) -> Iterator[Wait]:
    """Yield the wait for slots at some stages, and the wait for each of them that is unavailable."""
    for stage in needed:
        pool = pools[stage]
        if not pool.capacity:
            timeout_s = limits.stage_unavailable_timeout_s
            yield Wait(max(since, pool.empty_since) + timeout_s, _no_replica(pool, timeout_s))
    timeout_s = limits.queue_timeout_s
    yield Wait(
        since + timeout_s, _too_long(f"no free slot in {timeout_s:g} s; the server is busy", where)
    )


def _progress_waits(task: Task, chunk_timeout_s: float, limits: Limits) -> Iterator[Wait]:
    """Yield the wait for a bound task, if its replica or the client holds it up."""
    if task.has_credit:
        if task.has_work:
            detail = f"stage {task.key.stage} made no progress for {chunk_timeout_s:g} s"
            yield Wait(task.progress_at + chunk_timeout_s, _too_long(detail, str(task.replica)))
    elif any(output.is_full for output in task.outputs):
        timeout_s = limits.slow_client_timeout_s
        detail = f"the client took nothing for {timeout_s:g} s while output was waiting"
        yield Wait(task.progress_at + timeout_s, _too_long(detail, "client"))


def _no_replica(pool: Pool, timeout_s: float) -> Failure:
    stage = pool.spec.id
    reasons = [place.reason for place in pool.replicas if place.reason]
    last = f"; the last one died: {reasons[-1]}" if reasons else ""
    if any(place.phase is ReplicaPhase.ASLEEP for place in pool.replicas):
        last = "; it sleeps until `wake` is called"
    return Failure(
        kind=FailureKind.NO_REPLICA,
        detail=f"stage {stage} had no usable replica for {timeout_s:g} s{last}",
        where=stage,
        retry_after_s=1.0,
    )


def _too_long(detail: str, where: str) -> Failure:
    return Failure(kind=FailureKind.DEADLINE_EXCEEDED, detail=detail, where=where)
