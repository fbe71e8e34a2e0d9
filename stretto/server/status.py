"""What probes, operators and clients may ask about the server: health, readiness, version, models."""

from __future__ import annotations

from typing import TYPE_CHECKING

import stretto
from stretto.engine.client import EngineState
from stretto.errors import EngineDead
from stretto.server.catalog import (
    AUDIO,
    languages,
    resolve_pipeline,
    speech_pipelines,
    starting,
    voices,
)

if TYPE_CHECKING:
    from stretto.engine.readiness import StageView
    from stretto.server.contract import SpeechEngine
    from stretto.server.in_flight import InFlight

Json = dict[str, object]


class Status:
    """Answers from the engine's and the server's present state.

    Args:
        engine: The engine.
        in_flight: The server's running requests.
        created: When this server started, in seconds since the epoch; OpenAI's model objects carry it.
    """

    def __init__(self, engine: SpeechEngine, in_flight: InFlight, created: int) -> None:
        self._engine = engine
        self._in_flight = in_flight
        self._created = created

    def health(self) -> tuple[int, Json]:
        """Return whether this process can serve now or soon; 503 while there is no engine."""
        is_alive = self._engine.state in (EngineState.STARTING, EngineState.ALIVE)
        return 200 if is_alive else 503, self._stages("ok" if is_alive else "engine_dead")

    def ready(self) -> tuple[int, Json]:
        """Return whether to send requests here."""
        if self._in_flight.is_draining:
            return 503, self._stages("shutting_down")
        if self._engine.state in (EngineState.LOST, EngineState.GONE):
            return 503, self._stages("engine_dead")
        if not self._engine.readiness.is_ready:
            return 503, self._stages(
                "degraded" if self._engine.readiness.has_been_ready else "starting"
            )
        return 200, self._stages("ready")

    async def metrics(self) -> str:
        """Return the whole server's metrics as text.

        Raises:
            EngineDead: The orchestrator, who keeps them, is gone.
            DeadlineExceeded: It does not answer.
        """
        return await self._engine.ask("metrics")

    def version(self) -> Json:
        """Return the version."""
        return {"version": stretto.__version__}

    def index(self) -> Json:
        """Return what a person who opens the server's address needs."""
        return {
            "name": "stretto",
            "version": stretto.__version__,
            "models": [info.name for info in speech_pipelines(self._engine)],
            "docs": "/docs",
        }

    def models(self) -> Json:
        """Return OpenAI's list of models.

        Raises:
            NoReplica: The engine has not answered yet.
        """
        self._check_known()
        return {
            "object": "list",
            "data": [self._model(info.name, info.name) for info in speech_pipelines(self._engine)],
        }

    def model(self, name: str) -> Json:
        """Return one model, also by one of OpenAI's names.

        Raises:
            InvalidRequest: There is no such model.
            NoReplica: The engine has not answered yet.
        """
        self._check_known()
        return self._model(name, resolve_pipeline(self._engine, name).name)

    def voices(self) -> Json:
        """Return the voices, in the two shapes that clients read.

        Raises:
            NoReplica: The engine has not answered yet.
        """
        self._check_known()
        found = [
            {"id": name, "object": "voice", "name": name, "language": language}
            for name, language in languages(self._engine.readiness).items()
        ]
        return {"object": "list", "data": found, "voices": found}

    def audio_models(self) -> Json:
        """Return the models that speak, as clients that look for voices read them.

        Raises:
            NoReplica: The engine has not answered yet.
        """
        self._check_known()
        return {"models": [{"id": info.name} for info in speech_pipelines(self._engine)]}

    def _check_known(self) -> None:
        if self._engine.pipelines:
            return
        if self._engine.state is EngineState.STARTING:
            raise starting()
        raise EngineDead("The engine is gone.")

    def _model(self, name: str, root: str) -> Json:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "stretto",
            "root": root,
            "modalities": [AUDIO],
            "voices": list(voices(self._engine.readiness)),
        }

    def _stages(self, status: str) -> Json:
        stages = {view.stage: _stage(view) for view in self._engine.readiness.stages}
        return {"status": status, "requests_in_flight": len(self._in_flight), "stages": stages}


def _stage(view: StageView) -> Json:
    replicas = [
        {
            "replica": str(state.replica),
            "state": state.state,
            "detail": state.detail,
            "fraction": state.fraction,
        }
        for state in view.replicas
    ]
    return {"ready": view.ready, "target": view.target, "replicas": replicas}
