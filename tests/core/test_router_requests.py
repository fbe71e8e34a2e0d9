"""Requests from submission to their terminal, without faults."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from stretto.core import commands as do
from stretto.core import events as on
from stretto.core.graph import Limits, StageSpec
from stretto.core.requests import RequestState
from stretto.core.router import ARCHIVED_STORIES
from stretto.errors import Failure, FailureKind, InvalidTransition
from stretto.types import ChannelId, EdgeId, InputName, OutputName, RequestId
from tests.core.builders import (
    API,
    AUDIO,
    FULL,
    R1,
    R2,
    R3,
    R4,
    TEXT,
    VOICE,
    WORDS,
    A,
    B,
    C,
    Checked,
    D,
    aborted,
    cancelled,
    consumed,
    deployment,
    died,
    drained,
    edge,
    failed,
    finished,
    inline,
    is_empty,
    line_of_2,
    of,
    pipeline,
    produced,
    ready,
    replica,
    shared,
    shm,
    started,
    submitted,
    task,
    terminals,
)

if TYPE_CHECKING:
    from stretto.core.story import StoryEntry

ONE_SLOT = (
    StageSpec(id=A, slots=1),
    StageSpec(id=B, slots=1),
)


def test_a_request_walks_from_submission_to_finish() -> None:
    """Every command of an undisturbed request, in order."""
    router = started(line_of_2())
    (spec_a, spec_b) = router.deployment.pipelines[0].edges
    assert router.handle(submitted(options=inline("options"), now=1.0)) == (
        do.Dispatch(
            replica=replica(A),
            task=task(A),
            pipeline=router.deployment.pipelines[0].name,
            edges=(spec_a,),
            options=inline("options"),
            chunks=4,
            bytes=1000,
        ),
        do.Feed(
            replica=replica(A),
            task=task(A),
            edge=EdgeId("request.text->a.in"),
            seq=0,
            payload=inline(f"{R1}.text"),
        ),
        do.CloseInput(replica=replica(A), task=task(A), edge=EdgeId("request.text->a.in")),
    )
    chunk = inline("frames", 300)
    assert router.handle(produced(A, payload=chunk, now=2.0)) == (
        do.Dispatch(
            replica=replica(B),
            task=task(B),
            pipeline=router.deployment.pipelines[0].name,
            edges=(spec_b,),
            options=inline("options"),
            chunks=64,
            bytes=1024 * 1024,
        ),
        do.Feed(replica=replica(B), task=task(B), edge=EdgeId("a->b.in"), seq=0, payload=chunk),
        do.Release(payload=inline(f"{R1}.text")),
    )
    assert router.handle(consumed(1, now=3.0)) == ()
    first, *rest = router.handle(produced(B, payload=shm("audio"), now=4.0))
    assert isinstance(first, do.Emit)
    assert (first.seq, first.offset, first.length, first.payload) == (0, 0, 10, shm("audio"))
    assert first.timings is not None
    assert [stage.first_chunk_s for stage in first.timings.stages] == [1.0, 2.0]
    assert rest == [do.Release(payload=chunk)]
    assert router.handle(finished(A, now=5.0)) == (
        do.CloseInput(replica=replica(B), task=task(B), edge=EdgeId("a->b.in")),
    )
    final, finish, release = router.handle(finished(B, now=6.0))
    assert final == do.Emit(
        channel=API, request=R1, output=AUDIO, seq=1, payload=None, offset=10, final=True
    )
    assert isinstance(finish, do.Finish)
    assert release == do.Release(payload=inline("options"))
    assert finish.timings.stages[0].ran_s == 4.0
    timing = finish.timings.stages[1]
    assert (timing.replica, timing.chunks, timing.units, timing.attempts) == (replica(B), 1, 10, 1)
    assert (finish.timings.queued_s, timing.ran_s, timing.media_s) == (0.0, 4.0, 0.1)
    assert router.handle(on.PayloadDone(now=7.0, holder=API, payload=shm("audio"))) == (
        do.Release(payload=shm("audio")),
    )
    assert is_empty(router)
    assert router.next_deadline() is None


def test_the_story_tells_what_happened() -> None:
    """It is there while the request runs and afterwards; an unknown request has none."""
    router = started(line_of_2())
    router.feed(submitted(label="mine", now=1.0), produced(A, now=2.0))
    story = router.story(R1)
    assert story is not None
    router.feed(produced(A, 1, now=3.0), finished(A, now=4.0), finished(B, now=5.0))
    assert router.story(R1) is story
    assert [entry.what for entry in story.entries()] == [
        "submitted to p as mine",
        "a: dispatched to a/0#1",
        "a: first chunk",
        "b: dispatched to b/0#1",
        "a: finished after 2 chunks",
        "b: finished after 0 chunks",
        "finished",
    ]
    assert router.story(R2) is None
    assert router.state_of(R1) is RequestState.DONE


def test_the_story_of_a_failure_tells_what_each_stage_had_done() -> None:
    """The failed stage's words, and how far the others had come when they were told to stop."""
    router = started(line_of_2())
    router.feed(submitted(), produced(A), produced(A, 1), failed(B, detail="no such voice"))
    assert [entry.what for entry in story_of(router)][-3:] == [
        "b: failed: no such voice",
        "failed",
        "a: told to stop after 2 chunks",
    ]


