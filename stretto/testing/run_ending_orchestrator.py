"""`python -m stretto.testing.run_ending_orchestrator` takes the place of the orchestrator process."""

from __future__ import annotations

import sys

from stretto.engine.orchestrator_process import run_orchestrator_process
from stretto.testing.ending_orchestrator import EndingOrchestrator
from stretto.transport.parent import exit_with_parent, read_spec_line


def main() -> int:
    """Serve one epoch; return the exit code."""
    line = read_spec_line()
    exit_with_parent()
    return run_orchestrator_process(line, EndingOrchestrator)


if __name__ == "__main__":
    sys.exit(main())
