"""The application: routes, and every failure in OpenAI's form."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException

import stretto
from stretto.audio.encoders import MEDIA_TYPES
from stretto.config.settings import ServerSettings
from stretto.core.graph import Limits
from stretto.errors import InternalError, StrettoError
from stretto.server.admin import add_admin
from stretto.server.body import read_body
from stretto.server.boundary import Boundary
from stretto.server.errors import error_response, openai_error
from stretto.server.in_flight import InFlight
from stretto.server.speech import SpeechLimits, SpeechReply
from stretto.server.speech_request import SpeechRequest, parse_speech_request
from stretto.server.status import Status

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import ASGIApp

    from stretto.messages.channel import HttpDone
    from stretto.server.contract import SpeechEngine

_DESCRIPTION = "OpenAI-compatible speech from a multi-stage pipeline. Errors have OpenAI's form."

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_AUDIO: dict[str, Any] = {"schema": {"type": "string", "format": "binary"}}

_SPEECH_DOCS: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": SpeechRequest.model_json_schema()}},
    },
    "responses": {
        "200": {
            "description": "Audio, as it is made.",
            "content": {
                **dict.fromkeys(MEDIA_TYPES.values(), _AUDIO),
                "text/event-stream": {"schema": {"type": "string"}},
            },
        }
    },
}


class _Application(FastAPI):
    """FastAPI within our boundary, which thus sees its error replies too."""

    def __init__(
        self,
        in_flight: InFlight,
        report: Callable[[HttpDone], None],
        **options: Any,  # noqa: ANN401 - FastAPI's own
    ) -> None:
        super().__init__(**options)
        self._in_flight = in_flight
        self._report = report

    def build_middleware_stack(self) -> ASGIApp:
        """Return the application with the boundary around it."""
        return Boundary(super().build_middleware_stack(), self._in_flight, self._report)


def create_app(
    engine: SpeechEngine,
    settings: ServerSettings | None = None,
    *,
    limits: Limits | None = None,
    in_flight: InFlight | None = None,
) -> FastAPI:
    """Return the application over an engine.

    It starts and closes nothing: the engine is its caller's.

    Args:
        engine: What serves the requests.
        settings: Bounds of the HTTP edge.
        limits: The deployment's limits; only `slow_client_timeout_s` is read.
        in_flight: Shared with the server, which drains it.
    """
    bounds = settings or ServerSettings()
    running = InFlight() if in_flight is None else in_flight
    app = _Application(
        running,
        engine.report,
        title="Stretto",
        version=stretto.__version__,
        description=_DESCRIPTION,
        redoc_url=None,
    )
    speech_limits = SpeechLimits(
        first_chunk_timeout_s=bounds.first_chunk_timeout_s,
        slow_client_timeout_s=(limits or Limits()).slow_client_timeout_s,
    )
    _add_errors(app)
    add_admin(app, engine, bounds)
    _add_status(app, Status(engine, running, int(time.time())))

    @app.post(
        "/v1/audio/speech", openapi_extra=_SPEECH_DOCS, response_class=Response, tags=["audio"]
    )
    async def create_speech(request: Request) -> Response:
        """Speak a text."""
        body = await read_body(request, bounds.max_body_bytes, bounds.receive_timeout_s)
        asked = parse_speech_request(body, bounds.max_input_chars)
        return SpeechReply(engine, running, speech_limits, asked)

    return app


def _add_status(app: FastAPI, status: Status) -> None:
    """Add what only reads the present state. `async`, so that no thread is involved."""

    @app.get("/v1/models", tags=["models"])
    async def list_models() -> JSONResponse:
        """List the models."""
        return JSONResponse(status.models())

    @app.get("/v1/models/{model:path}", tags=["models"])
    async def retrieve_model(model: str) -> JSONResponse:
        """Describe one model."""
        return JSONResponse(status.model(model))

    @app.get("/v1/audio/voices", tags=["audio"])
    async def list_voices() -> JSONResponse:
        """List the voices."""
        return JSONResponse(status.voices())

    @app.get("/v1/audio/models", tags=["audio"])
    async def list_audio_models() -> JSONResponse:
        """List the models that speak."""
        return JSONResponse(status.audio_models())

    @app.head("/health", include_in_schema=False)
    @app.get("/health", tags=["server"])
    async def health() -> JSONResponse:
        """Say whether the process can serve; 503 while the engine is dead."""
        code, content = status.health()
        return JSONResponse(content, code)

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready", tags=["server"])
    async def ready() -> JSONResponse:
        """Say whether to send requests here."""
        code, content = status.ready()
        return JSONResponse(content, code)

    @app.head("/metrics", include_in_schema=False)
    @app.get("/metrics", tags=["server"], response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Return the whole server's metrics in Prometheus' text format."""
        return Response(await status.metrics(), media_type=METRICS_TYPE)

    @app.head("/version", include_in_schema=False)
    @app.get("/version", tags=["server"])
    async def version() -> JSONResponse:
        """Name the version."""
        return JSONResponse(status.version())

    @app.head("/", include_in_schema=False)
    @app.get("/", tags=["server"])
    async def index() -> JSONResponse:
        """Say what this is."""
        return JSONResponse(status.index())


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(StrettoError)
    async def typed(request: Request, error: StrettoError) -> Response:
        return error_response(error, request.state.request_id)

    @app.exception_handler(HTTPException)
    async def routing(request: Request, error: HTTPException) -> Response:
        text = f"{request.method} {request.url.path}: {error.detail}"
        return openai_error(error.status_code, text, headers=dict(error.headers or {}))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        del request
        found = error.errors()[0]
        param = ".".join(str(part) for part in found["loc"][1:]) or None
        return openai_error(400, found["msg"], code="invalid_value", param=param)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        del error  # the server logs it
        return error_response(InternalError("unexpected"), request.state.request_id)
