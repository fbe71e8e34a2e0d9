"""The façade that applications hold: `Engine`.

    async with Engine.from_pipeline("speech") as engine:
        async for chunk in engine.generate(text="Hello", outputs=("audio",)):
            play(chunk.values["audio"])

An engine either owns its orchestrator (`from_pipeline`) or uses one that others run (`connect`).
Where the orchestrator runs is known to its owner only; requests just need a channel.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import TYPE_CHECKING, Literal, Protocol

from stretto.config.settings import Settings
from stretto.engine.channel import CALL_TIMEOUT_S
from stretto.engine.client import EngineClient, EngineState
from stretto.engine.payloads import input_values
from stretto.engine.readiness import Readiness
from stretto.engine.stream import Stream
from stretto.errors import EngineDead, InvalidRequest, StartFailed
from stretto.types import Payload, ReplicaId, RequestId, RunId, StageId, Value

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType
    from typing import Self

    from stretto.core.events import Affinity
    from stretto.core.graph import Limits
    from stretto.engine.calls import RpcResult
    from stretto.engine.channel import ChannelStatistics, ReplicaCallback, Topic
    from stretto.messages.channel import HttpDone, PipelineInfo
    from stretto.types import ReplicaId

_STOP_S = 5.0
"""How long a closing engine gives its orchestrator; nothing runs any more by then."""

_LAST_WORDS_S = 1.0
"""How long a dead engine's owner is asked for the reason."""


class Owner(Protocol):
    """What an engine needs of whoever runs its orchestrator."""

    @property
    def run(self) -> RunId:
        """The run's identity."""
        ...

    @property
    def channel_path(self) -> str:
        """Where the orchestrator listens; known after `start`."""
        ...

    def start(self) -> None:
        """Start the orchestrator."""
        ...

    async def wait_gave_up(self) -> str:
        """Wait until the orchestrator is not started again; return why."""
        ...

    async def stop(self, drain_s: float) -> None:
        """Stop the orchestrator and leave nothing behind."""
        ...