def story_of(router: Checked) -> tuple[StoryEntry, ...]:
    """Return the first request's story."""
    story = router.story(R1)
    assert story is not None
    return story.entries()


def test_stories_of_ended_requests_are_bounded() -> None:
    """The oldest is forgotten."""
    router = started(line_of_2())
    for number in range(ARCHIVED_STORIES + 1):
        router.feed(submitted(RequestId(f"r{number}")), aborted(RequestId(f"r{number}")))
        router.handle(cancelled(A, request=RequestId(f"r{number}")))
    assert router.story(RequestId("r0")) is None
    assert router.story(RequestId("r1")) is not None


class TestRefusals:
    """A refused request gets one `Reject`, and its payloads are released."""

    def refused(self, router: Checked, event: on.RequestSubmitted) -> Failure:
        """Return why the event's request was refused."""
        reject, *releases = router.handle(event)
        assert isinstance(reject, do.Reject)
        assert (reject.channel, reject.request) == (event.channel, event.request)
        assert [r.payload for r in releases if isinstance(r, do.Release)] == list(
            on.payloads_of(event)
        )
        assert router.statistics().counters.rejected == 1
        return reject.failure

    def test_an_unknown_pipeline(self) -> None:
        """The error names the pipelines there are."""
        failure = self.refused(started(shared()), submitted(to="sing"))
        assert failure.kind is FailureKind.INVALID_REQUEST
        assert (failure.param, failure.code) == ("model", "model_not_found")
        assert failure.detail == "there is no pipeline 'sing'; this server has: chat, speech"

    @pytest.mark.parametrize(
        ("inputs", "outputs"),
        [((VOICE,), ()), ((TEXT, VOICE), ()), ((TEXT,), (OutputName("video"),)), ((), ())],
    )
    def test_inputs_and_outputs_that_do_not_connect(
        self, inputs: tuple[InputName, ...], outputs: tuple[OutputName, ...]
    ) -> None:
        """The error names what can be given and had."""
        event = submitted(to="chat", inputs=inputs, outputs=outputs)
        failure = self.refused(started(shared()), event)
        assert (failure.param, failure.code) == ("outputs", "unsupported_value")
        assert failure.detail == (
            f"pipeline 'chat' can't make {outputs[0] if outputs else 'its outputs'} from "
            f"{', '.join(inputs) or 'nothing'}; its inputs are text, its outputs words, audio"
        )

    def test_an_input_given_twice(self) -> None:
        """One of the two would be lost; the payload that both name is released once."""
        reject, *releases = started(shared()).handle(submitted(to="chat", inputs=(TEXT, TEXT)))
        assert isinstance(reject, do.Reject)
        assert releases == [do.Release(payload=inline(f"{R1}.text"))]

    def test_a_full_queue(self) -> None:
        """One more than may wait is refused with a hint when to come back."""
        router = started(line_of_2(limits=Limits(max_queued=1), stages=ONE_SLOT))
        router.feed(submitted(R1), submitted(R2))
        failure = self.refused(router, submitted(R3, options=shm("options")))
        assert (failure.kind, failure.code) == (FailureKind.OVERLOADED, "queue_full")
        assert failure.retry_after_s == 1.0

    def test_a_full_queue_knows_how_fast_it_drains(self) -> None:
        """Two starts in 40 seconds and one waiting: half of it takes ten."""
        router = started(line_of_2(limits=Limits(max_queued=1), stages=ONE_SLOT))
        router.feed(submitted(R1), submitted(R2), finished(A), finished(B, now=20.0))
        router.handle(submitted(R3, now=30.0))
        assert self.refused(router, submitted(R4, now=40.0)).retry_after_s == 10.0

    def test_while_shutting_down(self) -> None:
        """Nothing new is taken."""
        router = started(line_of_2())
        router.feed(submitted(R1), on.ShutdownRequested(now=0.0, drain_s=9.0))
        failure = self.refused(router, submitted(R2))
        assert failure.code == "server_shutting_down"


