"""What a client knows of the stages, from notices alone."""

from __future__ import annotations

from stretto.engine.readiness import Readiness
from tests.support.fake_orchestrator import TALKER, VOCODER, facts, replica

TARGETS = {TALKER: 2, VOCODER: 1}


def test_an_engine_without_stages_is_not_ready() -> None:
    """Before the first welcome nothing is ready."""
    assert not Readiness({}).is_ready
    assert not Readiness({}).has_been_ready


def test_every_stage_needs_a_ready_replica() -> None:
    """One ready replica per stage is enough; a stage without one is described."""
    readiness = Readiness(TARGETS, (replica(TALKER, slot=0), replica(TALKER, "loading", slot=1)))
    assert not readiness.is_ready
    assert readiness.describe() == "stage 'vocoder' has no replica"
    readiness.replica(replica(VOCODER, "loading", detail="weights"))
    assert readiness.describe() == "stage 'vocoder' is loading (weights)"
    readiness.replica(replica(VOCODER))
    assert readiness.is_ready
    assert readiness.has_been_ready
    view = readiness.stages[0]
    assert (view.stage, view.target, view.ready, len(view.replicas)) == (TALKER, 2, 1, 2)


def test_a_late_notice_of_a_predecessor_is_ignored() -> None:
    """Incarnations only go up."""
    readiness = Readiness({VOCODER: 1}, (replica(VOCODER, incarnation=2),))
    readiness.replica(replica(VOCODER, "dead", incarnation=1))
    assert readiness.is_ready


def test_a_stopped_replica_is_forgotten_and_the_stage_has_still_been_ready() -> None:
    """Readiness goes, its history stays."""
    readiness = Readiness({VOCODER: 1}, (replica(VOCODER),))
    readiness.replica(replica(VOCODER, "stopped"))
    assert not readiness.is_ready
    assert readiness.has_been_ready
    assert readiness.stages[0].replicas == ()


def test_only_a_stage_that_was_never_ready_and_has_only_parked_replicas_has_failed() -> None:
    """A second replica that still loads, or an earlier success, keeps hope."""
    readiness = Readiness(TARGETS, (replica(TALKER, "parked", slot=0, detail="no file"),))
    failure = readiness.start_failure()
    assert failure is not None
    assert (failure.where, "no file" in failure.detail) == (TALKER, True)
    readiness.replica(replica(TALKER, "loading", slot=1))
    assert readiness.start_failure() is None
    readiness.replica(replica(TALKER, "parked", slot=1))
    assert readiness.start_failure() is not None
    readiness.stage(TALKER, facts())
    assert readiness.start_failure() is None


def test_where_nothing_is_meant_to_start_all_must_have_joined() -> None:
    """A server without replicas of its own has started when each stage has one from elsewhere."""
    readiness = Readiness({TALKER: 0, VOCODER: 0}, (replica(TALKER),))
    assert not readiness.has_started
    readiness.replica(replica(VOCODER))
    assert readiness.has_started
