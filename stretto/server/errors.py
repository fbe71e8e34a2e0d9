"""The one table from error classes to HTTP: status, OpenAI error body, and retry headers.

Texts of the client's own mistakes are passed on. Causes inside the server stay in its log: a reply names
the stage at most, and the request id under which the log has the rest.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from starlette.responses import Response

from stretto.errors import FailureKind, StrettoError

CLIENT_LEFT = 499
"""Status for logs and for whoever is still there when a request was aborted."""


@dataclass(frozen=True, slots=True)
class Rule:
    """How one class of errors is answered.

    Attributes:
        status: HTTP status.
        type: OpenAI's error type.
        code: Code of an error that brings none.
        text: What the client reads; `None` passes the error's own text on. May name `{stage}`.
        retry: Tell the client that trying again makes sense (`True`), does not, or nothing.
        closes: End the connection, because the rest of the request is not read.
    """

    status: int
    type: str
    code: str
    text: str | None = None
    retry: bool | None = None
    closes: bool = False


_INTERNAL = Rule(
    500, "server_error", "internal_error", "The server has failed on this request.", retry=False
)

RULES: dict[FailureKind, Rule] = {
    FailureKind.INVALID_REQUEST: Rule(400, "invalid_request_error", "invalid_value"),
    FailureKind.OVERLOADED: Rule(429, "rate_limit_error", "queue_full", retry=True),
    FailureKind.DEADLINE_EXCEEDED: Rule(504, "server_error", "stage_timeout"),
    FailureKind.CANCELLED: Rule(
        CLIENT_LEFT, "server_error", "cancelled", "The request was aborted.", retry=False
    ),
    FailureKind.STAGE_ERROR: Rule(
        500, "server_error", "stage_failed", "{stage} has failed on this request.", retry=False
    ),
    FailureKind.REPLICA_LOST: Rule(
        503, "server_error", "replica_lost", "{stage} has lost a process; try again.", retry=True
    ),
    FailureKind.NO_REPLICA: Rule(
        503,
        "server_error",
        "no_replica",
        "{stage} is not available at the moment; try again.",
        retry=True,
    ),
    FailureKind.POISON_REQUEST: Rule(
        500,
        "server_error",
        "poison_request",
        "{stage} has failed repeatedly on this request.",
        retry=False,
    ),
    FailureKind.ENGINE_DEAD: Rule(
        503, "server_error", "engine_dead", "The engine is restarting; try again.", retry=True
    ),
    FailureKind.CONFIG_ERROR: _INTERNAL,
    FailureKind.START_FAILED: Rule(
        503, "server_error", "start_failed", "The engine does not start.", retry=False
    ),
    FailureKind.PAYLOAD_LOST: Rule(
        503, "server_error", "payload_lost", "A part of the result was lost; try again.", retry=True
    ),
    FailureKind.INTERNAL_ERROR: _INTERNAL,
    FailureKind.INVALID_TRANSITION: _INTERNAL,
}

CODES: dict[str, Rule] = {
    "model_not_found": Rule(404, "invalid_request_error", "model_not_found"),
    "voice_not_found": Rule(404, "invalid_request_error", "voice_not_found"),
    "replica_not_found": Rule(404, "invalid_request_error", "replica_not_found"),
    "admin_closed": Rule(403, "permission_error", "admin_closed"),
    "invalid_admin_key": Rule(401, "authentication_error", "invalid_admin_key"),
    "request_timeout": Rule(408, "timeout_error", "request_timeout", retry=False, closes=True),
    "request_too_large": Rule(413, "invalid_request_error", "request_too_large", closes=True),
    "engine_starting": Rule(503, "server_error", "engine_starting", retry=True),
    "server_shutting_down": Rule(
        503,
        "server_error",
        "server_shutting_down",
        "The server is shutting down; try again.",
        retry=True,
    ),
}
"""Codes that are answered in their own way, whatever the class."""

_OWN_CODES = {FailureKind.INVALID_REQUEST, FailureKind.OVERLOADED}
"""Classes whose errors may bring a code for the client."""

_RETRY_AFTER_S = 1.0


def rule_of(error: StrettoError) -> Rule:
    """Return how an error is answered."""
    return CODES.get(error.code or "") or RULES[error.kind]


def error_response(error: StrettoError, request_id: str = "") -> Response:
    """Return the reply to a request that failed before its first byte.

    Args:
        error: What happened.
        request_id: Repeated in texts that keep the cause back.
    """
    rule = rule_of(error)
    return _reply(rule.status, error_body(error, request_id), _headers(rule, error))


def error_body(error: StrettoError, request_id: str = "") -> dict[str, object]:
    """Return OpenAI's error object for an error; see `error_response`."""
    rule = rule_of(error)
    code = rule.code
    if error.kind in _OWN_CODES and error.code is not None:
        code = error.code
    return _body(_text(rule, error, request_id), rule.type, error.param, code)


def openai_error(
    status: int,
    message: str,
    *,
    kind: str = "invalid_request_error",
    code: str | None = None,
    param: str | None = None,
    headers: dict[str, str] | None = None,
) -> Response:
    """Return an error reply in OpenAI's form."""
    return _reply(status, _body(message, kind, param, code), headers)


def _body(message: str, kind: str, param: str | None, code: str | None) -> dict[str, object]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _reply(status: int, body: dict[str, object], headers: dict[str, str] | None) -> Response:
    # ASCII, since a text may hold what UTF-8 does not: half of a surrogate pair.
    return Response(json.dumps(body), status, headers, media_type="application/json")


def _text(rule: Rule, error: StrettoError, request_id: str) -> str:
    if rule.text is None:
        return error.detail
    stage = error.where.partition("/")[0]
    text = rule.text.format(stage=f"Stage {stage!r}" if stage else "A stage")
    return f"{text} Request id: {request_id}" if request_id else text


def _headers(rule: Rule, error: StrettoError) -> dict[str, str]:
    if rule.closes:
        return {"connection": "close"}
    if rule.retry is None:
        return {}
    if not rule.retry:
        # Clients repeat what ends in 409, 429 or 5xx unless they are told not to.
        return {"x-should-retry": "false"}
    after_s = error.retry_after_s or _RETRY_AFTER_S
    return {
        "x-should-retry": "true",
        "retry-after": str(math.ceil(after_s)),
        "retry-after-ms": str(math.ceil(after_s * 1000)),
    }
