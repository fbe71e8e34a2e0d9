"""The one frozen configuration object, and how it splits into what the router and the replicas need.

It travels to child processes as JSON (`msgspec.json`). Loading and checking files is `config.loading`.
"""

from __future__ import annotations

import msgspec

from stretto.core.graph import Deployment, Limits, PipelineSpec, StageSpec
from stretto.types import Recovery, StageId

TOKEN_VARIABLE = "STRETTO_ORCHESTRATOR__JOIN_TOKEN"  # noqa: S105 - a name, no secret
"""Gives a server, and those who join it, their common token."""

MIN_TOKEN_CHARS = 16


class StageSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How one stage is run.

    Attributes:
        id: The stage.
        backend: `module:Class`, or a built-in name such as `scripted`.
        options: Keyword arguments of the backend.
        replicas: How many processes serve it.
        slots: How many tasks one replica holds at a time.
        max_batch: How many tasks one step advances at most.
        max_wait_ms: How long a step may wait for more tasks to batch; 0 steps at once.
        threads: Compute threads of one replica (BLAS, OpenMP, ONNX Runtime).
        device: Where it computes: `cpu`, `cuda`, or `cuda:N` for the N-th GPU. Others are hidden from it.
        memory_bytes: Most memory that one replica may allocate; `null` sets no limit.
        recovery: The most that may be done with tasks of a replica that died: `fail` never repeats one,
            `retry` repeats one of which nothing was forwarded, `replay` also goes on behind what was.
        chunk_timeout_s: Longest silence of a running task that could go on, in seconds; then its
            request fails.
        progress_timeout_s: Longest silence of a replica that has work, in seconds; then it is killed
            and its tasks go elsewhere. It gets no new ones after a third of that.
        start_timeout_s: Longest silence of a loading replica, in seconds.
        shared_memory_bytes: Budget for payload files of one replica; beyond it payloads go inline.
        environment: Variables added to the replica's environment.
    """

    id: StageId
    backend: str
    options: dict[str, object] = {}
    replicas: int = 1
    slots: int = 32
    max_batch: int = 8
    max_wait_ms: float = 0.0
    threads: int = 1
    device: str = "cpu"
    memory_bytes: int | None = None
    recovery: Recovery = "replay"
    chunk_timeout_s: float = 60.0
    progress_timeout_s: float = 30.0
    start_timeout_s: float = 120.0
    shared_memory_bytes: int = 256 * 1024 * 1024
    environment: dict[str, str] = {}

    def router_spec(self) -> StageSpec:
        """Return what the router needs to know."""
        return StageSpec(
            id=self.id,
            replicas=self.replicas,
            slots=self.slots,
            recovery=self.recovery,
            chunk_timeout_s=self.chunk_timeout_s,
            progress_timeout_s=self.progress_timeout_s,
            start_timeout_s=self.start_timeout_s,
        )


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The HTTP edge.

    Attributes:
        host: Address to bind; the default is reachable from this machine only.
        port: TCP port; 0 takes a free one.
        api_processes: How many processes serve HTTP, each with a channel of its own.
        drain_timeout_s: How long SIGTERM waits for running requests, in seconds.
        receive_timeout_s: How long a client may pause while it sends a request, in seconds.
        max_body_bytes: Larger request bodies are refused before they are read.
        max_input_chars: Longer speech inputs are refused.
        first_chunk_timeout_s: How long a response may wait for its first audio, in seconds.
        admin_key: What `/admin` routes ask for; without it they are closed.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_processes: int = 1
    drain_timeout_s: float = 8.0
    receive_timeout_s: float = 30.0
    max_body_bytes: int = 1024 * 1024
    max_input_chars: int = 50_000
    first_chunk_timeout_s: float = 60.0
    admin_key: str = ""


class OrchestratorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The orchestrator process.

    Attributes:
        limits: Bounds and deadlines of the router.
        event_log: Where to write the JSON-lines event log; `None` writes none.
        restart: Start a new epoch when the orchestrator dies.
        join_address: Where replicas from other hosts may join, as `host:port`; `null` lets none join.
        join_token: What they must know, at least 16 characters; `config show` hides it.
        join_silence_s: After how much silence of its host a replica that has joined is taken for gone.
    """

    limits: Limits = Limits()
    event_log: str | None = None
    restart: bool = True
    join_address: str | None = None
    join_token: str = ""
    join_silence_s: float = 6.0

    def join_mistake(self) -> str | None:
        """Return why no replica may join, if an address for that is set; `None` if all is well."""
        if self.join_address is None or len(self.join_token) >= MIN_TOKEN_CHARS:
            return None
        what = "is too short" if self.join_token else "is missing"
        return (
            f"orchestrator.join_address is set, but the token {what}: give this server and its replicas "
            f"the same one, for example {TOKEN_VARIABLE}=$(openssl rand -hex 32)"
        )


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a deployment is told.

    Attributes:
        stages: The pools.
        pipelines: The graphs over them.
        server: The HTTP edge.
        orchestrator: The orchestrator.
        module_folders: Where replicas find modules besides the usual places: beside the pipeline files.
    """

    stages: tuple[StageSettings, ...]
    pipelines: tuple[PipelineSpec, ...]
    server: ServerSettings = ServerSettings()
    orchestrator: OrchestratorSettings = OrchestratorSettings()
    module_folders: tuple[str, ...] = ()

    def deployment(self) -> Deployment:
        """Return the router's part; not yet validated."""
        return Deployment(
            stages=tuple(stage.router_spec() for stage in self.stages),
            pipelines=self.pipelines,
            limits=self.orchestrator.limits,
        )
