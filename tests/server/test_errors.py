"""The table from error classes to HTTP, and what a reply may tell."""

from __future__ import annotations

import json

import pytest

from stretto.errors import Failure, FailureKind, StageError, StrettoError
from stretto.server.errors import CODES, RULES, error_response

EXPECTED: dict[FailureKind, tuple[int, str, str, str | None]] = {
    FailureKind.INVALID_REQUEST: (400, "invalid_request_error", "invalid_value", None),
    FailureKind.OVERLOADED: (429, "rate_limit_error", "queue_full", "true"),
    FailureKind.DEADLINE_EXCEEDED: (504, "server_error", "stage_timeout", None),
    FailureKind.CANCELLED: (499, "server_error", "cancelled", "false"),
    FailureKind.STAGE_ERROR: (500, "server_error", "stage_failed", "false"),
    FailureKind.REPLICA_LOST: (503, "server_error", "replica_lost", "true"),
    FailureKind.NO_REPLICA: (503, "server_error", "no_replica", "true"),
    FailureKind.POISON_REQUEST: (500, "server_error", "poison_request", "false"),
    FailureKind.ENGINE_DEAD: (503, "server_error", "engine_dead", "true"),
    FailureKind.CONFIG_ERROR: (500, "server_error", "internal_error", "false"),
    FailureKind.START_FAILED: (503, "server_error", "start_failed", "false"),
    FailureKind.PAYLOAD_LOST: (503, "server_error", "payload_lost", "true"),
    FailureKind.INTERNAL_ERROR: (500, "server_error", "internal_error", "false"),
    FailureKind.INVALID_TRANSITION: (500, "server_error", "internal_error", "false"),
}

INSIDE = "/root/model.onnx at 0x7f"


def error(kind: FailureKind, code: str | None = None, *, where: str = "talker/0#1") -> StrettoError:
    """Return an error with a text that must not get out."""
    failure = Failure(kind=kind, detail=INSIDE, where=where, param="field", code=code)
    return failure.exception()


@pytest.mark.parametrize("kind", FailureKind)
def test_each_class_has_its_status_code_and_retry_advice(kind: FailureKind) -> None:
    """The table is complete, and the body has OpenAI's form."""
    reply = error_response(error(kind), "req-1")
    status, type_, code, retry = EXPECTED[kind]
    found = json.loads(bytes(reply.body))["error"]
    assert (reply.status_code, found["type"], found["code"]) == (status, type_, code)
    assert (found["param"], reply.headers.get("x-should-retry")) == ("field", retry)
    assert ("retry-after" in reply.headers) == (retry == "true")


@pytest.mark.parametrize(
    "kind", [kind for kind in FailureKind if RULES[kind].text is not None], ids=str
)
def test_situation_L8_causes_inside_the_server_stay_inside(kind: FailureKind) -> None:
    """The reply names the stage at most, and the request id under which the log has the cause."""
    text = json.loads(bytes(error_response(error(kind), "req-1").body))["error"]["message"]
    assert INSIDE not in text
    assert "#1" not in text
    assert text.endswith("Request id: req-1")


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("model_not_found", 404),
        ("voice_not_found", 404),
        ("request_too_large", 413),
        ("unsupported_value", 400),
    ],
)
def test_a_code_can_choose_the_status(code: str, status: int) -> None:
    """What the client got wrong may have a status of its own."""
    reply = error_response(error(FailureKind.INVALID_REQUEST, code))
    assert reply.status_code == status
    assert json.loads(bytes(reply.body))["error"]["code"] == code


def test_shutting_down_and_starting_are_503() -> None:
    """Both ask for another try, whatever class they come in."""
    for kind in (FailureKind.OVERLOADED, FailureKind.ENGINE_DEAD, FailureKind.NO_REPLICA):
        for code in ("server_shutting_down", "engine_starting"):
            reply = error_response(error(kind, code))
            assert (reply.status_code, reply.headers["x-should-retry"]) == (503, "true")
            assert json.loads(bytes(reply.body))["error"]["code"] == code


def test_the_next_try_is_told_in_seconds_and_milliseconds() -> None:
    """Seconds are rounded up, since an early try would fail again."""
    overloaded = Failure(kind=FailureKind.OVERLOADED, detail="full", retry_after_s=2.2).exception()
    reply = error_response(overloaded)
    assert (reply.headers["retry-after"], reply.headers["retry-after-ms"]) == ("3", "2200")


def test_a_text_that_utf_8_can_not_hold_is_sent_all_the_same() -> None:
    """Half a surrogate pair in a name does not break the reply."""
    reply = error_response(Failure(kind=FailureKind.INVALID_REQUEST, detail="\ud800").exception())
    assert json.loads(bytes(reply.body))["error"]["message"] == "\ud800"


def test_codes_of_inside_errors_do_not_get_out() -> None:
    """A stage's own code means nothing to the client."""
    reply = error_response(StageError("broke", code="unsupported_value"))
    assert json.loads(bytes(reply.body))["error"]["code"] == "stage_failed"


def test_every_code_of_the_table_is_its_rules_code() -> None:
    """Keys and codes of the second table are the same words."""
    assert [code for code, rule in CODES.items() if rule.code != code] == []
