"""Settings and fixtures of all tests."""

from __future__ import annotations

import os
import uuid
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests.support.leaks import MARK, Holdings
from tests.support.waiting import becomes_true

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

# The gate is derandomized, so a red is a red.
# `HYPOTHESIS_PROFILE=explore scripts/test tests/machine` searches further.
settings.register_profile("gate", derandomize=True, deadline=None, print_blob=True)
settings.register_profile(
    "explore",
    deadline=None,
    max_examples=5_000,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "gate"))


@pytest.fixture
async def leak_check(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """Fail if the test leaves a process, descriptor, thread, task or shared-memory entry behind.

    Request it before the fixtures that it shall watch: what they release must be released when it looks.
    """
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    before = Holdings.now(mark)
    yield
    left: list[str] = []

    def is_clean() -> bool:
        left[:] = Holdings.now(mark).beyond(before)
        return not left

    if not await becomes_true(is_clean, timeout_s=5.0):
        pytest.fail("left behind:\n" + "\n".join(left), pytrace=False)
