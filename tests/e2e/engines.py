"""Engines of scripted stages in real processes, for tests of what happens when something breaks."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import msgspec
import psutil

from stretto.backends.scripted import check_counter_audio, tag_of
from stretto.config.loading import load_settings
from stretto.core.graph import Limits
from stretto.engine import Engine
from stretto.errors import StrettoError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from stretto.config.settings import Settings
    from stretto.core.commands import ReplicaState
    from stretto.types import Recovery


def scripted(
    limits: Limits | None = None,
    *,
    chunk_timeout_s: float = 60.0,
    progress_timeout_s: float = 30.0,
    recovery: Recovery = "replay",
    **replicas: int,
) -> Settings:
    """Return the `scripted` pipeline (`relay` feeds `tone`) with other limits and replicas."""
    settings = load_settings(["scripted"], environ={})
    stages = tuple(
        msgspec.structs.replace(
            stage,
            replicas=replicas.get(stage.id, 1),
            chunk_timeout_s=chunk_timeout_s,
            progress_timeout_s=progress_timeout_s,
            recovery=recovery,
        )
        for stage in settings.stages
    )
    orchestrator = msgspec.structs.replace(settings.orchestrator, limits=limits or Limits())
    return msgspec.structs.replace(settings, stages=stages, orchestrator=orchestrator)


Script: TypeAlias = dict[str, dict[str, object]]
"""Fields of the script by stage."""


@dataclass
class Heard:
    """What came of one request: its audio so far, and how it ended."""

    audio: bytes = b""
    error: StrettoError | None = None
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)

    def samples(self, text: str) -> int:
        """Return how many samples came, each the next of this text's stream."""
        return check_counter_audio(self.audio, tag_of(text))


async def listen(
    engine: Engine, text: str, script: Script | None = None, heard: Heard | None = None
) -> Heard:
    """Run one request to its end; an error is part of what was heard."""
    heard = heard or Heard()
    try:
        async for chunk in engine.generate(text=text, options={"script": json.dumps(script or {})}):
            audio = chunk.values.get("audio", b"")
            assert isinstance(audio, (bytes, memoryview))
            heard.audio += bytes(audio)
            heard.has_begun.set()
    except StrettoError as error:
        heard.error = error
    heard.has_begun.set()
    return heard


def process_of(replica: str) -> psutil.Process:
    """Return the process that serves `stage/slot` of this test's engine."""
    for child in psutil.Process().children(recursive=True):
        try:
            if child.cmdline()[-1:] == [replica]:
                return child
        except psutil.NoSuchProcess:
            continue
    raise AssertionError(f"there is no process {replica}")


@asynccontextmanager
async def engine_of(settings: Settings) -> AsyncGenerator[Engine]:
    """Run an engine with all its replicas; afterwards none of its processes may be left."""
    async with Engine.from_pipeline(settings) as engine:
        await all_ready(engine)
        tree = psutil.Process().children(recursive=True)
        yield engine
    left = psutil.wait_procs(tree, timeout=5)[1]
    assert not left, f"left behind: {left}"


def coming(
    engine: Engine, accepted: Callable[[ReplicaState], bool]
) -> asyncio.Future[ReplicaState]:
    """Return a future of the next replica state that is accepted, counting from now."""
    found: asyncio.Future[ReplicaState] = asyncio.get_running_loop().create_future()

    def look(state: ReplicaState) -> None:
        if accepted(state) and not found.done():
            found.set_result(state)

    unsubscribe = engine.subscribe(look)
    found.add_done_callback(lambda _: unsubscribe())
    return found


async def in_time(future: asyncio.Future[ReplicaState]) -> ReplicaState:
    """Wait for a state, with a bound."""
    async with asyncio.timeout(20):
        return await future


async def all_ready(engine: Engine) -> None:
    """Wait until each stage has as many ready replicas as it is meant to have."""

    def is_complete(_: ReplicaState) -> bool:
        return all(view.ready == view.target for view in engine.readiness.stages)

    await in_time(coming(engine, is_complete))


async def all_idle(engine: Engine) -> None:
    """Wait until every stage is ready and nothing is in flight at this end."""
    async with asyncio.timeout(20):
        await engine.wait_ready()
    await nothing_open(engine)


async def nothing_open(engine: Engine) -> None:
    """Check that no request is known any more, after one round trip through the orchestrator."""
    await listen(engine, "a round trip")
    found = engine.statistics()
    assert found is not None
    assert (found.open_requests, found.abandoned_requests, found.waiting_aborts) == (0, 0, 0)
