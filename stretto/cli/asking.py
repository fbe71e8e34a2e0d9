"""`stretto ps` and `stretto story`: asks the engines that run on this machine what they are doing.

They are found by their run directories, which only their own user can enter, and asked through their
channel sockets; no HTTP is involved, so this works while the API does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from stretto.cli import exits
from stretto.engine.channel import Channel, Topic
from stretto.engine.readiness import find_replica
from stretto.errors import ConfigError, DeadlineExceeded, InvalidRequest, StrettoError
from stretto.orchestrator.answers import RequestStory, Status
from stretto.transport.listening import socket_base
from stretto.transport.run_directory import RunDirectory
from stretto.types import RunId, StageId

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

ResultT = TypeVar("ResultT")

ANSWER_S = 2.0
"""How long an engine may take to answer."""

FACTS = "server.json"
"""What a server tells about itself, in its run directory."""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What `stretto serve` writes down when it starts.

    Attributes:
        url: Where it serves HTTP.
        pipelines: What it serves.
        version: Of Stretto.
        started_at: Seconds since the epoch.
    """

    url: str = ""
    pipelines: tuple[str, ...] = ()
    version: str = ""
    started_at: float = 0.0


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One engine that runs.

    Attributes:
        run: Its identity.
        pid: Who owns it.
        facts: What its server tells; empty for an engine within a program.
        status: Its answer; `None` if it did not answer.
        problem: Why it did not.
    """

    run: RunId
    pid: int
    facts: Facts
    status: Status | None
    problem: str = ""


def write_facts(channel_path: str, facts: Facts) -> None:
    """Leave a server's facts beside its channel socket.

    Raises:
        OSError: The folder can't be written.
    """
    path = Path(channel_path).with_name(FACTS)
    path.touch(mode=0o600)  # the folder is private already
    path.write_bytes(msgspec.json.encode(facts))


def list_runs(say: Callable[[str], None], *, only: str | None = None, as_json: bool = False) -> int:
    """Print every engine of this user, its stages, and its open requests; return 1 if there is none."""
    runs = asyncio.run(_ask_all(only))
    if as_json:
        say(json.dumps(msgspec.to_builtins(runs), indent=2))
        return exits.OK if runs else exits.FAILED
    if not runs:
        say(f"no engine runs{' by that name' if only else ''}; `stretto serve` starts one")
        return exits.FAILED
    for number, run in enumerate(runs):
        if number:
            say("")
        _tell_run(run, say)
    return exits.OK


def tell_story(
    name: str, say: Callable[[str], None], *, only: str | None = None, as_json: bool = False
) -> int:
    """Print what happened to a request, by the engine's name of it or the client's.

    Raises:
        InvalidRequest: No engine knows it; the text has names that are known.
        ConfigError: No engine runs.
    """
    found, problems = asyncio.run(_ask_stories(name, only))
    if not found:
        if not problems:
            raise ConfigError("no engine runs; `stretto serve` starts one")
        raise InvalidRequest("; ".join(problems))
    if as_json:
        say(json.dumps(msgspec.to_builtins(found), indent=2))
        return exits.OK
    for number, story in enumerate(found):
        if number:
            say("")
        _tell_story(story, say)
    return exits.OK


def scale_stages(orders: Sequence[str], say: Callable[[str], None], *, only: str | None) -> int:
    """Have stages get other numbers of replicas, `stage=N` each; return when the orders are taken.

    Raises:
        ConfigError: An order has another form, or it is not clear which engine is meant.
        InvalidRequest: There is no such stage, or it can't have so many.
    """
    wanted = [_parsed(order) for order in orders]

    async def give(channel: Channel) -> None:
        for stage, replicas in wanted:
            await channel.scale(stage, replicas)

    asyncio.run(_tell_only(only, give))
    for stage, replicas in wanted:
        say(f"{stage}: {replicas} replicas wanted; `stretto ps` shows them")
    return exits.OK


def drain_replica(name: str, say: Callable[[str], None], *, only: str | None, replace: bool) -> int:
    """Have one replica, `stage/slot`, finish what it has and leave.

    Raises:
        ConfigError: It is not clear which engine is meant.
        InvalidRequest: There is no such replica.
    """

    async def give(channel: Channel) -> None:
        status = msgspec.json.decode(await channel.ask("status"), type=Status)
        known = [state.replica for state in status.replicas]
        await channel.drain(find_replica(name, known), replace=replace)

    asyncio.run(_tell_only(only, give))
    say(f"{name} finishes what it has and leaves{'; another one starts' if replace else ''}")
    return exits.OK


def _parsed(order: str) -> tuple[StageId, int]:
    stage, separator, count = order.partition("=")
    if not stage or not separator or not re.fullmatch(r"[0-9]{1,6}", count):
        raise ConfigError(f"{order!r}: write STAGE=N, for example vocoder=3")
    return StageId(stage), int(count)


async def _tell_only(only: str | None, give: Callable[[Channel], Awaitable[None]]) -> None:
    """Give orders to the one engine that runs, or to the one that is named."""
    await _with_channel(*only_engine(only), give)


# ---- asking


def only_engine(only: str | None) -> tuple[RunId, Path]:
    """Return the one engine that runs, or the one that is named: its identity and its folder.

    Raises:
        ConfigError: There is none, or there are several.
    """
    paths = _paths(only)
    if not paths:
        raise ConfigError(
            f"no engine runs{' by that name' if only else ''}; `stretto serve` starts one"
        )
    if len(paths) > 1:
        runs = ", ".join(run for run, _, _ in paths)
        raise ConfigError(f"several engines run; name one with --run: {runs}")
    run, _, path = paths[0]
    return run, path


def _paths(only: str | None) -> list[tuple[RunId, int, Path]]:
    """Return the engines of this user that live: identity, owner, folder."""
    return [
        (RunId(each.run), each.pid, Path(each.path))
        for each in RunDirectory.living(socket_base())
        if only in (None, each.run) and (Path(each.path) / "channel.sock").exists()
    ]


async def _ask_all(only: str | None) -> tuple[Run, ...]:
    return tuple(
        await asyncio.gather(*(_status_of(run, pid, path) for run, pid, path in _paths(only)))
    )


async def _status_of(run: RunId, pid: int, path: Path) -> Run:
    facts = Facts()
    with contextlib.suppress(OSError, msgspec.MsgspecError):  # an engine within a program has none
        facts = msgspec.json.decode((path / FACTS).read_bytes(), type=Facts)
    try:
        text = await _ask(run, path, "status")
    except StrettoError as error:
        return Run(run=run, pid=pid, facts=facts, status=None, problem=error.detail)
    status = msgspec.json.decode(text, type=Status)
    return Run(run=run, pid=pid, facts=facts, status=status)


async def _ask_stories(name: str, only: str | None) -> tuple[list[RequestStory], list[str]]:
    found: list[RequestStory] = []
    problems: list[str] = []
    for run, _, path in _paths(only):
        try:
            text = await _ask(run, path, "story", name)
        except StrettoError as error:
            problems.append(error.detail)
        else:
            found += msgspec.json.decode(text, type=tuple[RequestStory, ...])
    return found, problems


async def _ask(run: RunId, path: Path, topic: Topic, argument: str = "") -> str:
    """Ask one engine.

    Raises:
        DeadlineExceeded: It did not answer in time.
        StrettoError: It refused, or is just ending.
    """
    return await _with_channel(run, path, lambda channel: channel.ask(topic, argument))


async def _with_channel(
    run: RunId, path: Path, use: Callable[[Channel], Awaitable[ResultT]]
) -> ResultT:
    try:
        async with asyncio.timeout(ANSWER_S):
            channel = await Channel.connect(str(path / "channel.sock"), run=run, name="ask")
            try:
                return await use(channel)
            finally:
                await channel.aclose()
    except TimeoutError:
        raise DeadlineExceeded(
            f"it did not answer within {ANSWER_S:g} s: it starts, or it hangs"
        ) from None


# ---- telling


def _tell_run(run: Run, say: Callable[[str], None]) -> None:
    where = run.facts.url or "within a program"
    names = ", ".join(run.facts.pipelines)
    age = f", up {_age(time.time() - run.facts.started_at)}" if run.facts.started_at else ""
    say(f"run {run.run}  pid {run.pid}  {where}  {names}{age}".rstrip())
    if run.status is None:
        say(f"  {run.problem}")
        return
    found = run.status.statistics
    say(
        f"  requests: {found.queued} queued, {found.running} running; of {found.counters.accepted} accepted "
        f"{found.counters.finished} finished, {found.counters.failed} failed, "
        f"{found.counters.cancelled} cancelled; {found.counters.rejected} rejected"
    )
    details = {state.replica: state.detail for state in run.status.replicas}
    rows = [("STAGE", "REPLICA", "STATE", "TASKS", "RESTARTS", "DETAIL")]
    for stage in found.stages:
        tasks = f"{stage.bound}/{stage.capacity}"
        for replica, phase in stage.replicas:
            restarts = max(replica.incarnation - 1, 0)
            detail = details.get(replica, "")
            rows.append((stage.stage, str(replica.slot), phase, tasks, str(restarts), detail))
            tasks = ""  # of all replicas of the stage together
    table(rows, say)
    if run.status.open:
        say("")
        rows = [("REQUEST", "LABEL", "PIPELINE", "STATE", "AGE", "WAITS FOR")]
        rows += [
            (r.request, r.label, r.pipeline, r.state, _age(r.age_s), r.what)
            for r in run.status.open
        ]
        table(rows, say)


def _tell_story(story: RequestStory, say: Callable[[str], None]) -> None:
    say(f"{story.request} ({story.label})" if story.label else str(story.request))
    began = story.entries[0].at if story.entries else 0.0
    for entry in story.entries:
        times = f" x{entry.count}" if entry.count > 1 else ""
        say(f"  {(entry.at - began) * 1000:10.1f} ms  {entry.what}{times}")
    if story.waiting:
        say(f"  now: {story.waiting}")


def table(rows: Sequence[tuple[str, ...]], say: Callable[[str], None]) -> None:
    """Print rows in columns, the first row as their heads."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        say(("  " + "  ".join(cells)).rstrip())


def _age(seconds: float) -> str:
    if seconds < 60:  # noqa: PLR2004 - a minute
        return f"{seconds:.1f}s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}m{rest:02}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02}m"  # noqa: PLR2004
