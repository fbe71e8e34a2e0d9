"""When to start a process again that has died. Pure: the time is given."""

from __future__ import annotations

from collections import deque


class Restarts:
    """Exponential back-off with a breaker for a process that keeps dying young.

    A process that was up for `proven_s` has proven itself: deaths before it no longer count.
    """

    def __init__(
        self,
        *,
        first_s: float = 0.1,
        longest_s: float = 5.0,
        deaths: int = 5,
        window_s: float = 60.0,
        proven_s: float = 10.0,
    ) -> None:
        """Count from nothing.

        Args:
            first_s: Wait after the first death; it doubles with each further one.
            longest_s: Longest wait.
            deaths: So many deaths within `window_s` open the breaker.
            window_s: See `deaths`.
            proven_s: See the class.
        """
        self._first_s = first_s
        self._longest_s = longest_s
        self._limit = deaths
        self._window_s = window_s
        self._proven_s = proven_s
        self._deaths: deque[float] = deque()

    def delay_after_death(self, now: float, uptime_s: float) -> float | None:
        """Count a death; return how long to wait with the next start, `None` to give up."""
        if uptime_s >= self._proven_s:
            self._deaths.clear()
        self._deaths.append(now)
        while self._deaths[0] <= now - self._window_s:
            self._deaths.popleft()
        if len(self._deaths) >= self._limit:
            return None
        return min(self._first_s * 2 ** (len(self._deaths) - 1), self._longest_s)
