"""`stretto replay`: run a router's event log through a fresh router, and see where requests stood."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from stretto.cli import exits
from stretto.core.eventlog import Divergence, Record, replay, requests_of
from stretto.core.events import RequestSubmitted
from stretto.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from stretto.core.router import Router


def replay_log(
    path: Path, say: Callable[[str], None], *, until: int | None = None, request: str | None = None
) -> int:
    """Replay a log and print what came of it; return 1 if it came out differently.

    Args:
        path: The log that `stretto serve --event-log` has written.
        say: Prints a line.
        until: Stop after this line of the file.
        request: Print this request's events, by the engine's id or by the client's own.

    Raises:
        ConfigError: The file can't be read, or is no log of this version.
    """
    seen: list[tuple[int, Record]] = []
    try:
        with path.open("rb") as file:
            router, divergence = replay(_up_to(file, until), seen=seen.append)
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from error
    except StopIteration:
        raise ConfigError(f"{path} is empty; `stretto serve --event-log FILE` writes one") from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is no event log of this version of Stretto: {error}") from error
    if request is None:
        _summary(router, seen, say)
    else:
        _tell_request(router, seen, request, say)
    if divergence is not None:
        _tell_divergence(divergence, say)
        return exits.FAILED
    say(f"replayed {len(seen)} events: the same commands came out")
    return exits.OK


def _up_to(lines: Iterable[bytes], until: int | None) -> Iterator[bytes]:
    for number, line in enumerate(lines, start=1):
        if until is not None and number > until:
            return
        yield line


def _summary(router: Router, seen: list[tuple[int, Record]], say: Callable[[str], None]) -> None:
    kinds = Counter(type(record.event).__name__ for _, record in seen)
    for kind, number in kinds.most_common():
        say(f"{number:8} {kind}")
    found = router.statistics()
    counters = found.counters
    say(
        f"requests: {counters.received} received, {counters.rejected} rejected, "
        f"{counters.finished} finished, {counters.failed} failed, {counters.cancelled} cancelled, "
        f"{found.queued + found.running} open"
    )
    for waiting in router.waiting(seen[-1][1].event.now if seen else 0.0):
        say(f"open: {waiting.request} ({waiting.label or 'no label'}): {waiting.what}")


def _tell_request(
    router: Router, seen: list[tuple[int, Record]], name: str, say: Callable[[str], None]
) -> None:
    ids = {
        event.request
        for _, record in seen
        if isinstance(event := record.event, RequestSubmitted)
        and name in (event.request, event.label)
    }
    if not ids:
        raise ConfigError(f"the log has no request {name!r}; ids look like 1.2-7")
    began: float | None = None
    for number, record in seen:
        if not ids & set(requests_of(record)):
            continue
        began = record.event.now if began is None else began
        commands = [
            type(command).__name__
            for command in record.commands
            if ids & set(requests_of(Record(event=record.event, commands=(command,))))
        ]
        what = ", ".join(commands) if commands else "-"
        kind = type(record.event).__name__
        say(f"{number:6} {(record.event.now - began) * 1000:10.1f} ms  {kind:18} {what}")
    for each in sorted(ids):
        story = router.story(each)
        if story is not None:
            say("")
            say(str(story))


def _tell_divergence(divergence: Divergence, say: Callable[[str], None]) -> None:
    say(f"line {divergence.line} came out differently")
    say(f"  event     {msgspec.json.encode(divergence.logged.event).decode()}")
    for what, record in (("logged", divergence.logged), ("replayed", divergence.replayed)):
        answer = record.error or msgspec.json.encode(record.commands).decode()
        say(f"  {what:9} {answer}")
