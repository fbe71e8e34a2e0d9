"""Collective calls as a client sees them: arguments become bytes, answers become results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import msgspec

from stretto.errors import InvalidRequest, StrettoError
from stretto.messages import MAX_CALL_BYTES, MAX_CALL_TIMEOUT_S
from stretto.messages import channel as wire
from stretto.types import StageId

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stretto.types import ReplicaId


@dataclass(frozen=True, slots=True, kw_only=True)
class RpcResult:
    """What came of a call at one replica.

    Attributes:
        status: `ok`, `error` (the method failed, or could not run) or `died` (the replica did).
        value: What the method returned, if it is `ok`.
        error: Why it did not, otherwise.
    """

    status: Literal["ok", "error", "died"]
    value: object = None
    error: StrettoError | None = None


def call_message(
    number: int,
    method: str,
    stages: Sequence[str] | None,
    arguments: Mapping[str, object] | None,
    timeout_s: float,
) -> wire.Call:
    """Return a call as it is sent.

    Raises:
        InvalidRequest: A value can't be sent.
    """
    if isinstance(stages, str) or (stages is not None and not stages):
        raise InvalidRequest(
            "`stages` is a list of stage names; leave it out to call every stage that has the method.",
            param="stages",
            code="invalid_value",
        )
    if not 0 < timeout_s <= MAX_CALL_TIMEOUT_S:
        raise InvalidRequest(
            f"`timeout_s` is {timeout_s}; use more than 0, and {MAX_CALL_TIMEOUT_S:g} at most.",
            param="timeout_s",
            code="invalid_value",
        )
    try:
        data = msgspec.msgpack.encode(dict(arguments or {}))
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(
            f"The arguments can't be sent: {error}", param="arguments", code="invalid_value"
        ) from error
    if len(data) > MAX_CALL_BYTES:
        raise InvalidRequest(
            f"The arguments have {len(data)} bytes, and {MAX_CALL_BYTES} at most can be sent.",
            param="arguments",
            code="invalid_value",
        )
    names = tuple(StageId(stage) for stage in stages or ())
    try:
        "".join((method, *names)).encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"A name can't be sent: {error}", param="method", code="invalid_value"
        ) from error
    return wire.Call(number, method, names, data, float(timeout_s))


def call_results(answer: wire.CallAnswered) -> dict[ReplicaId, RpcResult]:
    """Return what came of a call.

    Raises:
        StrettoError: The call as a whole has failed.
    """
    if answer.failure is not None:
        raise answer.failure.exception()
    return {each.replica: _result(each) for each in answer.results}


def _result(result: wire.CallResult) -> RpcResult:
    if result.failure is not None:
        return RpcResult(status=result.status, error=result.failure.exception())
    return RpcResult(status=result.status, value=msgspec.msgpack.decode(result.value))
