"""An orchestrator as a whole process: from its specification to its exit."""

from __future__ import annotations

import asyncio
import logging
import signal
from typing import TYPE_CHECKING

import msgspec
import uvloop

from stretto.config.process_specs import OrchestratorSpec
from stretto.launch.local import LocalLauncher
from stretto.orchestrator.shell import Orchestrator
from stretto.transport.allocator import give_back

if TYPE_CHECKING:
    from collections.abc import Callable


PAYLOAD_BYTES = 16 * 1024
"""Inline payloads from this size on live and die in no order; kept on the heap, they let it grow."""


def run_orchestrator_process(
    spec_line: bytes, make_orchestrator: Callable[..., Orchestrator] = Orchestrator
) -> int:
    """Serve one epoch until SIGTERM or a crash; return the exit code, 0 after a drain."""
    logging.basicConfig(format="[orchestrator] %(levelname)s %(message)s", level=logging.INFO)
    give_back(PAYLOAD_BYTES)
    return uvloop.run(
        _live(msgspec.json.decode(spec_line, type=OrchestratorSpec), make_orchestrator)
    )


async def _live(spec: OrchestratorSpec, make_orchestrator: Callable[..., Orchestrator]) -> int:
    orchestrator = make_orchestrator(spec, LocalLauncher())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, orchestrator.shut_down)
    return await orchestrator.run()
