"""Every wait has a deadline (row F11): its expiry fails that request alone and names who is at fault."""

from __future__ import annotations

from stretto.core import commands as do
from stretto.core import events as on
from stretto.core.graph import Limits, StageSpec
from stretto.errors import Failure, FailureKind
from stretto.types import ChannelId, RequestId
from tests.core.builders import (
    AUDIO,
    FULL,
    R1,
    R2,
    TEXT,
    VOICE,
    WORDS,
    A,
    B,
    Checked,
    aborted,
    cancelled,
    consumed,
    deployment,
    died,
    drained,
    edge,
    finished,
    is_empty,
    line_of_2,
    of,
    passed,
    pipeline,
    produced,
    replica,
    shared,
    started,
    submitted,
)

SHORT = Limits(
    queue_timeout_s=20.0,
    request_timeout_s=100.0,
    slow_client_timeout_s=30.0,
    cancel_timeout_s=5.0,
    stage_unavailable_timeout_s=15.0,
    client_window_chunks=2,
)
OTHER = ChannelId("1.2")
ONE_SLOT = (
    StageSpec(id=A, slots=1, progress_timeout_s=999.0, chunk_timeout_s=10.0),
    StageSpec(id=B, slots=1, progress_timeout_s=999.0, chunk_timeout_s=10.0),
)


def failure_at(router: Checked, now: float) -> Failure:
    """Let time pass to just before a moment, when nothing happens, and to it; return the failure."""
    assert of(do.Fail, ring(router, now - 0.001)) == []
    (fail,) = of(do.Fail, ring(router, now))
    assert isinstance(fail, do.Fail)
    return fail.failure


def ring(router: Checked, until: float) -> list[do.AnyCommand]:
    """Ring whenever the router wants it, until some moment."""
    commands: list[do.AnyCommand] = []
    while (when := router.next_deadline()) is not None and when <= until:
        commands += router.handle(passed(when))
    return commands


def test_row_F11_a_task_that_makes_no_progress() -> None:
    """A was fed all its input and is silent for ten seconds."""
    router = started(line_of_2(limits=SHORT, stages=ONE_SLOT))
    router.feed(submitted(now=1.0), produced(A, now=4.0))
    router.handle(consumed(1, now=5.0))
    failure = failure_at(router, 14.0)
    assert (failure.kind, failure.where) == (FailureKind.DEADLINE_EXCEEDED, "a/0#1")
    assert failure.detail == "request 1.1-1: stage a made no progress for 10 s"


def test_a_consumer_that_waits_for_its_source_is_not_at_fault() -> None:
    """B has absorbed all there is; when A goes on, B's time begins anew."""
    router = started(line_of_2(limits=SHORT, stages=ONE_SLOT))
    router.feed(submitted(), produced(A, now=1.0), consumed(1, now=2.0))
    router.handle(produced(A, 1, now=10.5))
    router.handle(produced(A, 2, now=15.0))
    failure = failure_at(router, 20.5)
    assert failure.where == "b/0#1"


def test_a_task_with_one_input_ended_and_another_absorbed_waits_for_its_source() -> None:
    """The request's own input is all there, but B needs A's next chunk."""
    both = deployment(
        pipeline(
            edge(TEXT, A),
            edge(VOICE, B, name="voice"),
            edge(A, B),
            outputs=[(AUDIO, B)],
            inputs=(TEXT, VOICE),
        ),
        limits=SHORT,
        stages=(
            StageSpec(id=A, progress_timeout_s=999.0, chunk_timeout_s=50.0),
            StageSpec(id=B, progress_timeout_s=999.0, chunk_timeout_s=10.0),
        ),
    )
    router = started(both)
    router.feed(
        submitted(inputs=(TEXT, VOICE)),
        consumed(1, edge_id="request.voice->b.voice", now=1.0),
        produced(A, now=2.0),
        consumed(1, now=3.0),
    )
    assert failure_at(router, 52.0).where == "a/0#1"


def test_absorbing_is_progress() -> None:
    """B works through what it was fed without making anything yet."""
    router = started(line_of_2(limits=SHORT, stages=ONE_SLOT))
    router.feed(submitted(), produced(A), produced(A, 1), finished(A), consumed(1, now=9.0))
    assert failure_at(router, 19.0).where == "b/0#1"


