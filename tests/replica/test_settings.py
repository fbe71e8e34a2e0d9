"""What a replica's runtime is told."""

from __future__ import annotations

import pytest

from stretto.errors import ConfigError
from stretto.replica.settings import RuntimeSettings


def test_keys_that_concern_others_are_passed_over() -> None:
    """The orchestrator may pass a stage's settings on as they are."""
    settings = RuntimeSettings.of({"slots": 3, "start_timeout_s": 5.0})
    assert (settings.slots, settings.max_batch) == (3, 8)


@pytest.mark.parametrize(
    ("runtime", "text"),
    [
        ({"slots": 0}, "slots is 0, use 1 or more"),
        ({"max_batch": -1}, "max_batch is -1"),
        ({"threads": "two"}, r"\$\.threads"),
        ({"recovery": "replay"}, r"\$\.recovery"),
    ],
)
def test_a_wrong_value_is_named(runtime: dict[str, object], text: str) -> None:
    """The error says which setting, and what it may be."""
    with pytest.raises(ConfigError, match=text):
        RuntimeSettings.of(runtime)
