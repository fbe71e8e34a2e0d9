"""The event log: one JSON line per event with its commands, enough to replay a life of the router.

The first line is the deployment. A log from production replays in a test: the same events give the
same commands, or `replay` says where they first differ.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from stretto.core.commands import AnyCommand
from stretto.core.events import AnyEvent, request_of
from stretto.core.graph import Deployment
from stretto.core.router import Router
from stretto.errors import InvalidTransition

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from stretto.types import RequestId

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


def replay(
    lines: Iterable[bytes], seen: Callable[[tuple[int, Record]], object] | None = None
) -> tuple[Router, Divergence | None]:
    """Run a log through a fresh router.

    Args:
        lines: The log, header first. A torn last line, as a crash leaves it, ends the replay.
        seen: Called with the number and the content of each line that was replayed.

    Returns:
        The router in its final state, and the first line that came out differently.

    Raises:
        StopIteration: There is no line.
        msgspec.MsgspecError: A line is not of this format.
    """
    iterator = iter(lines)
    router = Router(msgspec.json.decode(next(iterator), type=Deployment))
    for number, line in enumerate(iterator, start=2):
        if not line.endswith(b"\n"):
            break
        logged = _RECORD_DECODER.decode(line)
        replayed = _step(router, logged.event)
        if seen is not None:
            seen((number, logged))
        if _ENCODER.encode(replayed) != _ENCODER.encode(logged):
            return router, Divergence(line=number, logged=logged, replayed=replayed)
    return router, None


def _step(router: Router, event: AnyEvent) -> Record:
    try:
        return Record(event=event, commands=router.handle(event))
    except InvalidTransition as error:
        return Record(event=event, error=error.detail)


def requests_of(record: Record) -> tuple[RequestId, ...]:
    """Return the requests that an event, or one of its commands, names."""
    named = (request_of(each) for each in (record.event, *record.commands))
    return tuple(dict.fromkeys(request for request in named if request is not None))