def test_credit_begins_a_producers_time_anew() -> None:
    """A could not go on for 50 s; it has its ten seconds from the moment that it can."""
    stages = (
        StageSpec(id=A, progress_timeout_s=999.0, chunk_timeout_s=10.0),
        StageSpec(id=B, progress_timeout_s=999.0, chunk_timeout_s=99.0),
    )
    router = started(line_of_2(limits=SHORT, stages=stages))
    router.feed(submitted(), *[produced(A, seq) for seq in range(4)], consumed(1, now=50.0))
    failure = failure_at(router, 60.0)
    assert failure.where == "a/0#1"
    assert "stage a made no progress for 10 s" in str(router.story(R1))


def test_a_preview_is_progress() -> None:
    """A diffusion stage shows that it works."""
    router = started(line_of_2(limits=SHORT, stages=ONE_SLOT))
    router.feed(submitted(), produced(A, kind="preview", now=8.0))
    assert failure_at(router, 18.0).where == "a/0#1"


def test_row_F11_a_client_that_takes_nothing() -> None:
    """Output waits for credit; the client is at fault, not the stage, and only its request fails."""
    router = started(line_of_2(limits=SHORT, stages=ONE_SLOT))
    router.feed(submitted(), produced(A), finished(A), consumed(1))
    router.feed(produced(B, now=1.0), produced(B, 1, now=2.0), drained(1, now=6.0))
    router.handle(produced(B, 2, now=7.0))
    failure = failure_at(router, 37.0)
    assert failure.where == "client"
    assert "the client took nothing for 30 s" in failure.detail


def test_a_slow_client_holds_up_its_sources_without_blame() -> None:
    """A waits for B's credit, B for the client's: only the client's wait runs."""
    router = started(line_of_2(limits=SHORT, chunks=1, stages=ONE_SLOT))
    router.feed(submitted(), produced(A), consumed(1), produced(B), produced(B, 1))
    router.handle(produced(A, 1))
    assert failure_at(router, 30.0).where == "client"


def test_row_F11_a_place_in_the_queue() -> None:
    """Row F11, slot: the server is too busy for too long."""
    router = started(
        line_of_2(
            limits=SHORT,
            stages=(StageSpec(id=A, slots=1, progress_timeout_s=999.0, chunk_timeout_s=99.0),),
        )
    )
    router.feed(submitted(R1), submitted(R2, now=1.0))
    failure = failure_at(router, 21.0)
    assert (failure.kind, failure.where) == (FailureKind.DEADLINE_EXCEEDED, "queue")
    assert failure.detail == "request 1.1-2: no free slot in 20 s; the server is busy"


def test_row_F11_a_slot_for_a_later_group() -> None:
    """A running request waits for B, whose only slot another one has."""
    full = deployment(
        pipeline(edge(TEXT, A), edge(A, B, mode=FULL), outputs=[(AUDIO, B)]),
        limits=SHORT,
        stages=(
            StageSpec(id=A, slots=2, progress_timeout_s=999.0, chunk_timeout_s=99.0),
            StageSpec(id=B, slots=1, progress_timeout_s=999.0, chunk_timeout_s=99.0),
        ),
    )
    router = started(full)
    router.feed(submitted(R1), submitted(R2), finished(A, now=1.0))
    router.handle(finished(A, request=R2, now=5.0))
    failure = failure_at(router, 25.0)
    assert failure.where == "b"
    assert "no free slot" in failure.detail


def test_row_F3_a_request_waits_for_a_restart_and_fails_with_the_reason() -> None:
    """The last death's reason is told, and when to try again."""
    router = started(line_of_2(limits=SHORT, stages=ONE_SLOT))
    router.feed(submitted(), died(replica(A), now=2.0, reason="exit 137"))
    failure = failure_at(router, 17.0)
    assert (failure.kind, failure.where) == (FailureKind.NO_REPLICA, "a")
    assert failure.retry_after_s == 1.0
    assert failure.detail == (
        "request 1.1-1: stage a had no usable replica for 15 s; the last one died: exit 137"
    )
    assert is_empty(router)


def test_row_F3_an_outage_counts_from_its_beginning() -> None:
    """A request that has queued for long is not failed the moment its stage goes down."""
    limits = Limits(queue_timeout_s=60.0, stage_unavailable_timeout_s=15.0)
    slow = StageSpec(id=A, slots=1, progress_timeout_s=999.0, chunk_timeout_s=99.0)
    router = started(line_of_2(limits=limits, stages=(slow,)))
    router.feed(submitted(R1), submitted(R2))
    ring(router, 40.0)
    router.handle(produced(A, now=40.0))
    router.handle(died(replica(A), now=40.0))
    assert router.story(R2) is not None
    failure = failure_at(router, 55.0)
    assert failure.kind is FailureKind.NO_REPLICA


