"""Entry point of a replica process: `python -m stretto.replica`, the specification on standard input.

It exits 0 when drained or when its link ends, 1 when it can't start or its runtime breaks; it is killed
with its process group when its parent is gone, also while it loads. SIGINT is the supervisor's.
"""

import signal
import sys

from stretto.transport.parent import exit_with_parent, read_spec_line


def main() -> None:
    """Become the replica that the specification describes; does not return."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        line = read_spec_line()
    except EOFError as error:
        sys.exit(str(error))
    exit_with_parent()

    from stretto.replica.process import run  # noqa: PLC0415 - nothing heavy before the parent is watched

    run(line)


if __name__ == "__main__":
    main()
