"""An API process: `python -m stretto.cli.run_api`, started by a supervisor."""

from __future__ import annotations

import sys

from stretto.transport.parent import exit_with_parent, read_spec_line


def main() -> int:
    """Serve HTTP until told to stop; return the exit code."""
    line = read_spec_line()
    exit_with_parent()

    import logging
    import os
    import socket

    import msgspec
    import uvloop

    from stretto.config.process_specs import ApiSpec
    from stretto.engine.engine import Engine
    from stretto.server.app import create_app
    from stretto.server.http import HttpServer, stop_on_signals
    from stretto.server.in_flight import InFlight

    logging.basicConfig(format="[api] %(levelname)s %(message)s", level=logging.INFO)
    spec = msgspec.json.decode(line, type=ApiSpec)

    def tell_ready() -> None:
        os.write(spec.ready_fd, b"1")
        os.close(spec.ready_fd)

    async def run() -> None:
        settings = spec.settings.server
        limits = spec.settings.orchestrator.limits
        engine = Engine.connect(spec.channel_path, run=spec.run, name="api", limits=limits)
        engine.start()
        in_flight = InFlight()
        app = create_app(engine, settings, limits=limits, in_flight=in_flight)
        server = HttpServer(app, in_flight, settings.drain_timeout_s, tell_ready)
        stop_on_signals(server.stop)
        try:
            await server.serve([socket.socket(fileno=spec.http_fd)])
        finally:
            await engine.aclose()

    uvloop.run(run())
    return 0


if __name__ == "__main__":
    sys.exit(main())
