"""The event log: one JSON line per event with its commands, enough to replay a life of the router.

The first line is the deployment. A log from production replays in a test: the same events give the
same commands, or `replay` says where they first differ.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from stretto.core.commands import AnyCommand
from stretto.core.events import AnyEvent
from stretto.core.graph import Deployment
from stretto.core.router import Router
from stretto.errors import InvalidTransition

if TYPE_CHECKING:
    from collections.abc import Iterable

_ENCODER = msgspec.json.Encoder()


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One line: an event and what the router answered; `error` if it refused the event."""

    event: AnyEvent
    commands: tuple[AnyCommand, ...] = ()
    error: str | None = None


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """Where a replay first differs from the log."""

    line: int
    logged: Record
    replayed: Record


_RECORD_DECODER = msgspec.json.Decoder(Record)


def header_line(deployment: Deployment) -> bytes:
    """Return the log's first line, newline included."""
    return _ENCODER.encode(deployment) + b"\n"


def record_line(
    event: AnyEvent, commands: tuple[AnyCommand, ...], error: str | None = None
) -> bytes:
    """Return a line, newline included."""
    return _ENCODER.encode(Record(event=event, commands=commands, error=error)) + b"\n"


def replay(lines: Iterable[bytes]) -> tuple[Router, Divergence | None]:
    """Run a log through a fresh router.

    Args:
        lines: The log, header first. A torn last line, as a crash leaves it, ends the replay.

    Returns:
        The router in its final state, and the first line that came out differently.

    Raises:
        msgspec.ValidationError: A line is not of this format.
    """
    iterator = iter(lines)
    router = Router(msgspec.json.decode(next(iterator), type=Deployment))
    for number, line in enumerate(iterator, start=2):
        if not line.endswith(b"\n"):
            break
        logged = _RECORD_DECODER.decode(line)
        replayed = _step(router, logged.event)
        if _ENCODER.encode(replayed) != _ENCODER.encode(logged):
            return router, Divergence(line=number, logged=logged, replayed=replayed)
    return router, None


def _step(router: Router, event: AnyEvent) -> Record:
    try:
        return Record(event=event, commands=router.handle(event))
    except InvalidTransition as error:
        return Record(event=event, error=error.detail)
