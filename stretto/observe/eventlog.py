"""Writes the router's event log to a file, line by line, for `stretto.core.eventlog.replay`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from stretto.core.eventlog import header_line, record_line

if TYPE_CHECKING:
    from stretto.core.commands import AnyCommand
    from stretto.core.events import AnyEvent
    from stretto.core.graph import Deployment


class EventLogWriter:
    """Appends to a buffered file; the shell flushes it once per turn of its loop.

    Args:
        path: The file; an existing one is replaced, since a log describes one life of a router.
        deployment: The log's first line.

    Raises:
        OSError: The file can't be written.
    """

    def __init__(self, path: str, deployment: Deployment) -> None:
        self._file = Path(path).open("wb")  # noqa: SIM115 - it lives as long as the router
        self._file.write(header_line(deployment))

    def observe(
        self, event: AnyEvent, commands: tuple[AnyCommand, ...], error: str | None = None
    ) -> None:
        """Append one event with the router's answer."""
        self._file.write(record_line(event, commands, error))

    def flush(self) -> None:
        """Hand what was written to the kernel."""
        self._file.flush()

    def close(self) -> None:
        """Flush and close; may be called twice."""
        self._file.close()
