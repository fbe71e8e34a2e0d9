"""Standard streams that a parent has closed, or that nobody reads any more, must not end a server."""

from __future__ import annotations

import os
import sys

STANDARD = (0, 1, 2)


def open_standard_streams() -> None:
    """Put `/dev/null` where a standard stream is missing.

    Otherwise the first sockets and files that are opened get the numbers 0 to 2, and what means to
    write an error text writes into them.
    """
    for fd in STANDARD:
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 - it lives as long as the process
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - likewise
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115 - likewise
