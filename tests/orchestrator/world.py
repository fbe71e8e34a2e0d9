"""An orchestrator in the test's own loop, with fake replicas and a real channel client."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stretto.config.process_specs import OrchestratorSpec
from stretto.config.settings import OrchestratorSettings, ServerSettings, Settings, StageSettings
from stretto.core.graph import EdgeSpec, Limits, OutputSpec, PipelineSpec
from stretto.engine.channel import Channel
from stretto.orchestrator.shell import Orchestrator
from stretto.transport.listening import listen_unix
from stretto.types import InputName, OutputName, PipelineName, RunId, StageId
from tests.support.fake_replica import FakeLauncher

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

A, B = StageId("a"), StageId("b")


def two_stages(limits: Limits | None = None, replicas: int = 1) -> Settings:
    """Return `text -> a -> b -> audio`."""
    return Settings(
        stages=(
            StageSettings(id=A, backend="scripted", replicas=replicas),
            StageSettings(id=B, backend="scripted", replicas=replicas),
        ),
        pipelines=(
            PipelineSpec(
                name=PipelineName("line"),
                inputs=(InputName("text"),),
                edges=(
                    EdgeSpec(target=A, name="text", request_input=InputName("text")),
                    EdgeSpec(target=B, name="chunks", source=A),
                ),
                outputs=(OutputSpec(name=OutputName("audio"), stage=B),),
            ),
        ),
        orchestrator=OrchestratorSettings(limits=limits or Limits()),
        server=ServerSettings(drain_timeout_s=0.1),
    )


@dataclass
class World:
    """What a test holds of a running orchestrator."""

    orchestrator: Orchestrator
    launcher: FakeLauncher
    channel: Channel
    channel_path: str
    run: RunId
    ended: asyncio.Task[int]

    async def connect(self, name: str = "second") -> Channel:
        """Open one more channel."""
        return await Channel.connect(self.channel_path, run=self.run, name=name)


@asynccontextmanager
async def running(
    folder: Path,
    settings: Settings | None = None,
    launcher: FakeLauncher | None = None,
    shared_memory_dir: str | None = None,
    join_fd: int | None = None,
) -> AsyncGenerator[World]:
    """Run an orchestrator until the block ends, then shut it down."""
    run = RunId("test")
    path = str(folder / "channel.sock")
    listener = listen_unix(path)
    launcher = launcher or FakeLauncher()
    orchestrator = Orchestrator(
        OrchestratorSpec(
            run=run,
            epoch=1,
            channel_fd=listener.detach(),
            run_directory=str(folder),
            shared_memory_dir=shared_memory_dir,
            settings=settings or two_stages(),
            join_fd=join_fd,
        ),
        launcher,
    )
    ended = asyncio.create_task(orchestrator.run())
    channel = await Channel.connect(path, run=run, name="test")
    try:
        yield World(orchestrator, launcher, channel, path, run, ended)
    finally:
        orchestrator.shut_down()
        async with asyncio.timeout(20):
            await ended
        await channel.aclose()
