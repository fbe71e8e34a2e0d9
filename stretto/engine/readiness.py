"""What an engine's clients know of its stages: which replicas there are, and whether work can be done.

It follows the notices of one channel. It must not know connections.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stretto.errors import InvalidRequest, StartFailed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stretto.core.commands import ReplicaState
    from stretto.messages.link import StageFacts
    from stretto.types import ReplicaId, StageId


@dataclass(frozen=True, slots=True, kw_only=True)
class StageView:
    """One stage as it stands now.

    Attributes:
        stage: Which stage.
        target: How many replicas it is meant to have.
        ready: How many take work.
        replicas: All that are known, by slot.
        facts: What its backend declares; `None` until a replica was ready.
        has_been_ready: Whether a replica was ever ready.
    """

    stage: StageId
    target: int
    ready: int
    replicas: tuple[ReplicaState, ...]
    facts: StageFacts | None
    has_been_ready: bool


class Readiness:
    """The stages of one life of an engine, kept up to date by `replica` and `stage`."""

    def __init__(
        self, targets: Mapping[StageId, int], replicas: tuple[ReplicaState, ...] = ()
    ) -> None:
        self._targets = dict(targets)
        self._replicas: dict[StageId, dict[int, ReplicaState]] = {stage: {} for stage in targets}
        self._facts: dict[StageId, StageFacts] = {}
        self._been_ready: set[StageId] = set()
        for state in replicas:
            self.replica(state)

    def replica(self, state: ReplicaState) -> None:
        """Take note of a replica; a predecessor in its slot is forgotten, a late notice of one ignored."""
        stage, slot, incarnation = state.replica
        slots = self._replicas.setdefault(stage, {})
        if slot in slots and slots[slot].replica.incarnation > incarnation:
            return
        if state.state == "stopped":
            slots.pop(slot, None)
            return
        slots[slot] = state
        if state.state == "ready":
            self._been_ready.add(stage)

    def stage(self, stage: StageId, facts: StageFacts) -> None:
        """Take note of what a stage's backend declares."""
        self._facts[stage] = facts
        self._been_ready.add(stage)

    def target(self, stage: StageId, replicas: int) -> None:
        """Take note of how many replicas a stage is meant to have."""
        self._targets[stage] = replicas

    @property
    def stages(self) -> tuple[StageView, ...]:
        """All stages as they stand now."""
        return tuple(self._view(stage) for stage in self._replicas)

    @property
    def is_ready(self) -> bool:
        """Whether every stage has a ready replica."""
        return bool(self._replicas) and all(
            any(state.state == "ready" for state in slots.values())
            for slots in self._replicas.values()
        )

    @property
    def has_started(self) -> bool:
        """Whether every stage that is meant to have replicas has a ready one, and there is such a stage.

        Where there is none, every stage must have a replica that has joined.
        """
        if not any(self._targets.values()):
            return self.is_ready
        return all(
            not self._targets.get(stage, 0)
            or any(state.state == "ready" for state in slots.values())
            for stage, slots in self._replicas.items()
        )

    @property
    def has_been_ready(self) -> bool:
        """Whether every stage has had a ready replica: what is missing now is being replaced."""
        return bool(self._replicas) and self._been_ready >= self._replicas.keys()

    def start_failure(self) -> StartFailed | None:
        """Return why the engine can't become ready: a stage that never was has only parked replicas."""
        for stage, slots in self._replicas.items():
            states = list(slots.values())
            if stage in self._been_ready or not states or any(s.state != "parked" for s in states):
                continue
            reason = states[-1].detail or "no reason given"
            return StartFailed(f"Stage {stage!r} does not start: {reason}", where=stage)
        return None

    def describe(self) -> str:
        """Return one clause per stage that is not ready, for error texts; empty if all are."""
        return "; ".join(_clause(view) for view in self.stages if not view.ready)

    def _view(self, stage: StageId) -> StageView:
        slots = self._replicas[stage]
        states = tuple(slots[slot] for slot in sorted(slots))
        return StageView(
            stage=stage,
            target=self._targets.get(stage, 0),
            ready=sum(state.state == "ready" for state in states),
            replicas=states,
            facts=self._facts.get(stage),
            has_been_ready=stage in self._been_ready,
        )


def find_replica(name: str, known: Sequence[ReplicaId]) -> ReplicaId:
    """Return the replica that people call `stage/slot` or `stage/slot#incarnation`.

    Raises:
        InvalidRequest: There is none; the text lists those there are.
    """
    for replica in known:
        if name in (str(replica), f"{replica.stage}/{replica.slot}"):
            return replica
    raise InvalidRequest(
        f"there is no replica {name!r}; there are {', '.join(map(str, known)) or 'none'}",
        param="replica",
        code="replica_not_found",
    )


def _clause(view: StageView) -> str:
    if not view.replicas:
        return f"stage {view.stage!r} has no replica"
    state = view.replicas[0]
    detail = f" ({state.detail})" if state.detail else ""
    return f"stage {view.stage!r} is {state.state}{detail}"
