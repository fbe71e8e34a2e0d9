"""The error tree: data and exception are two forms of one thing, and both travel."""

from __future__ import annotations

import pickle

import msgspec
import pytest

from stretto import errors
from stretto.errors import Failure, FailureKind, StageError, StrettoError

CLASSES = [
    item
    for name in errors.__all__
    if isinstance(item := getattr(errors, name), type)
    and issubclass(item, StrettoError)
    and item is not StrettoError
]


def failure(kind: FailureKind) -> Failure:
    """Return a failure with every field set."""
    return Failure(
        kind=kind, detail="what", where="a/0#1", param="voice", code="not_found", retry_after_s=1.5
    )


def test_every_kind_has_one_class_and_every_class_is_exported() -> None:
    """No kind is forgotten, and none is shared."""
    assert sorted(cls.kind.value for cls in CLASSES) == sorted(kind.value for kind in FailureKind)


@pytest.mark.parametrize("kind", FailureKind)
def test_a_failure_and_its_exception_say_the_same(kind: FailureKind) -> None:
    """There and back nothing is lost."""
    error = failure(kind).exception()
    assert error.kind is kind
    assert str(error) == "what"
    assert error.failure() == failure(kind)
    assert Failure.of(error) == failure(kind)


@pytest.mark.parametrize("cls", CLASSES)
def test_every_class_pickles(cls: type[StrettoError]) -> None:
    """Keyword arguments included."""
    error = cls("what", where="a", param="p", code="c", retry_after_s=2.0)
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    assert type(copy) is cls
    assert copy.failure() == error.failure()


@pytest.mark.parametrize("kind", FailureKind)
def test_every_failure_serialises(kind: FailureKind) -> None:
    """As JSON for the event log, as msgpack on the wire."""
    assert msgspec.json.decode(msgspec.json.encode(failure(kind)), type=Failure) == failure(kind)
    short = Failure(kind=kind, detail="what")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(short), type=Failure) == short


def test_a_foreign_exception_becomes_a_stage_error() -> None:
    """With its type and its text, or a word that there is none."""
    assert Failure.of(ValueError("bad shape"), where="b") == Failure(
        kind=FailureKind.STAGE_ERROR, detail="ValueError: bad shape", where="b"
    )
    assert Failure.of(KeyError()).detail == "KeyError: no message"


def test_the_place_is_filled_in_only_where_it_is_missing() -> None:
    """The first one to know keeps the word."""
    assert Failure.of(errors.StageError("x"), where="b").where == "b"
    assert Failure.of(errors.StageError("x", where="a"), where="b").where == "a"


def test_only_what_another_try_may_cure_is_retryable() -> None:
    """Clients decide by this flag."""
    retryable = {cls.__name__ for cls in CLASSES if cls.retryable}
    assert retryable == {"Overloaded", "ReplicaLost", "NoReplica", "EngineDead", "PayloadLost"}


def test_an_impossible_transition_is_an_internal_error() -> None:
    """It is our bug, whoever catches it."""
    assert issubclass(errors.InvalidTransition, errors.InternalError)


def test_text_that_utf_8_cannot_hold_is_escaped() -> None:
    """A backend's exception may quote anything; its failure can be sent all the same."""
    failure = Failure.of(ValueError("boom \ud800"))
    assert failure.detail == "ValueError: boom \\ud800"
    assert StageError("boom \ud800").failure("talker/0").detail == "boom \\ud800"
    assert msgspec.msgpack.encode(failure)
