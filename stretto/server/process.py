"""An API process from its specification to its exit: engine, application and server put together."""

from __future__ import annotations

import logging
import os
import socket
from typing import TYPE_CHECKING

import msgspec
import uvloop

from stretto.audio.encoders import warm_up
from stretto.config.process_specs import ApiSpec
from stretto.engine.engine import Engine
from stretto.server.app import create_app
from stretto.server.http import HttpServer, stop_on_signals
from stretto.server.in_flight import InFlight

if TYPE_CHECKING:
    from collections.abc import Callable


def run_api_process(spec_line: bytes) -> int:
    """Serve HTTP until a signal; return the exit code, 0 after a drain."""
    logging.basicConfig(format="[api] %(levelname)s %(message)s", level=logging.INFO)
    uvloop.run(_serve(msgspec.json.decode(spec_line, type=ApiSpec)))
    return 0


async def _serve(spec: ApiSpec) -> None:
    settings = spec.settings.server
    limits = spec.settings.orchestrator.limits
    engine = Engine.connect(spec.channel_path, run=spec.run, name="api", limits=limits)
    engine.start()
    warm_up()
    in_flight = InFlight()
    app = create_app(engine, settings, limits=limits, in_flight=in_flight)
    server = HttpServer(
        app,
        in_flight,
        settings.drain_timeout_s,
        _tell(spec.ready_fd),
        settings.receive_timeout_s,
    )
    stop_on_signals(server.stop)
    try:
        await server.serve([socket.socket(fileno=spec.http_fd)])
    finally:
        await engine.aclose()


def _tell(ready_fd: int) -> Callable[[], None]:
    def ready() -> None:
        os.write(ready_fd, b"1")
        os.close(ready_fd)

    return ready
