"""Events as data."""

from __future__ import annotations

import msgspec
import pytest

from stretto.core import events as on
from tests.core.builders import API, R1, A, aborted, inline, produced, shm, submitted, task
from tests.core.test_router_table import BROKEN


@pytest.mark.parametrize(
    ("event", "payloads"),
    [
        (produced(payload=shm("x")), (shm("x"),)),
        (submitted(), (inline(f"{R1}.text"),)),
        (submitted(options=shm("o")), (inline(f"{R1}.text"), shm("o"))),
        (BROKEN, (inline("lost"),)),
        (aborted(), ()),
        (on.PayloadDone(now=0.0, holder=API, payload=shm("x")), ()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_payloads_that_an_event_hands_over(
    event: on.AnyEvent, payloads: tuple[object, ...]
) -> None:
    """Whoever drops the event must release these, and no others."""
    assert on.payloads_of(event) == payloads


@pytest.mark.parametrize("holder", [API, task(A, attempt=2)])
def test_a_holder_survives_json(holder: object) -> None:
    """A task and a channel are told apart."""
    event = msgspec.convert(
        {"type": "PayloadDone", "now": 0.0, "holder": holder, "payload": shm("x")}, on.AnyEvent
    )
    assert msgspec.json.decode(msgspec.json.encode(event), type=on.AnyEvent) == event