def test_a_submission_of_a_closed_channel_is_late() -> None:
    """Its payloads are released and nothing is accepted."""
    router = started(line_of_2())
    gone = ChannelId("9.9")
    commands = router.handle(submitted(channel=gone, options=shm("options")))
    assert commands == (
        do.Release(payload=inline(f"{R1}.text")),
        do.Release(payload=shm("options")),
    )
    counters = router.statistics().counters
    assert (counters.received, counters.late) == (0, 1)


def test_an_input_that_the_plan_does_not_need_is_released() -> None:
    """A request may bring more than its outputs take."""
    router = started(
        deployment(
            pipeline(
                edge(TEXT, A),
                edge(VOICE, B),
                outputs=[(WORDS, A), (AUDIO, B)],
                inputs=(TEXT, VOICE),
            )
        )
    )
    commands = router.handle(submitted(inputs=(TEXT, VOICE), outputs=(WORDS,)))
    assert of(do.Release, commands) == [do.Release(payload=inline(f"{R1}.voice"))]
    assert [c.task.stage for c in commands if isinstance(c, do.Dispatch)] == [A]


class TestSlots:
    """Reservation, waiting and binding."""

    def test_a_group_is_reserved_together(self) -> None:
        """B's only slot is promised to the first request, although A has room for the second."""
        router = started(line_of_2(stages=(StageSpec(id=B, slots=1),)))
        router.handle(submitted(R1))
        assert router.handle(submitted(R2)) == ()
        assert router.state_of(R2) is RequestState.QUEUED
        statistics = router.statistics()
        assert (statistics.queued, statistics.running) == (1, 1)
        assert [stage.reserved for stage in statistics.stages] == [0, 1]

    def test_a_freed_slot_goes_to_the_first_in_line(self) -> None:
        """Priority first, then arrival."""
        router = started(line_of_2(stages=ONE_SLOT))
        router.feed(submitted(R1), submitted(R2, priority=5), submitted(R3), submitted(R4))
        router.feed(produced(A), finished(A))
        commands = router.handle(finished(B))
        assert [c.task.request for c in commands if isinstance(c, do.Dispatch)] == [R3]

    def test_a_slot_is_held_until_the_end_of_a_cancelled_task(self) -> None:
        """An abort frees nothing before the replica has answered."""
        router = started(line_of_2(stages=ONE_SLOT))
        router.feed(submitted(R1), submitted(R2))
        assert of(do.Dispatch, router.handle(aborted(R1))) == []
        assert len(of(do.Dispatch, router.handle(cancelled(A)))) == 1

    def test_work_goes_to_the_replica_with_the_least(self) -> None:
        """Two replicas share four requests evenly."""
        router = started(
            line_of_2(
                stages=(
                    StageSpec(id=A, replicas=2, slots=2),
                    StageSpec(id=B),
                )
            )
        )
        where = [
            command.replica.slot
            for request in (R1, R2, R3, R4)
            for command in router.handle(submitted(request))
            if isinstance(command, do.Dispatch)
        ]
        assert sorted(where) == [0, 0, 1, 1]

    def test_requests_wait_for_the_first_replica(self) -> None:
        """Submitted while the engine loads, they start in order when it is ready."""
        router = started(line_of_2(), loaded=False)
        router.feed(submitted(R1), submitted(R2))
        ready(router, replica(B))
        router.handle(on.ReplicaJoined(now=0.0, replica=replica(A)))
        commands = router.handle(on.ReplicaReady(now=0.0, replica=replica(A), slots=2))
        assert [c.task.request for c in commands if isinstance(c, do.Dispatch)] == [R1, R2]

    def test_words_do_not_wait_for_a_busy_voice(self) -> None:
        """A request that needs only A runs while others wait for B."""
        router = started(
            shared(
                stages=(
                    StageSpec(id=A, slots=8),
                    StageSpec(id=B, slots=1),
                )
            )
        )
        router.feed(submitted(R1, to="speech"), submitted(R2, to="chat"))
        commands = router.handle(submitted(R3, to="chat", outputs=(WORDS,)))
        assert [c.task for c in commands if isinstance(c, do.Dispatch)] == [task(A, R3)]

    def test_words_do_not_wait_for_a_dead_voice(self) -> None:
        """An outage of B leaves requests that do not need it alone."""
        router = started(shared(), loaded=False)
        ready(router, replica(A), slots=1)
        router.handle(submitted(R1, to="chat"))
        commands = router.handle(submitted(R2, to="chat", outputs=(WORDS,)))
        assert [c.task for c in commands if isinstance(c, do.Dispatch)] == [task(A, R2)]

    def test_a_running_request_goes_before_queued_ones(self) -> None:
        """It waits for a second entry stage while it holds the first: older ones let it pass."""
        router = started(
            deployment(
                pipeline(
                    edge(TEXT, A),
                    edge(TEXT, B),
                    edge(A, C, mode=FULL, name="left"),
                    edge(B, C, mode=FULL, name="right"),
                    outputs=[(AUDIO, C)],
                    name="both",
                ),
                pipeline(edge(TEXT, B), outputs=[(AUDIO, B)], name="one"),
                stages=(StageSpec(id=B, slots=1),),
            )
        )
        router.feed(submitted(R1, to="one"), submitted(R2, to="one"), submitted(R3, to="both"))
        commands = router.handle(finished(B, request=R1))
        assert [c.task for c in commands if isinstance(c, do.Dispatch)] == [task(B, R3)]

    def test_a_group_behind_a_full_edge_is_reserved_when_it_can_start(self) -> None:
        """B takes no slot while A works."""
        full = deployment(
            pipeline(edge(TEXT, A), edge(A, B, mode=FULL), outputs=[(AUDIO, B)]),
            stages=(
                StageSpec(id=A, slots=4),
                StageSpec(id=B, slots=1),
            ),
        )
        router = started(full)
        router.feed(submitted(R1), submitted(R2))
        assert [stage.reserved for stage in router.statistics().stages] == [0, 0]
        assert [c.task for c in router.handle(finished(A)) if isinstance(c, do.Dispatch)] == [
            task(B)
        ]
        assert of(do.Dispatch, router.handle(finished(A, request=R2))) == []
        assert router.state_of(R2) is RequestState.RUNNING
        commands = router.handle(finished(B))
        assert [c.task for c in commands if isinstance(c, do.Dispatch)] == [task(B, R2)]


