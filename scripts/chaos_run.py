"""Streams under chaos: a random replica is killed, stopped or drained again and again, and nobody may notice.

    scripts/chaos --seconds 120 --seed 1                       # speech, 8 streams, a fault every 3 s
    scripts/chaos --pipeline scripted --streams 32 --every 1   # the same without models

Each stream runs one request after the other; each answer must equal the answer of an undisturbed engine,
byte for byte. At the end nothing may be left: no open request, no bound task, no payload, no process, no
file; and the orchestrator and this process hold as many descriptors and, within 5 %, as much memory as
after the warm-up, which is a minute of chaos. Exit code 1 says that something of this did not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import msgspec
import psutil
import uvloop

from stretto.config.loading import load_settings
from stretto.engine import Engine
from stretto.errors import InvalidRequest, StrettoError
from stretto.orchestrator.answers import Status
from stretto.transport.listening import socket_base
from stretto.transport.run_directory import RunDirectory

if TYPE_CHECKING:
    from stretto.config.settings import Settings

PROGRESS_TIMEOUT_S = 2.0
"""A stopped replica is evicted after so long; the default, 30 s, would leave most of a run without it."""

SETTLE_S = 30.0
WARM_UP_S = 60.0
"""So long before the measured time there is chaos too: allocators reach their high-water mark."""

MEMORY_TOLERANCE = 0.05

SENTENCES = (
    "The kettle sang before dawn. Nobody had asked it to!",
    "She opened the old wooden door slowly. The cold morning light filled the empty room.",
    "Was it the wind, or the old stove? By seven the whole house smelled of bread.",
    "Please call Stella and ask her to bring these things with her from the store.",
)
SCRIPT = json.dumps({"tone": {"chunks": 40, "delay_s": 0.01}, "relay": {}})


@dataclass
class Outcome:
    """What happened in a run."""

    requests: Counter[str] = field(default_factory=Counter[str])
    faults: Counter[str] = field(default_factory=Counter[str])
    problems: list[str] = field(default_factory=list[str])
    slowest_s: float = 0.0


@dataclass(frozen=True)
class Footprint:
    """What the processes that live through a run hold."""

    descriptors: tuple[int, int]
    memory: tuple[int, int]
    tasks: int
    files: int


def settings_of(pipeline: str) -> Settings:
    """Return the pipeline with two replicas a stage that are given up quickly."""
    settings = load_settings([pipeline], environ={})
    stages = tuple(
        msgspec.structs.replace(stage, replicas=2, progress_timeout_s=PROGRESS_TIMEOUT_S)
        for stage in settings.stages
    )
    return msgspec.structs.replace(settings, stages=stages)


async def answer(engine: Engine, number: int) -> bytes:
    """Return the audio of request `number`; there are a few different ones."""
    text = SENTENCES[number % len(SENTENCES)]
    audio = bytearray()
    async for chunk in engine.generate(text=text, options={"seed": number % 4, "script": SCRIPT}):
        piece = chunk.values.get("audio", b"")
        assert isinstance(piece, (bytes, memoryview))
        audio += piece
    return bytes(audio)


async def stream(
    engine: Engine, first: int, expected: list[bytes], until: float, outcome: Outcome
) -> None:
    """Run one request after the other until it is time to stop."""
    number = first
    while time.monotonic() < until:
        began = time.monotonic()
        try:
            audio = await answer(engine, number)
        except StrettoError as error:
            outcome.requests["failed"] += 1
            outcome.problems.append(f"{type(error).__name__}: {error.detail}")
        else:
            is_same = audio == expected[number % len(expected)]
            outcome.requests["identical" if is_same else "different"] += 1
            if not is_same:
                outcome.problems.append(f"request {number} differs: {len(audio)} bytes")
        outcome.slowest_s = max(outcome.slowest_s, time.monotonic() - began)
        number += 1


async def break_something(engine: Engine, chance: Random, outcome: Outcome) -> None:
    """Kill, stop or drain a random replica."""
    states = [state for view in engine.readiness.stages for state in view.replicas]
    replica = chance.choice(sorted(state.replica for state in states if state.state == "ready"))
    how = chance.choice(("kill", "stop", "drain"))
    process = process_of(f"{replica.stage}/{replica.slot}")
    if how == "drain" or process is None:
        try:
            await engine.drain(replica, replace=True)
        except InvalidRequest:
            how = "missed"  # it died at this moment
    else:
        process.send_signal(signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    outcome.faults[f"{how} {replica.stage}"] += 1


def process_of(name: str) -> psutil.Process | None:
    """Return the process that serves `stage/slot` now."""
    for child in psutil.Process().children(recursive=True):
        try:
            if child.cmdline()[-1:] == [name]:
                return child
        except psutil.NoSuchProcess:
            continue
    return None


async def disturb(
    engine: Engine, every_s: float, until: float, chance: Random, outcome: Outcome
) -> None:
    """Break something at a steady rate."""
    while time.monotonic() + every_s < until:
        await asyncio.sleep(every_s)
        if any(view.ready for view in engine.readiness.stages):
            await break_something(engine, chance, outcome)


async def settled(engine: Engine) -> Status:
    """Return the engine's status when every replica is ready and nothing is open."""
    began = time.monotonic()
    while True:
        status = msgspec.json.decode(await engine.ask("status"), type=Status)
        found = status.statistics
        is_idle = not (found.queued or found.running or found.draining or found.held_payloads)
        is_whole = all(view.ready >= view.target for view in engine.readiness.stages)
        if (is_idle and is_whole) or time.monotonic() > began + SETTLE_S:
            return status
        await asyncio.sleep(0.2)