class Engine:
    """Runs requests on a pipeline. Use it with `async with`, on one event loop.

    Made by `from_pipeline` or `connect`; nothing starts before `async with` or `start`.
    """

    def __init__(
        self,
        make_client: Callable[[], EngineClient],
        owner: Owner | None = None,
    ) -> None:
        self._make_client = make_client
        self._owner = owner
        self._client: EngineClient | None = None
        self._is_closed = False

    @classmethod
    def from_pipeline(
        cls,
        pipeline: str | os.PathLike[str] | Settings,
        *,
        topology: Literal["process", "thread"] = "process",
        environ: Mapping[str, str] | None = None,
    ) -> Engine:
        """Return an engine with an orchestrator of its own, and with replicas in child processes.

        Args:
            pipeline: A built-in name, the path of a YAML file, or settings.
            topology: Where the orchestrator runs: in a child process, which a busy program does not
                delay, or in a thread of this process with a loop of its own. Nothing else differs.
            environ: Where `STRETTO_*` variables are read; by default this process's environment.

        Raises:
            ConfigError: The pipeline is unknown or wrong; the text lists every mistake.
        """
        from stretto.launch.supervisor import OrchestratorSupervisor  # noqa: PLC0415 - owners only

        settings = _settings(pipeline, os.environ if environ is None else environ)
        limits = settings.orchestrator.limits
        if topology == "thread":
            from stretto.engine.thread import in_thread  # noqa: PLC0415 - owners only

            owner, listener = in_thread(settings)
        else:
            owner, listener = OrchestratorSupervisor(settings), None

        def make_client() -> EngineClient:
            address = owner.channel_path if listener is None else listener
            return EngineClient(address, run=owner.run, name="engine", limits=limits)

        return cls(make_client, owner)

    @classmethod
    def connect(
        cls, channel_path: str, *, run: RunId, name: str = "engine", limits: Limits | None = None
    ) -> Engine:
        """Return an engine that uses an orchestrator which others run and restart.

        Args:
            channel_path: The orchestrator's channel socket.
            run: The run that it must belong to.
            name: Who this is, for people.
            limits: The deployment's limits, if they are not the defaults.
        """
        return cls(lambda: EngineClient(channel_path, run=run, name=name, limits=limits))

    # ---- life

    async def __aenter__(self) -> Self:
        """Start, and wait until every stage has a ready replica.

        Raises:
            StartFailed: A stage, or the orchestrator, does not start.
        """
        try:
            self.start()
            await self.wait_ready()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the engine."""
        await self.aclose()

    def start(self) -> None:
        """Start without waiting; requests can be submitted when `state` is `ALIVE`.

        Raises:
            OSError: The orchestrator's process or socket can't be made.
            EngineDead: The engine was closed.
        """
        if self._is_closed:
            raise EngineDead("The engine was closed; make another one.")
        if self._client is None:
            if self._owner is not None:
                self._owner.start()
            self._client = self._make_client()
            self._client.start()

    async def wait_ready(self) -> None:
        """Wait until every stage has a ready replica; one with `replicas: 0` is not waited for.

        Raises:
            StartFailed: A stage, or the orchestrator, does not start.
        """
        try:
            await self._started.wait_ready()
        except EngineDead as death:
            raise StartFailed(
                f"The engine did not become ready: {await self._last_words(death)}"
            ) from death

    async def aclose(self) -> None:
        """Abort what is open and stop everything this engine owns. May be called twice."""
        self._is_closed = True
        try:
            if self._client is not None:
                await self._client.aclose()
        finally:
            owner, self._owner = self._owner, None
            if owner is not None and self._client is not None:
                await owner.stop(_STOP_S)

    # ---- requests

    def generate(  # noqa: PLR0913 - all but the inputs have defaults
        self,
        *,
        pipeline: str | None = None,
        outputs: Sequence[str] = (),
        options: Payload | None = None,
        timeout_s: float | None = None,
        priority: int = 0,
        session: str | None = None,
        affinity: Affinity | None = None,
        label: str = "",
        open_inputs: Sequence[str] = (),
        companions: int = 0,
        companion_of: Stream | None = None,
        **inputs: Value | Payload,
    ) -> Stream:
        """Submit a request and return its stream of chunks; never blocks.

        Args:
            pipeline: Which pipeline; may be left out if there is only one.
            outputs: The wanted outputs; none means all.
            options: Named values for every stage, for example `{"seed": 1}`.
            timeout_s: Longest life of the request, if shorter than the engine's own limit.
            priority: Smaller goes first.
            session: The session that it belongs to.
            affinity: Which replicas it should meet again.
            label: Your own id, for logs.
            open_inputs: Inputs that go on after this: `Stream.append` sends more of them, and
                `Stream.close_input` ends them. They may be left out of `inputs`.
            companions: So many requests with the same inputs and outputs are submitted next, as its
                companions: none starts before all are there, this one finishes last, and what fails one
                of them ends all.
            companion_of: The stream of the request that this one is a companion of.
            inputs: The pipeline's inputs, for example `text="Hello"`; a mapping gives several values.

        Raises:
            EngineDead: The engine is not running at this moment.
            InvalidRequest: A value can't be sent, or `pipeline` is missing.
        """
        channel = self._started.channel
        return channel.submit(
            pipeline=self._only_pipeline() if pipeline is None else pipeline,
            inputs={name: input_values(name, value) for name, value in inputs.items()},
            outputs=outputs,
            options=options,
            timeout_s=timeout_s,
            priority=priority,
            session=session,
            affinity=affinity,
            label=label,
            open_inputs=open_inputs,
            companions=companions,
            companion_of=companion_of,
        )

    async def abort(self, request: Stream | RequestId | str) -> bool:
        """Abort a request; return whether there was anything to stop.

        Raises:
            EngineDead: The engine is not running at this moment.
        """
        name = request.request if isinstance(request, Stream) else RequestId(request)
        return await self._started.channel.abort(name)

    async def ask(self, topic: Topic, argument: str = "") -> str:
        """Ask the orchestrator something that changes nothing; see `Channel.ask`.

        Raises:
            EngineDead: The engine is not running at this moment.
            DeadlineExceeded: No answer came in time.
            InvalidRequest: There is nothing by that name.
        """
        return await self._started.channel.ask(topic, argument)

    async def collective_rpc(
        self,
        method: str,
        *,
        stages: Sequence[str] | None = None,
        arguments: Mapping[str, object] | None = None,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> dict[ReplicaId, RpcResult]:
        """Call a method at replicas, all at the same time, beside the traffic; wait for all answers.

        Every replica has `ping`, `statistics`, `profile_start`, `profile_stop`, `sleep` and `wake`;
        backends may offer more. Replicas that still load are left out. Before an exclusive method, for
        example `sleep`, its replica gets no new task and ends those that it has, within the time-out.

        Args:
            method: Its name.
            stages: At the replicas of these stages; by default at all that have the method.
            arguments: By name; what msgpack can carry, 64 KiB at most. So is each result.
            timeout_s: How long all this may take.

        Raises:
            EngineDead: The engine is not running at this moment, or ends meanwhile.
            DeadlineExceeded: Not every replica answered in time; the text names those that did not.
            Overloaded: Too many calls wait for their answers.
            NoReplica: No replica can be called now.
            InvalidRequest: There is no such method or stage, or a value can't be sent.
        """
        return await self._started.channel.call(
            method, stages=stages, arguments=arguments, timeout_s=timeout_s
        )

    async def scale(self, stage: str, replicas: int) -> None:
        """Have a stage get so many replicas; those too many finish their work first.

        Returns when the order is taken; `readiness` shows how far it is carried out.

        Raises:
            EngineDead: The engine is not running at this moment.
            DeadlineExceeded: No answer came in time.
            InvalidRequest: There is no such stage, or it can't have so many.
        """
        await self._started.channel.scale(StageId(stage), replicas)

    async def drain(self, replica: ReplicaId, *, replace: bool = False) -> None:
        """Have a replica take nothing new, finish what it has, and leave.

        Args:
            replica: Which one; `readiness` knows them.
            replace: Another one starts at once, so that the stage keeps its number.

        Raises:
            EngineDead: The engine is not running at this moment.
            DeadlineExceeded: No answer came in time.
            InvalidRequest: It is gone, or leaves already.
        """
        await self._started.channel.drain(replica, replace=replace)

    def report(self, message: HttpDone) -> None:
        """Tell the engine something for its metrics; never waits."""
        self._started.report(message)

    # ---- what is known

    @property
    def state(self) -> EngineState:
        """What the engine waits for."""
        return EngineState.STARTING if self._client is None else self._client.state

    @property
    def readiness(self) -> Readiness:
        """The stages as last heard of."""
        return Readiness({}) if self._client is None else self._client.readiness

    @property
    def pipelines(self) -> tuple[PipelineInfo, ...]:
        """What can be asked for; empty before the engine has answered."""
        latest = None if self._client is None else self._client.latest
        return () if latest is None else latest.welcome.pipelines

    def subscribe(self, callback: ReplicaCallback) -> Callable[[], None]:
        """Call `callback` with each replica's state, now and as it changes; return what ends that."""
        return self._started.subscribe(callback)

    def statistics(self) -> ChannelStatistics | None:
        """Return the counters of the newest channel; `None` before there was one."""
        latest = None if self._client is None else self._client.latest
        return None if latest is None else latest.statistics()

    # ---- inside

    @property
    def _started(self) -> EngineClient:
        if self._client is None:
            raise EngineDead("The engine was not started: use `async with`.")
        return self._client

    async def _last_words(self, death: EngineDead) -> str:
        """Return why no further life of the engine will come: its owner knows best."""
        if self._owner is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORDS_S):
                    return await self._owner.wait_gave_up()
        return death.detail

    def _only_pipeline(self) -> str:
        names = [info.name for info in self.pipelines]
        if len(names) != 1:
            raise InvalidRequest(
                f"Name a pipeline; this engine has {', '.join(names)}.",
                param="pipeline",
                code="missing_required_parameter",
            )
        return names[0]


def _settings(pipeline: str | os.PathLike[str] | Settings, environ: Mapping[str, str]) -> Settings:
    if isinstance(pipeline, Settings):
        return pipeline
    from stretto.config.loading import load_settings  # noqa: PLC0415 - owners only

    return load_settings([os.fspath(pipeline)], environ=environ)
