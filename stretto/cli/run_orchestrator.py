"""The orchestrator process: `python -m stretto.cli.run_orchestrator`, started by a supervisor."""

from __future__ import annotations

import sys

from stretto.transport.parent import exit_with_parent, read_spec_line


def main() -> int:
    """Serve one epoch; return the exit code."""
    line = read_spec_line()
    exit_with_parent()

    import asyncio
    import logging
    import signal

    import msgspec
    import uvloop

    from stretto.config.process_specs import OrchestratorSpec
    from stretto.launch.local import LocalLauncher
    from stretto.orchestrator.shell import Orchestrator

    logging.basicConfig(format="[orchestrator] %(levelname)s %(message)s", level=logging.INFO)
    spec = msgspec.json.decode(line, type=OrchestratorSpec)

    async def run() -> int:
        orchestrator = Orchestrator(spec, LocalLauncher())
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, orchestrator.shut_down)
        return await orchestrator.run()

    return uvloop.run(run())


if __name__ == "__main__":
    sys.exit(main())
