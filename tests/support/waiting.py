"""Waiting for a fact that nobody announces, with a bound."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

INTERVAL_S = 0.01


async def becomes_true(condition: Callable[[], bool], timeout_s: float = 10.0) -> bool:
    """Return True as soon as `condition` holds, or False when it did not hold in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline:
            return False
        await asyncio.sleep(INTERVAL_S)
    return True