class TestEnds:
    """Every way to end is one terminal and a clean table."""

    def test_row_F10_a_failed_task_fails_its_request_alone(self) -> None:
        """The stage's own words reach the client; the other stage's task is cancelled."""
        router = started(line_of_2())
        router.feed(submitted(R1), submitted(R2), produced(A))
        commands = router.handle(failed(B, detail="no such voice"))
        assert commands == (
            do.Fail(
                channel=API,
                request=R1,
                failure=Failure(kind=FailureKind.STAGE_ERROR, detail="no such voice", where="b"),
            ),
            do.CancelTask(replica=replica(A), task=task(A)),
            do.Release(payload=inline(f"{R1}.a.0")),
        )
        assert router.state_of(R1) is RequestState.DRAINING
        assert router.state_of(R2) is RequestState.RUNNING
        router.handle(cancelled(A))
        assert router.state_of(R1) is RequestState.DONE

    def test_row_M6_an_aborted_request_ends_once_and_is_acknowledged(self) -> None:
        """The second abort is late: acknowledged as having stopped nothing."""
        router = started(line_of_2())
        router.handle(submitted())
        assert router.handle(aborted(acknowledge=True)) == (
            do.Cancelled(channel=API, request=R1),
            do.CancelTask(replica=replica(A), task=task(A)),
            do.Release(payload=inline(f"{R1}.text")),
            do.AcknowledgeAbort(channel=API, request=R1, stopped=True),
        )
        stopped_nothing = do.AcknowledgeAbort(channel=API, request=R1, stopped=False)
        assert router.handle(aborted(acknowledge=True)) == (stopped_nothing,)
        router.handle(cancelled(A))
        assert router.handle(aborted(acknowledge=True)) == (stopped_nothing,)
        assert router.handle(aborted()) == ()
        assert is_empty(router)

    def test_row_M6_a_queued_request_is_aborted_without_a_trace(self) -> None:
        """Abandoned waiters leave the queue at once."""
        router = started(line_of_2(stages=ONE_SLOT))
        router.feed(submitted(R1), submitted(R2))
        assert router.handle(aborted(R2)) == (
            do.Cancelled(channel=API, request=R2),
            do.Release(payload=inline(f"{R2}.text")),
        )
        assert router.statistics().queued == 0

    def test_row_M6_an_abort_between_stages_gives_the_reserved_slot_back(self) -> None:
        """A has ended, and B has not begun since its replica has died: others get the promise."""
        router = started(
            line_of_2(stages=(StageSpec(id=A, slots=9), StageSpec(id=B, slots=1, replicas=2)))
        )
        router.feed(submitted(R1), submitted(R2), submitted(R3))
        router.feed(produced(A, request=R1), died(replica(B, 1)))
        router.feed(produced(A, request=R2), finished(A, request=R2))
        assert router.statistics().stages[1].reserved == 1
        assert of(do.Dispatch, router.handle(aborted(R2))) == []
        assert router.statistics().stages[1].reserved == 0

    def test_row_M6_an_abort_of_what_has_not_begun_lets_the_next_one_start(self) -> None:
        """B's promised slot is free at once, although A's task has yet to end."""
        router = started(line_of_2(stages=(StageSpec(id=A, slots=9), StageSpec(id=B, slots=1))))
        router.feed(submitted(R1), submitted(R2))
        commands = router.handle(aborted(R1))
        assert [c.task for c in commands if isinstance(c, do.Dispatch)] == [task(A, R2)]

    def test_a_task_that_finishes_instead_of_being_cancelled_ends_too(self) -> None:
        """The abort crossed the end on the way."""
        for end in (finished(A), failed(A), cancelled(A)):
            router = started(line_of_2())
            router.feed(submitted(), aborted())
            assert router.handle(end) == ()
            assert is_empty(router)

    def test_a_refused_event_ends_its_request_alone(self) -> None:
        """The shell reports the refusal, and the event's payload is not lost."""
        router = started(line_of_2())
        router.feed(submitted(R1), submitted(R2))
        event = produced(A, 7)
        with pytest.raises(InvalidTransition, match=r"produced chunk 7 .* its next is 0"):
            router.handle(event)
        failure = Failure(kind=FailureKind.INVALID_TRANSITION, detail="a bug")
        broken = on.RequestBroken(
            now=0.0, request=R1, failure=failure, payloads=on.payloads_of(event)
        )
        assert router.handle(broken) == (
            do.Release(payload=inline(f"{R1}.a.7")),
            do.Fail(channel=API, request=R1, failure=failure),
            do.CancelTask(replica=replica(A), task=task(A)),
            do.Release(payload=inline(f"{R1}.text")),
        )
        assert router.handle(broken) == (do.Release(payload=inline(f"{R1}.a.7")),)
        assert router.state_of(R2) is RequestState.RUNNING

    def test_a_refusal_tells_the_story(self) -> None:
        """The text of the error is enough to understand the bug."""
        router = started(line_of_2())
        router.handle(submitted(now=1.0))
        with pytest.raises(InvalidTransition) as caught:
            router.handle(cancelled(A))
        assert caught.value.detail == (
            "this is a bug in Stretto: 1.1-1@a was cancelled, but nobody asked for that\n"
            "1.000 submitted to p\n1.000 a: dispatched to a/0#1"
        )

    def test_row_E22_a_raw_end_is_an_empty_terminal(self) -> None:
        """A stage without output still ends its output, once."""
        router = started(line_of_2())
        router.feed(submitted(), finished(A))
        emit, finish = router.handle(finished(B))
        assert isinstance(emit, do.Emit)
        assert (emit.seq, emit.payload, emit.final) == (0, None, True)
        assert isinstance(finish, do.Finish)

    def test_row_E22_the_end_follows_the_data_and_comes_once(self) -> None:
        """Data and end of one wake-up: the empty terminal is numbered behind the data, once."""
        router = started(line_of_2())
        router.feed(submitted(), produced(A), finished(A))
        (data,) = of(do.Emit, router.handle(produced(B)))
        (end,) = of(do.Emit, router.handle(finished(B)))
        assert isinstance(data, do.Emit)
        assert isinstance(end, do.Emit)
        assert [(data.seq, data.final), (end.seq, end.final)] == [(0, False), (1, True)]
        assert (end.payload, end.offset) == (None, data.offset + data.length)
        assert router.handle(finished(B)) == (), "late"

    def test_row_E23_the_final_message_is_complete(self) -> None:
        """Per stage: the units made, the seconds, and why it ended, as its backend said last."""
        router = started(line_of_2())
        router.feed(submitted(), produced(A), finished(A, now=1.0))
        for seq, reason in enumerate(("", "stop", "length")):
            chunk = on.ChunkProduced(
                now=2.0, task=task(B), seq=seq, payload=inline(seq), length=5, finish_reason=reason
            )
            router.handle(chunk)
        (finish,) = terminals(router.handle(finished(B, now=3.0)))
        assert isinstance(finish, do.Finish)
        a, b = finish.timings.stages
        assert (a.stage, a.chunks, a.units, a.ran_s, a.finish_reason) == (A, 1, 10, 1.0, "")
        assert (b.stage, b.chunks, b.units, b.ran_s, b.finish_reason) == (B, 3, 15, 3.0, "length")

    def test_row_E23_words_end_before_the_audio_and_finish_waits_for_both(self) -> None:
        """Each output has its own end."""
        router = started(shared())
        router.feed(submitted(to="chat"), produced(A))
        commands = router.handle(finished(A))
        assert [c.output for c in commands if isinstance(c, do.Emit) and c.final] == [WORDS]
        assert terminals(commands) == []
        commands = router.handle(finished(B))
        assert [c.output for c in commands if isinstance(c, do.Emit) and c.final] == [AUDIO]
        assert len(terminals(commands)) == 1