def test_a_stage_that_never_had_a_replica() -> None:
    """There is no death to tell of."""
    router = started(line_of_2(limits=SHORT), loaded=False)
    router.handle(submitted())
    assert failure_at(router, 15.0).detail == (
        "request 1.1-1: stage a had no usable replica for 15 s"
    )


def test_the_whole_life_of_a_request() -> None:
    """However lively, it ends; the text names the stage that holds it."""
    router = started(line_of_2(limits=SHORT, stages=ONE_SLOT))
    router.feed(submitted(timeout_s=25.0), produced(A))
    for now in (9.0, 18.0, 24.0):
        router.handle(produced(A, kind="preview", now=now))
        router.handle(produced(B, kind="preview", now=now))
    failure = failure_at(router, 25.0)
    assert failure.where == "a"
    assert failure.detail == "request 1.1-1: not finished in 25 s"


def test_the_configured_life_bounds_what_a_client_asks_for() -> None:
    """A client may ask for less only; in the queue it is the queue that holds it."""
    limits = Limits(queue_timeout_s=500.0, request_timeout_s=30.0)
    router = started(line_of_2(limits=limits), loaded=False)
    router.handle(submitted(timeout_s=1000.0))
    router.handle(died(replica(A), now=20.0))
    failure = failure_at(router, 30.0)
    assert (failure.where, failure.kind) == ("queue", FailureKind.DEADLINE_EXCEEDED)


def test_a_timer_that_rings_early_does_no_harm() -> None:
    """Nothing is due."""
    router = started(line_of_2(limits=SHORT))
    router.handle(submitted())
    assert router.handle(passed(0.5)) == ()


def test_a_cancelled_task_that_does_not_end_costs_its_replica() -> None:
    """Architecture 11.6: expiry evicts; tasks that stand there too are repeated."""
    router = started(
        line_of_2(
            stages=(
                StageSpec(id=A, replicas=2, slots=2),
                StageSpec(id=B, slots=9),
            )
        )
    )
    requests = [R1, R2]
    for request in requests:
        router.handle(submitted(request))
    router.handle(submitted(third := RequestId("1.1-3")))
    router.handle(aborted(R1))
    commands = ring(router, 5.0)
    stopped = [c.replica for c in commands if isinstance(c, do.StopReplica)]
    assert len(stopped) == 1
    assert [c.task.request for c in commands if isinstance(c, do.Dispatch)] == [third]
    assert [c.state.detail for c in commands if isinstance(c, do.Announce)] == [
        "did not end cancelled task 1.1-1@a in 5 s"
    ]


def test_two_cancelled_tasks_of_one_frozen_replica_evict_it_once() -> None:
    """The first expiry clears the second."""
    router = started(line_of_2())
    router.feed(submitted(R1), submitted(R2), aborted(R1), aborted(R2))
    commands = router.handle(passed(5.0))
    assert len(of(do.StopReplica, commands)) == 1
    assert is_empty(router)


def test_an_eviction_and_the_request_it_fails_expire_together() -> None:
    """One deadline's outcome ends the request of the next one that is due at the same time."""
    limits = Limits(cancel_timeout_s=5.0, request_timeout_s=5.0)
    router = started(line_of_2(limits=limits))
    router.feed(submitted(R1), submitted(R2), aborted(R1), produced(A, request=R2))
    commands = router.handle(passed(5.0))
    assert [c.request for c in commands if isinstance(c, do.Fail)] == [R2]


def test_an_abandoned_task_has_only_the_deadline_of_its_cancellation() -> None:
    """Its silence is no failure of the request."""
    router = started(line_of_2(limits=Limits(cancel_timeout_s=20.0)))
    router.feed(submitted(), produced(A), finished(B))
    assert of(do.Fail, ring(router, 19.0)) == []
    commands = ring(router, 20.0)
    assert len(of(do.StopReplica, commands)) == 1
    assert len(of(do.Finish, commands)) == 1


