"""The error tree: whose fault was it, and may the caller try again?

    StrettoError
    ├── InvalidRequest      the client's; not retryable
    ├── Overloaded          load; retry after `retry_after_s`
    ├── DeadlineExceeded    load or client
    ├── Cancelled           the client left or aborted; not an error metric
    ├── StageError          a backend refused or broke on one request
    ├── ReplicaLost         a process died and the request could not be repeated; retryable
    ├── NoReplica           no replica of a stage came back in time; retryable
    ├── PoisonRequest       several replicas died on one request in a row
    ├── EngineDead          the orchestrator is gone; latched until a new epoch
    ├── ConfigError         the operator's; start-up only, lists all mistakes at once
    ├── StartFailed         the engine did not become ready
    ├── PayloadLost         a payload's bytes can no longer be read
    └── InternalError       ours
        └── InvalidTransition

Inside events and commands an error is a `Failure` (exceptions neither compare nor replay);
`Failure.exception()` and `Failure.of()` translate at the edges. Every class pickles.
"""

from __future__ import annotations

from enum import Enum
from typing import ClassVar

import msgspec


class FailureKind(Enum):
    """The wire name of each error class."""

    INVALID_REQUEST = "invalid_request"
    OVERLOADED = "overloaded"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    CANCELLED = "cancelled"
    STAGE_ERROR = "stage_error"
    REPLICA_LOST = "replica_lost"
    NO_REPLICA = "no_replica"
    POISON_REQUEST = "poison_request"
    ENGINE_DEAD = "engine_dead"
    CONFIG_ERROR = "config_error"
    START_FAILED = "start_failed"
    PAYLOAD_LOST = "payload_lost"
    INTERNAL_ERROR = "internal_error"
    INVALID_TRANSITION = "invalid_transition"


class Failure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An error as data.

    Attributes:
        kind: Which class of the tree.
        detail: What happened, to which request, what to do next; plain text for people.
        where: The stage or replica concerned, empty if none.
        param: The request field at fault, for `INVALID_REQUEST`.
        code: A finer machine-readable reason, for example `voice_not_found` or `queue_full`.
        retry_after_s: When another try may succeed, in seconds.
    """

    kind: FailureKind
    detail: str
    where: str = ""
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None

    def exception(self) -> StrettoError:
        """Return this failure as the exception of its class."""
        return _CLASSES[self.kind](
            self.detail,
            where=self.where,
            param=self.param,
            code=self.code,
            retry_after_s=self.retry_after_s,
        )

    @classmethod
    def of(cls, error: BaseException, where: str = "") -> Failure:
        """Describe any exception; one that is not ours becomes a `STAGE_ERROR` with its type and text."""
        if isinstance(error, StrettoError):
            return error.failure(where)
        text = text_of(error) or "no message"
        return cls(
            kind=FailureKind.STAGE_ERROR, detail=f"{type(error).__name__}: {text}", where=where
        )


def sendable(text: str) -> str:
    """Return the text with what UTF-8 can't hold, such as half of a surrogate pair, written as an escape."""
    return text.encode("utf-8", "backslashreplace").decode()


def text_of(error: BaseException) -> str:
    """Return an exception's text, fit to be sent; empty if there is none, or if making it fails."""
    try:
        return sendable(str(error))
    except Exception:  # noqa: BLE001 - `__str__` of any library's exception
        return ""


class StrettoError(Exception):
    """Base of all errors that Stretto raises on purpose.

    Args:
        detail: What happened and what to do next.
        where: The stage or replica concerned.
        param: The request field at fault.
        code: A finer machine-readable reason.
        retry_after_s: When another try may succeed, in seconds.
    """

    kind: ClassVar[FailureKind] = FailureKind.INTERNAL_ERROR
    retryable: ClassVar[bool] = False

    def __init__(
        self,
        detail: str,
        *,
        where: str = "",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.where = where
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def failure(self, where: str = "") -> Failure:
        """Return this error as data; `where` fills in a missing place."""
        return Failure(
            kind=self.kind,
            detail=sendable(self.detail),
            where=sendable(self.where or where),
            param=self.param,
            code=self.code,
            retry_after_s=self.retry_after_s,
        )

    def __reduce__(self) -> tuple[object, tuple[Failure]]:
        """Pickle by way of the failure, since keyword-only arguments do not survive the default."""
        return (_from_failure, (self.failure(),))


def _from_failure(failure: Failure) -> StrettoError:
    return failure.exception()


class InvalidRequest(StrettoError):
    """The request is wrong; `param` names the field and the text the accepted values."""

    kind = FailureKind.INVALID_REQUEST


class Overloaded(StrettoError):
    """Refused at admission; nothing was started. Try again after `retry_after_s`."""

    kind = FailureKind.OVERLOADED
    retryable = True


class DeadlineExceeded(StrettoError):
    """A wait ended without what it waited for; `where` names the stage that held the request."""

    kind = FailureKind.DEADLINE_EXCEEDED


class Cancelled(StrettoError):
    """The request was aborted or its client left."""

    kind = FailureKind.CANCELLED


class StageError(StrettoError):
    """A backend refused this request or broke on it; its replica stays usable."""

    kind = FailureKind.STAGE_ERROR


class ReplicaLost(StrettoError):
    """A replica died and the request could not be repeated without an audible seam."""

    kind = FailureKind.REPLICA_LOST
    retryable = True


class NoReplica(StrettoError):
    """No replica of a stage came (back) in time."""

    kind = FailureKind.NO_REPLICA
    retryable = True


class PoisonRequest(StrettoError):
    """Several replicas in a row died on this request."""

    kind = FailureKind.POISON_REQUEST


class EngineDead(StrettoError):
    """The orchestrator is gone or was closed; latched for this channel epoch."""

    kind = FailureKind.ENGINE_DEAD
    retryable = True


class ConfigError(StrettoError):
    """The configuration is wrong; the text lists every mistake."""

    kind = FailureKind.CONFIG_ERROR


class StartFailed(StrettoError):
    """The engine did not become ready; the text names the stage and its last words."""

    kind = FailureKind.START_FAILED


class PayloadLost(StrettoError):
    """The bytes behind a payload reference can no longer be read."""

    kind = FailureKind.PAYLOAD_LOST
    retryable = True


class InternalError(StrettoError):
    """A bug of ours."""

    kind = FailureKind.INTERNAL_ERROR


class InvalidTransition(InternalError):
    """An event that can't happen in this state; nothing has changed. The text carries the story."""

    kind = FailureKind.INVALID_TRANSITION


_CLASSES: dict[FailureKind, type[StrettoError]] = {
    cls.kind: cls
    for cls in (
        InvalidRequest,
        Overloaded,
        DeadlineExceeded,
        Cancelled,
        StageError,
        ReplicaLost,
        NoReplica,
        PoisonRequest,
        EngineDead,
        ConfigError,
        StartFailed,
        PayloadLost,
        InternalError,
        InvalidTransition,
    )
}

__all__ = [
    "Cancelled",
    "ConfigError",
    "DeadlineExceeded",
    "EngineDead",
    "Failure",
    "FailureKind",
    "InternalError",
    "InvalidRequest",
    "InvalidTransition",
    "NoReplica",
    "Overloaded",
    "PayloadLost",
    "PoisonRequest",
    "ReplicaLost",
    "StageError",
    "StartFailed",
    "StrettoError",
    "sendable",
]
