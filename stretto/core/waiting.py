"""What an open request waits for, in words: the answer to "why is nothing happening?"."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from stretto.core.requests import Request, RequestState, Task, TaskState
from stretto.types import PipelineName, RequestId

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from stretto.core.flow import EdgeFlow
    from stretto.core.slots import Pool
    from stretto.types import StageId


class OpenRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request without an end yet.

    Attributes:
        request: The engine's name of it.
        label: The client's own name of it.
        pipeline: What it runs.
        state: `queued`, `running` or `draining`.
        age_s: Seconds since it was submitted.
        what: What it waits for, one clause per part that is not finished.
    """

    request: RequestId
    label: str
    pipeline: PipelineName
    state: str
    age_s: float
    what: str


def open_request(request: Request, pools: Mapping[StageId, Pool], now: float) -> OpenRequest:
    """Describe a request that is not done."""
    return OpenRequest(
        request=request.id,
        label=request.story.label,
        pipeline=request.plan.pipeline,
        state=request.state.value,
        age_s=now - request.submitted_at,
        what="; ".join(_clauses(request, pools, now)),
    )


def _clauses(request: Request, pools: Mapping[StageId, Pool], now: float) -> Iterator[str]:
    if request.state is RequestState.QUEUED:
        if not request.is_complete:
            yield f"waits for {request.party_size - len(request.party)} companions"
            return
        name = request.awaited_input()
        if name is not None and not any(t.state is TaskState.READY for t in request.tasks.values()):
            yield f"waits for the client to send input {name}"
            return
        yield f"queue: {_slots(request.plan.stages, pools)}"
        return
    if request.state is RequestState.DRAINING:
        held = [s for s, task in request.tasks.items() if task.state is TaskState.BOUND]
        yield f"it has ended; {_listed(held)} must confirm the cancellation"
        return
    for stage, task in request.tasks.items():
        if task.state is not TaskState.FINISHED:
            yield f"{stage}: {_task(request, task, pools, now)}"


def _task(request: Request, task: Task, pools: Mapping[StageId, Pool], now: float) -> str:
    stage = task.key.stage
    if task.state is TaskState.WAITING_INPUT:
        return f"waits for {_listed(_sources(task))} to begin"
    if task.state is TaskState.READY:
        needed = (stage,) if task.has_reserved else request.plan.groups[stage]
        return _slots(needed, pools)
    silent_s = max(now - task.progress_at, 0.0)
    if task.is_cancelled:
        return f"{task.replica} was told to stop"
    if not task.has_credit:
        return _full(task, silent_s)
    if task.has_work:
        return f"{task.replica} computes, nothing new for {silent_s:.1f} s"
    return f"waits for the next chunk of {_listed(_sources(task))}"


def _full(task: Task, silent_s: float) -> str:
    """Say who does not take what the task has made."""
    slow = [str(edge.spec.target) for edge in task.edges_out if edge.is_full]
    if any(output.is_full for output in task.outputs):
        slow.append("the client")
    return f"waits for {_listed(slow) or 'credit'} to take its chunks, for {silent_s:.1f} s"


def _slots(needed: tuple[StageId, ...], pools: Mapping[StageId, Pool]) -> str:
    missing = [stage for stage in needed if not pools[stage].capacity]
    if missing:
        return f"no ready replica of {_listed(missing)}"
    taken = [
        f"{stage} ({pools[stage].capacity} taken)" for stage in needed if pools[stage].room < 1
    ]
    return f"no free slot at {_listed(taken)}" if taken else "others are first"


def _sources(task: Task) -> list[str]:
    return [_source(edge) for edge in task.edges_in if not edge.close_sent]


def _source(edge: EdgeFlow) -> str:
    return str(edge.spec.source) if edge.spec.source is not None else "the request's input"


def _listed(names: list[str] | list[StageId]) -> str:
    return ", ".join(dict.fromkeys(names))