class TestShutdown:
    """Finish what runs, within a bound; then stop everything."""

    def test_row_E20_an_idle_engine_stops_at_once(self) -> None:
        """Every process is stopped, then the shell may go; asking twice changes nothing."""
        router = started(line_of_2())
        shutdown = on.ShutdownRequested(now=0.0, drain_s=9.0)
        commands = router.handle(shutdown)
        assert [c.replica for c in commands if isinstance(c, do.StopReplica)] == [
            replica(A),
            replica(B),
        ]
        assert commands[-1] == do.Exit()
        assert router.handle(shutdown) == ()
        assert router.next_deadline() is None

    def test_what_runs_is_finished_first(self) -> None:
        """A queued request runs too; the exit follows the last one."""
        router = started(line_of_2(stages=ONE_SLOT))
        router.feed(submitted(R1), submitted(R2), on.ShutdownRequested(now=0.0, drain_s=9.0))
        router.handle(finished(A))
        assert len(of(do.Dispatch, router.handle(finished(B)))) >= 1
        router.handle(finished(A, request=R2))
        assert router.handle(finished(B, request=R2))[-1] == do.Exit()

    def test_a_replica_that_dies_meanwhile_is_still_replaced(self) -> None:
        """What runs may need it."""
        router = started(line_of_2())
        router.feed(submitted(), on.ShutdownRequested(now=0.0, drain_s=9.0), died(replica(A)))
        assert len(of(do.StartReplica, router.handle(passed(0.1)))) == 1

    def test_what_is_not_finished_in_time_fails(self) -> None:
        """Running, queued and draining requests end, and no process is left; nothing remains."""
        router = started(line_of_2(stages=ONE_SLOT))
        router.feed(submitted(R1), submitted(R2), aborted(R1, now=8.0))
        router.handle(cancelled(A, now=8.0))
        router.handle(submitted(third := RequestId("1.1-3"), now=8.0))
        router.handle(aborted(R2, now=8.5))
        router.handle(on.ShutdownRequested(now=8.5, drain_s=1.0))
        commands = router.handle(passed(9.5))
        (fail,) = [c for c in commands if isinstance(c, do.Fail)]
        assert (fail.request, fail.failure.kind) == (third, FailureKind.ENGINE_DEAD)
        assert fail.failure.code == "server_shutting_down"
        assert commands[-1] == do.Exit()
        assert is_empty(router)
        assert router.next_deadline() is None
        assert router.feed(cancelled(A, request=R2), died(replica(A)), passed(99.0)) == ()

    def test_shut_down_before_it_has_started(self) -> None:
        """No process is asked for any more."""
        router = Checked(line_of_2())
        assert router.handle(on.ShutdownRequested(now=0.0, drain_s=9.0)) == (do.Exit(),)
        assert router.handle(on.EngineStarted(now=0.0)) == ()


class TestChannels:
    """An API process owns its requests and its views."""

    def test_row_Q18_the_death_of_an_api_process_aborts_only_its_requests(self) -> None:
        """In all stages; the other's go on, and what it viewed is dropped."""
        other = RequestId("1.2-1")
        channel = OTHER
        router = started(shared())
        router.handle(on.ChannelOpened(now=0.0, channel=channel))
        router.feed(submitted(R1, to="chat", outputs=(WORDS,)))
        router.handle(submitted(other, to="chat", outputs=(WORDS,), channel=channel))
        commands = router.handle(on.ChannelClosed(now=0.0, channel=channel))
        assert [c.request for c in commands if isinstance(c, do.Cancelled)] == [other]
        assert [c.task.request for c in commands if isinstance(c, do.CancelTask)] == [other]
        assert router.handle(on.ChannelClosed(now=0.0, channel=channel)) == ()
        assert router.statistics().running == 1

    def test_slots_of_a_closed_channel_go_to_others(self) -> None:
        """Nothing of the closed channel is started on the way."""
        channel = OTHER
        router = started(line_of_2(stages=ONE_SLOT))
        router.handle(on.ChannelOpened(now=0.0, channel=channel))
        for number in range(3):
            router.handle(submitted(RequestId(f"1.2-{number}"), channel=channel))
        router.handle(submitted(R1))
        commands = router.handle(on.ChannelClosed(now=0.0, channel=channel))
        assert of(do.Dispatch, commands) == []
        commands = router.handle(cancelled(A, request=RequestId("1.2-0")))
        assert [c.task.request for c in commands if isinstance(c, do.Dispatch)] == [R1]

    def test_an_abort_of_a_closed_channel_is_not_acknowledged(self) -> None:
        """There is nobody to hear it."""
        router = started(line_of_2())
        gone = on.RequestAborted(now=0.0, request=R1, channel=OTHER, acknowledge=True)
        assert router.handle(gone) == ()


def test_time_never_runs_backwards() -> None:
    """An event stamped earlier than its predecessor counts as simultaneous."""
    router = started(line_of_2())
    router.feed(submitted(now=5.0), finished(A, now=3.0))
    finish = router.handle(finished(B, now=4.0))[-1]
    assert isinstance(finish, do.Finish)
    assert all(stage.ran_s >= 0 for stage in finish.timings.stages)