async def footprint(engine: Engine) -> Footprint:
    """Measure what lives through the run, after one more request."""
    await answer(engine, 0)
    await settled(engine)
    here, orchestrator = psutil.Process(), psutil.Process().children()[0]
    return Footprint(
        descriptors=(here.num_fds(), orchestrator.num_fds()),
        memory=(here.memory_info().rss, orchestrator.memory_info().rss),
        tasks=len(asyncio.all_tasks()),
        files=len(payload_files(own_run())),
    )


def own_run() -> str:
    """Return the name of the run that this process owns."""
    return next(each.run for each in RunDirectory.living(socket_base()) if each.pid == os.getpid())


def payload_files(run: str) -> list[Path]:
    """Return the payload files of a run."""
    return [path for path in Path("/dev/shm").glob(f"stretto-*{run}*/*") if path.is_file()]  # noqa: S108


async def check_rest(engine: Engine, before: Footprint, outcome: Outcome) -> None:
    """Note what is left that should not be."""
    status = await settled(engine)
    found = status.statistics
    if status.open or found.queued or found.running or found.draining:
        outcome.problems.append(f"requests are open: {status.open}")
    if found.held_payloads or any(stage.bound or stage.reserved for stage in found.stages):
        outcome.problems.append(f"something is held: {found}")
    stopped = [p.pid for p in psutil.Process().children(recursive=True) if p.status() == "stopped"]
    for (
        pid
    ) in stopped:  # an idle replica that was stopped is not evicted; it goes on when it is let
        os.kill(pid, signal.SIGCONT)
    after = await footprint(engine)
    print(f"before {before}\nafter  {after}")
    if max(b - a for a, b in zip(before.descriptors, after.descriptors, strict=True)) > 0:
        outcome.problems.append("descriptors were left open")
    if after.tasks > before.tasks:
        outcome.problems.append("asyncio tasks were left")
    for name, a, b in zip(
        ("this process", "the orchestrator"), before.memory, after.memory, strict=True
    ):
        if b > a * (1 + MEMORY_TOLERANCE):
            outcome.problems.append(f"{name} grew from {a >> 20} to {b >> 20} MB")


async def run(arguments: argparse.Namespace) -> Outcome:
    """Run the whole experiment."""
    outcome = Outcome()
    async with Engine.from_pipeline(settings_of(arguments.pipeline)) as engine:
        run_name = own_run()
        await settled(engine)
        expected = [await answer(engine, number) for number in range(4)]
        chance = Random(arguments.seed)  # noqa: S311 - chaos that repeats
        warm_up_s = min(WARM_UP_S, arguments.seconds / 2)
        await chaos(engine, expected, warm_up_s, chance, arguments, outcome)
        before = await footprint(engine)
        await chaos(engine, expected, arguments.seconds, chance, arguments, outcome)
        await check_rest(engine, before, outcome)
    if left := psutil.Process().children(recursive=True):
        outcome.problems.append(f"processes were left: {left}")
    if files := payload_files(run_name):
        outcome.problems.append(f"payload files were left: {files[:3]}")
    return outcome


async def chaos(
    engine: Engine,
    expected: list[bytes],
    seconds: float,
    chance: Random,
    arguments: argparse.Namespace,
    outcome: Outcome,
) -> None:
    """Run streams under faults for some time."""
    until = time.monotonic() + seconds
    async with asyncio.TaskGroup() as group:
        group.create_task(streams(engine, expected, until, arguments.streams, outcome))
        group.create_task(disturb(engine, arguments.every, until, chance, outcome))


async def streams(
    engine: Engine, expected: list[bytes], until: float, number: int, outcome: Outcome
) -> None:
    """Run so many streams side by side."""
    async with asyncio.TaskGroup() as group:
        for n in range(number):
            group.create_task(stream(engine, n, expected, until, outcome))


def main() -> int:
    """Parse the command line, run, and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--pipeline", default="speech", choices=("speech", "scripted"))
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--every", type=float, default=3.0, help="seconds between faults")
    arguments = parser.parse_args()
    outcome = uvloop.run(run(arguments))
    print(f"requests {dict(outcome.requests)}, slowest {outcome.slowest_s:.1f} s")
    print(f"faults   {dict(sorted(outcome.faults.items()))}")
    for problem in outcome.problems[:20]:
        print(f"PROBLEM  {problem}")
    print("nobody noticed" if not outcome.problems else f"{len(outcome.problems)} problems")
    return bool(outcome.problems)


if __name__ == "__main__":
    sys.exit(main())
