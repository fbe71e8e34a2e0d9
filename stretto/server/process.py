"""An API process from its specification to its exit: engine, application and server put together."""

from __future__ import annotations

import asyncio
import logging
import os
import socket

import msgspec
import uvloop

from stretto.audio.encoders import warm_up
from stretto.config.process_specs import ApiSpec
from stretto.engine.engine import Engine
from stretto.errors import StrettoError
from stretto.server.app import create_app
from stretto.server.http import HttpServer, stop_on_signals
from stretto.server.in_flight import InFlight


def run_api_process(spec_line: bytes) -> int:
    """Serve HTTP until a signal; return the exit code, 0 after a drain."""
    spec = msgspec.json.decode(spec_line, type=ApiSpec)
    logging.basicConfig(format=f"[{spec.name}] %(levelname)s %(message)s", level=logging.INFO)
    uvloop.run(_serve(spec))
    return 0


async def _serve(spec: ApiSpec) -> None:
    settings = spec.settings.server
    limits = spec.settings.orchestrator.limits
    engine = Engine.connect(spec.channel_path, run=spec.run, name=spec.name, limits=limits)
    engine.start()
    warm_up()
    in_flight = InFlight()
    accepting = asyncio.Event()
    app = create_app(engine, settings, limits=limits, in_flight=in_flight)
    server = HttpServer(
        app,
        in_flight,
        settings.drain_timeout_s,
        accepting.set,
        settings.receive_timeout_s,
    )
    stop_on_signals(server.stop)
    telling = asyncio.create_task(_tell_ready(engine, accepting, spec.ready_fd))
    try:
        await server.serve([socket.socket(fileno=spec.http_fd)])
    finally:
        telling.cancel()
        await engine.aclose()


async def _tell_ready(engine: Engine, accepting: asyncio.Event, ready_fd: int) -> None:
    """Say once that requests sent to this process are served: it accepts, and knows a ready engine."""
    try:
        await accepting.wait()
        await engine.wait_ready()
        os.write(ready_fd, b"1")
    except StrettoError:
        pass  # it never was; whoever owns the engine tells why
    finally:
        os.close(ready_fd)
