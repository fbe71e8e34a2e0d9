"""The event log: what was recorded replays to the same commands, or the first difference is shown."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from stretto.core import commands as do
from stretto.core import events as on
from stretto.core.eventlog import Record, header_line, record_line, replay
from stretto.core.router import Router
from stretto.errors import InvalidTransition
from stretto.sim.world import Habits, World
from tests.core.builders import (
    API,
    R1,
    TEXT,
    A,
    B,
    cancelled,
    diamond,
    finished,
    line_of_2,
    submitted,
)

LOGS = sorted((Path(__file__).parent / "logs").glob("*.jsonl"))


def recorded() -> list[bytes]:
    """Return the log of a short and eventful life."""
    habits = Habits(abort=0.2, death=0.03, task_failure=0.02, freeze=0.01, repetition=0.3)
    lines = [header_line(diamond())]
    world = World(
        diamond(),
        seed=4,
        habits=habits,
        observe=lambda event, commands: lines.append(record_line(event, commands)),
    )
    world.open_channel(API)
    for _ in range(8):
        world.submit(API, world.router.deployment.pipelines[0].name, (TEXT,))
    for at_s, method in enumerate(("look", "tidy", "sleep", "wake", "nothing")):
        world.after(at_s / 2, lambda method=method: world.call(API, method, timeout_s=5.0))
    world.run(until=20.0)
    world.finish()
    return lines


def test_a_log_replays_to_the_same_commands() -> None:
    """Every event class that a life has goes through JSON and back."""
    lines = recorded()
    router, divergence = replay(lines)
    assert divergence is None
    assert router.statistics().counters.received == 8


def test_the_first_different_line_is_shown() -> None:
    """A log of another build says where the two part."""
    lines = recorded()
    number = len(lines) // 2
    record = msgspec.json.decode(lines[number], type=Record)
    lines[number] = record_line(record.event, (do.Exit(),))
    _, divergence = replay(lines)
    assert divergence is not None
    assert divergence.line == number + 1
    assert divergence.logged.commands == (do.Exit(),)
    assert divergence.replayed == record


def test_a_torn_last_line_ends_the_replay() -> None:
    """A crash leaves half a line; what comes before it counts."""
    lines = recorded()
    torn = [*lines[:-1], lines[-1][:-10]]
    router, divergence = replay(torn)
    assert divergence is None
    assert router.statistics().channels == 1


def test_a_refused_event_is_replayed_as_refused() -> None:
    """The error's text is part of the record."""
    router = Router(line_of_2())
    lines = [header_line(router.deployment)]
    for event in (
        on.EngineStarted(now=0.0),
        on.ChannelOpened(now=0.0, channel=API),
        submitted(),
        cancelled(A),
        finished(B),
    ):
        try:
            lines.append(record_line(event, router.handle(event)))
        except InvalidTransition as error:
            lines.append(record_line(event, (), error.detail))
    assert sum(b'"error":"this is a bug' in line for line in lines) == 2
    _, divergence = replay(lines)
    assert divergence is None


def test_a_line_of_another_format_is_an_error() -> None:
    """A log is never half believed."""
    with pytest.raises(msgspec.ValidationError):
        replay([header_line(line_of_2()), b'{"event": {"type": "Nothing", "now": 1.0}}\n'])


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
def test_recorded_lives_of_fixed_bugs_still_replay(path: Path) -> None:
    """Each log shows a bug that was fixed; `python -m tests.replay.refresh` accepts a wanted change."""
    router, divergence = replay(path.read_bytes().splitlines(keepends=True))
    assert divergence is None
    router.check_invariants()
    assert router.story(R1) is not None
