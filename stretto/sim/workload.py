"""What is asked of a pipeline, and how quickly its stages work: the question that a capacity run answers.

Lengths are in playback: a request is some seconds long, a chunk of a stage covers some of them.
Requests come independently of each other (Poisson), whether or not earlier ones have ended.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from stretto.sim.distributions import Distribution, Kind
from stretto.types import OutputName, PipelineName, StageId

if TYPE_CHECKING:
    from collections.abc import Iterator

UNITS_PER_S = 1000
"""Simulated stages count playback in milliseconds."""


class StageModel(msgspec.Struct, frozen=True, kw_only=True):
    """How a stage's replicas work: one step at a time, each step one chunk for some tasks.

    Attributes:
        service: How long a step for one task takes.
        chunk_s: How much playback a chunk covers.
        max_batch: How many tasks a step advances at most.
        batch_cost: What a task adds to a step for a longer one, as a share of its own step: at 1 batching
            saves nothing, at 0 a step takes as long as the longest of its tasks alone.
    """

    service: Distribution
    chunk_s: float = 0.5
    max_batch: int = 8
    batch_cost: float = 1.0

    @property
    def chunk_units(self) -> int:
        """Return the playback of a chunk in units."""
        return max(round(self.chunk_s * UNITS_PER_S), 1)

    def step_s(self, alone_s: list[float]) -> float:
        """Return how long a step takes whose tasks would take so long alone."""
        longest = max(alone_s)
        return longest + self.batch_cost * (sum(alone_s) - longest)


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked.

    Attributes:
        pipeline: Of what.
        output: Which output the listener hears.
        rate: Requests per second, on average.
        duration_s: For how long they come.
        length: How many seconds of playback a request is.
        stages: How each stage works.
        seed: Decides arrivals, lengths and service times, whatever the numbers of replicas are.
    """

    pipeline: PipelineName
    output: OutputName
    rate: float
    duration_s: float
    length: Distribution = Distribution(Kind.LOGNORMAL, (6.0, 0.5))
    stages: dict[StageId, StageModel]
    seed: int = 0

    def offered(self) -> dict[StageId, float]:
        """Return how many replicas of each stage the work would keep busy on average, without batching."""
        drawn = [each.units for each in self.arrivals()]
        busy: dict[StageId, float] = {}
        for stage, model in self.stages.items():
            step_s = model.service.mean(model.chunk_units / UNITS_PER_S)
            chunks = sum(-(-units // model.chunk_units) for units in drawn)
            busy[stage] = chunks * step_s / self.duration_s
        return busy

    def arrivals(self) -> Iterator[Arrival]:
        """Yield the requests in the order of their coming."""
        random = Random(self.seed)  # noqa: S311 - a simulation wants chance that repeats
        at_s = random.expovariate(self.rate)
        while at_s < self.duration_s:
            yield Arrival(at_s, max(round(self.length.draw(random) * UNITS_PER_S), 1))
            at_s += random.expovariate(self.rate)


class Arrival(NamedTuple):
    """A request that comes: after how many seconds, and how long it is in units."""

    at_s: float
    units: int
