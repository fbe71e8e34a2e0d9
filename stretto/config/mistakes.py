"""Mistakes in a configuration: collected while reading goes on, then shown with their places."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stretto.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

_MAX_SHOWN = 50
_MAX_VALUE_CHARS = 60


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value was written.

    Attributes:
        place: A file, an environment variable or a flag.
        line: The line in a file, from 1.
    """

    place: str
    line: int | None = None

    def __str__(self) -> str:
        """Return `file:line`, or the place alone."""
        return self.place if self.line is None else f"{self.place}:{self.line}"


@dataclass(slots=True)
class Mistakes:
    """What is wrong so far. Files keep the order in which they were named, lines their own."""

    _found: list[tuple[Origin, str]] = field(default_factory=list[tuple[Origin, str]])

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._found)

    def add(self, origin: Origin, key: str, what: str) -> None:
        """Note one mistake; `key` is its dotted path, empty for a whole file."""
        self._found.append((origin, f"{origin}:{key}: {what}" if key else f"{origin}: {what}"))

    def raise_if_any(self) -> None:
        """Raise all of them.

        Raises:
            ConfigError: One line per mistake.
        """
        if not self._found:
            return
        places = {origin.place: None for origin, _ in self._found}
        order = {place: number for number, place in enumerate(places)}
        found = sorted(self._found, key=lambda item: (order[item[0].place], item[0].line or 0))
        lines = list(dict.fromkeys(line for _, line in found))
        if len(lines) > _MAX_SHOWN:
            lines[_MAX_SHOWN:] = [f"… and {len(lines) - _MAX_SHOWN} more"]
        raise ConfigError("\n".join(lines))


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that `name` was probably meant to be."""
    matches = difflib.get_close_matches(name, list(known), n=1)
    return matches[0] if matches else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean …?`, or the known names if none is near."""
    names = list(known)
    match = nearest(name, names)
    if match is not None:
        return f"; did you mean {match!r}?"
    return f"; known: {', '.join(names)}" if names else ""


def shown(value: object) -> str:
    """Return a value as an error text shows it: short, and in the words of YAML."""
    match value:
        case None:
            return "nothing"
        case bool():
            return str(value).lower()
        case dict():
            return "a mapping"
        case list():
            return "a list"
        case _:
            text = repr(value)
            return text if len(text) <= _MAX_VALUE_CHARS else f"{text[:_MAX_VALUE_CHARS]}…"
