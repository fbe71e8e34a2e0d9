"""Answers the recorded logs anew, after a wanted change of commands: `python -m tests.replay.refresh`.

Read the difference before it is committed.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from stretto.core.eventlog import Record, header_line, record_line
from stretto.core.graph import Deployment
from stretto.core.router import Router


def refreshed(log: bytes) -> bytes:
    """Return the log with the answers that the router gives now."""
    header, *lines = log.splitlines()
    router = Router(msgspec.json.decode(header, type=Deployment))
    new = [header_line(router.deployment)]
    for line in lines:
        event = msgspec.json.decode(line, type=Record).event
        new.append(record_line(event, router.handle(event)))
    return b"".join(new)


if __name__ == "__main__":
    for path in sorted((Path(__file__).parent / "logs").glob("*.jsonl")):
        path.write_bytes(refreshed(path.read_bytes()))