class TestEarlyEnds:
    """A consumer that has ended wants no more."""

    def test_row_F5_a_source_that_nobody_wants_is_told_to_stop(self) -> None:
        """B ends while A still works: A is abandoned, and its end is no failure."""
        for end in (cancelled(A), finished(A), failed(A)):
            router = started(line_of_2())
            router.feed(submitted(), produced(A))
            commands = router.handle(finished(B))
            assert of(do.CancelTask, commands) == [do.CancelTask(replica=replica(A), task=task(A))]
            assert terminals(commands) == []
            late = router.handle(produced(A, 1))
            assert late == (do.Release(payload=inline(f"{R1}.a.1")),)
            finish = router.handle(end)
            assert [type(c) for c in terminals(finish)] == [do.Finish]
            assert is_empty(router)

    def test_a_source_with_an_output_of_its_own_goes_on(self) -> None:
        """The client still wants A's words; A needs no credit of B any more."""
        router = started(shared())
        router.feed(submitted(to="chat"), produced(A))
        commands = router.handle(finished(B))
        assert of(do.CancelTask, commands) == []
        assert len(of(do.Grant, commands)) == 1
        assert len(of(do.Emit, router.handle(produced(A, 1)))) == 1
        assert [type(c) for c in terminals(router.handle(finished(A)))] == [do.Finish]
        assert is_empty(router)

    def test_the_whole_line_behind_an_early_end_stops_at_once(self) -> None:
        """C ends: B is told to stop, and so is A, which fed only B."""
        router = started(
            deployment(pipeline(edge(TEXT, A), edge(A, B), edge(B, C), outputs=[(AUDIO, C)]))
        )
        router.feed(submitted(), produced(A), produced(B))
        commands = router.handle(finished(C))
        assert [c.task.stage for c in commands if isinstance(c, do.CancelTask)] == [A, B]
        assert router.handle(consumed(1)) == (), "late"
        assert router.handle(finished(A)) == (), "it crossed its cancellation"
        assert [type(c) for c in terminals(router.handle(cancelled(B)))] == [do.Finish]

    def test_an_abort_tells_an_abandoned_task_nothing_new(self) -> None:
        """It was told to stop already."""
        router = started(line_of_2())
        router.feed(submitted(), produced(A), finished(B))
        assert router.handle(aborted()) == (do.Cancelled(channel=API, request=R1),)
        router.handle(cancelled(A))
        assert is_empty(router)

    def test_a_source_in_a_waiting_group_ends_without_the_others(self) -> None:
        """B wants no more of A, but D still wants what C makes: their group waits on, without A."""
        router = started(
            deployment(
                pipeline(
                    edge(TEXT, C),
                    edge(C, A),
                    edge(C, D),
                    edge(VOICE, B, name="voice"),
                    edge(A, B, mode=FULL),
                    outputs=[(AUDIO, B), (WORDS, D)],
                    inputs=(TEXT, VOICE),
                ),
                stages=(StageSpec(id=C, slots=1),),
            )
        )
        router.feed(submitted(R1, inputs=(TEXT, VOICE)), submitted(R2, inputs=(TEXT, VOICE)))
        assert terminals(router.handle(finished(B, request=R2))) == []
        assert router.state_of(R2) is RequestState.RUNNING
        router.feed(aborted(R1), cancelled(B))
        commands = router.handle(cancelled(C))
        assert [c.task for c in commands if isinstance(c, do.Dispatch)] == [task(C, R2)]
        router.feed(produced(C, request=R2), finished(C, request=R2))
        end = router.handle(finished(D, request=R2))
        assert [type(c) for c in terminals(end)] == [do.Finish]
        assert is_empty(router)

    def two_inputs(self, slots: int = 4) -> Checked:
        """Return `voice → b`, `text → a`, and `a → b` in full: B may end before A has begun."""
        return started(
            deployment(
                pipeline(
                    edge(TEXT, A),
                    edge(VOICE, B, name="voice"),
                    edge(A, B, mode=FULL),
                    outputs=[(AUDIO, B)],
                    inputs=(TEXT, VOICE),
                ),
                stages=(
                    StageSpec(id=A, slots=slots),
                    StageSpec(id=B, slots=4),
                ),
            )
        )

    def test_a_source_that_waits_in_line_leaves_it(self) -> None:
        """B ends while A has no slot yet: the request finishes once, and A's place in line is free."""
        router = self.two_inputs(slots=1)
        router.feed(submitted(R1, inputs=(TEXT, VOICE)), submitted(R2, inputs=(TEXT, VOICE)))
        commands = router.handle(finished(B, request=R2))
        assert [type(c) for c in terminals(commands)] == [do.Finish]
        assert router.state_of(R2) is RequestState.DONE
        assert of(do.Dispatch, router.handle(finished(A))) == []

    def test_a_source_that_waits_for_a_replica_is_not_dispatched_any_more(self) -> None:
        """A's replica has died and A waits for the next one when B ends."""
        router = self.two_inputs()
        router.handle(submitted(inputs=(TEXT, VOICE)))
        router.handle(on.ReplicaDied(now=0.0, replica=replica(A), reason="x"))
        commands = router.handle(finished(B))
        assert [type(c) for c in terminals(commands)] == [do.Finish]
        assert is_empty(router)

    def test_an_abandoned_task_whose_replica_dies_is_no_failure(self) -> None:
        """Nobody wanted its output."""
        router = started(line_of_2())
        router.feed(submitted(), produced(A), finished(B))
        commands = router.handle(on.ReplicaDied(now=0.0, replica=replica(A), reason="x"))
        assert [type(c) for c in terminals(commands)] == [do.Finish]


