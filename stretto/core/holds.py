"""Who still needs a payload? Counts holders per reference; the last one to drop it frees it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stretto.types import PayloadRef


class Holds:
    """A table of counts; empty when no request is alive."""

    def __init__(self) -> None:
        self._counts: dict[PayloadRef, int] = {}

    def __len__(self) -> int:
        """Return how many payloads are held."""
        return len(self._counts)

    def __contains__(self, payload: PayloadRef) -> bool:
        """Say whether anybody holds the payload."""
        return payload in self._counts

    def counts(self) -> dict[PayloadRef, int]:
        """Return a copy of the table."""
        return dict(self._counts)

    def hold(self, payload: PayloadRef) -> None:
        """Add a holder."""
        self._counts[payload] = self._counts.get(payload, 0) + 1

    def drop(self, payload: PayloadRef) -> bool:
        """Remove a holder; return whether it was the last one."""
        count = self._counts[payload] - 1
        if count:
            self._counts[payload] = count
            return False
        del self._counts[payload]
        return True
