"""Time as an interface, so that tests and the simulator own it."""

from typing import Protocol


class Clock(Protocol):
    """A monotonic clock."""

    def __call__(self) -> float:
        """Return monotonic seconds."""
        ...
