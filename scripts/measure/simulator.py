"""How long the simulator takes for 100,000 requests over 1,000 replicas that die, on one core.

.venv/bin/python -m scripts.measure.simulator [REQUESTS] [REPLICAS]

Invariants are checked after every 1,000 events and at the end.
"""

from __future__ import annotations

import resource
import sys
import time

from stretto.core.graph import Deployment, Limits, StageSpec
from stretto.sim.storm import shapes, weather_of
from stretto.sim.world import Habits, World
from stretto.types import ChannelId

CHECK_EVERY = 1000
HABITS = Habits(
    chunk_bytes=800,
    chunks_per_input=2,
    death=0.002,
    freeze=0.0001,
    boundary=0.3,
    abort=0.01,
    loss=0.3,
)
CHANNELS = tuple(ChannelId(f"1.{number}") for number in range(1, 5))
SPREAD_S = 0.0001
"""Seconds between two requests, on average, for 1,000 replicas."""


def deployed(replicas: int) -> Deployment:
    """Return a line of two stages with so many replicas in all, of two slots each."""
    line = shapes(Limits(max_queued=10_000))["line of 2"]
    stages = (StageSpec(id=stage.id, slots=2, replicas=replicas // 2) for stage in line.stages)
    return Deployment(stages=tuple(stages), pipelines=line.pipelines, limits=line.limits)


def busy_world(requests: int, replicas: int) -> World:
    """Return a world after so many requests, shut down and checked."""
    world = World(deployed(replicas), seed=1, habits=HABITS, check_every=CHECK_EVERY)
    for channel in CHANNELS:
        world.open_channel(channel)
    pipeline = world.router.deployment.pipelines[0]
    left = iter(range(requests))

    def arrive() -> None:
        if next(left, None) is not None:
            world.submit(world.random.choice(CHANNELS), pipeline.name, pipeline.inputs)
            world.after(world.upto(2000 * SPREAD_S / replicas), arrive)

    world.at(1.0, arrive)
    world.run()
    world.finish()
    return world


def main() -> None:
    """Print the figures."""
    requests = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    replicas = int(sys.argv[2]) if len(sys.argv) > 2 else 1000  # noqa: PLR2004 - the second argument
    began, cpu = time.perf_counter(), time.process_time()
    world = busy_world(requests, replicas)
    took_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    seen = weather_of(world)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{seen.requests} requests, {replicas} replicas, {seen.events} events: {seen.terminals}")
    print(f"{seen.deaths} deaths, {seen.repeated} repeated tasks, {seen.virtual_s:.1f} virtual s")
    print(f"{world.checks} checks; {took_s:.1f} s, {cpu_s:.1f} s of CPU, peak {peak:.0f} MB")


if __name__ == "__main__":
    main()