def test_drained_and_consumed_cursors_may_repeat() -> None:
    """Old news changes nothing."""
    router = started(line_of_2())
    router.feed(submitted(), produced(A), consumed(1), produced(B), drained(1))
    assert router.feed(consumed(1), consumed(0), drained(1), drained(0)) == ()


@pytest.mark.parametrize(
    "event",
    [
        produced(A, 1),
        produced(A, -1),
        finished(B),
        cancelled(A),
        consumed(1),
        consumed(2, stage=A, edge_id="request.text->a.in"),
        consumed(0, stage=A, edge_id="a->b.in"),
        consumed(0, stage=A, edge_id="no such edge"),
        drained(1),
        drained(0, output=OutputName("video")),
        submitted(),
        on.EngineStarted(now=0.0),
        on.ChannelOpened(now=0.0, channel=API),
        on.ReplicaReady(now=0.0, replica=replica(A), slots=1),
        on.ReplicaProgressed(now=0.0, replica=replica(A), what="", fraction=0.0),
    ],
    ids=lambda event: type(event).__name__,
)
def test_impossible_events_raise(event: on.AnyEvent) -> None:
    """They are refused with the reason."""
    router = started(line_of_2())
    router.handle(submitted())
    with pytest.raises(InvalidTransition, match="this is a bug in Stretto"):
        router.handle(event)


def test_a_replica_without_slots_is_impossible() -> None:
    """Ready with nothing to offer is no offer."""
    router = started(line_of_2(), loaded=False)
    router.handle(on.ReplicaJoined(now=0.0, replica=replica(A)))
    with pytest.raises(InvalidTransition, match="ready with 0 slots"):
        router.handle(on.ReplicaReady(now=0.0, replica=replica(A), slots=0))
