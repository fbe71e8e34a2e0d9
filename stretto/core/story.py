"""What happened to a request, in a bounded number of lines, for `story()` and for error texts."""

from __future__ import annotations

from collections import deque

import msgspec


class StoryEntry(msgspec.Struct, frozen=True):
    """One line: when it happened first (monotonic seconds), what, and how often in a row."""

    at: float
    what: str
    count: int = 1

    def __str__(self) -> str:
        """Return the line as text."""
        times = f" x{self.count}" if self.count > 1 else ""
        return f"{self.at:.3f} {self.what}{times}"


class Story:
    """A ring of the last 64 lines; the same line twice in a row is one line with a count.

    Attributes:
        label: The client's own name of the request.
    """

    __slots__ = ("_entries", "_last_at", "_last_count", "_last_what", "label")

    CAPACITY = 64

    def __init__(self, label: str = "") -> None:
        self.label = label
        self._entries: deque[StoryEntry] = deque(maxlen=self.CAPACITY - 1)
        self._last_at = 0.0
        self._last_what = ""
        self._last_count = 0

    def add(self, at: float, what: str) -> None:
        """Append a line."""
        if what == self._last_what:
            self._last_count += 1
            return
        if self._last_count:
            self._entries.append(StoryEntry(self._last_at, self._last_what, self._last_count))
        self._last_at, self._last_what, self._last_count = at, what, 1

    def entries(self) -> tuple[StoryEntry, ...]:
        """Return the lines, oldest first."""
        if not self._last_count:
            return ()
        return (*self._entries, StoryEntry(self._last_at, self._last_what, self._last_count))

    def __str__(self) -> str:
        """Return the lines as text."""
        return "\n".join(str(entry) for entry in self.entries())
