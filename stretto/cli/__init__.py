"""The command line, and the entry points of the processes that `stretto serve` starts."""

from __future__ import annotations


def main() -> int:
    """Run the `stretto` command; return its exit code.

    0 ok, also after a drained Ctrl-C or SIGTERM; 1 failure at run time; 2 wrong usage or configuration;
    3 the engine failed to start; 130 or 143 after a second Ctrl-C or SIGTERM.
    """
    from stretto.cli.streams import open_standard_streams

    open_standard_streams()
    try:
        from stretto.cli.app import run
    except KeyboardInterrupt:
        return 130
    return run()
