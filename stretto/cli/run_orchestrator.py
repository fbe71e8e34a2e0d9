"""The orchestrator process: `python -m stretto.cli.run_orchestrator`, started by a supervisor."""

from __future__ import annotations

import sys

from stretto.transport.parent import exit_with_parent, read_spec_line


def main() -> int:
    """Serve one epoch; return the exit code."""
    line = read_spec_line()
    exit_with_parent()
    # The parent is watched before anything heavy is imported.
    from stretto.engine.orchestrator_process import run_orchestrator_process

    return run_orchestrator_process(line)


if __name__ == "__main__":
    sys.exit(main())
