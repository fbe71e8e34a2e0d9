"""Replicas: starting, dying, repeating what they held, draining."""

from __future__ import annotations

import pytest

from stretto.core import commands as do
from stretto.core import events as on
from stretto.core.graph import Limits, StageSpec
from stretto.core.requests import RequestState
from stretto.errors import FailureKind
from stretto.types import EdgeId, ReplicaId, RequestId, StageId
from tests.core.builders import (
    API,
    AUDIO,
    FULL,
    R1,
    R2,
    R3,
    TEXT,
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
    edge,
    failed,
    finished,
    inline,
    is_empty,
    line_of_2,
    of,
    passed,
    pipeline,
    produced,
    ready,
    replica,
    shm,
    started,
    submitted,
    task,
    terminals,
)

TWO = (
    StageSpec(id=A, replicas=2, slots=2),
    StageSpec(id=B, replicas=2, slots=2),
)


def phases(router: Checked, stage: StageId = A) -> list[str]:
    """Return where the replicas of a stage stand."""
    return [state.state for state in router.replica_states() if state.replica.stage == stage]


def dispatched(commands: tuple[do.AnyCommand, ...]) -> list[ReplicaId]:
    """Return who got a task."""
    return [c.replica for c in commands if isinstance(c, do.Dispatch)]


def where(router: Checked, stage: StageId = A, request: RequestId = R1) -> ReplicaId:
    """Return the replica that a request's task was last dispatched to."""
    place = str(router.story(request)).rpartition(f"{stage}: dispatched to {stage}/")[2]
    slot, _, incarnation = place.partition("\n")[0].partition("#")
    return replica(stage, int(slot), int(incarnation))


def told(commands: tuple[do.AnyCommand, ...]) -> list[str]:
    """Return what is announced."""
    return [
        f"{c.state.replica} {c.state.state} {c.state.detail} {c.state.fraction:g}"
        for c in commands
        if isinstance(c, do.Announce)
    ]


class TestStarting:
    """From a request for a process to its first task."""

    def test_the_engine_asks_for_every_replica(self) -> None:
        """One process per place, each announced."""
        router = Checked(line_of_2(stages=TWO))
        commands = router.handle(on.EngineStarted(now=0.0))
        assert [c.replica for c in commands if isinstance(c, do.StartReplica)] == [
            replica(A, 0),
            replica(A, 1),
            replica(B, 0),
            replica(B, 1),
        ]
        assert phases(router) == ["starting", "starting"]

    def test_each_step_of_loading_is_announced(self) -> None:
        """A channel that opens meanwhile sees the same."""
        router = started(line_of_2(), loaded=False)
        assert told(router.handle(on.ReplicaJoined(now=0.0, replica=replica(A)))) == [
            "a/0#1 loading  0"
        ]
        event = on.ReplicaProgressed(now=0.0, replica=replica(A), what="weights", fraction=0.25)
        assert told(router.handle(event)) == ["a/0#1 loading weights 0.25"]
        assert router.replica_states()[0].detail == "weights"
        assert told(router.handle(on.ReplicaReady(now=0.0, replica=replica(A), slots=1))) == [
            "a/0#1 ready  1"
        ]

    def test_row_M1_joining_twice_is_ignored(self) -> None:
        """The same incarnation does not join again."""
        router = started(line_of_2())
        assert router.handle(on.ReplicaJoined(now=0.0, replica=replica(A))) == ()
        assert phases(router) == ["ready"]

    @pytest.mark.parametrize("has_worked", [False, True])
    def test_silence_while_starting_is_a_death(self, *, has_worked: bool) -> None:
        """Progress moves the deadline; a stage that was never ready is parked, others are tried soon."""
        stages = (StageSpec(id=A, start_timeout_s=10.0),)
        router = started(line_of_2(stages=stages), loaded=has_worked)
        which = replica(A, 0, 1 + has_worked)
        if has_worked:
            router.feed(died(replica(A)), passed(0.1))
        router.feed(
            on.ReplicaJoined(now=8.0, replica=which),
            on.ReplicaProgressed(now=16.0, replica=which, what="", fraction=0.5),
        )
        assert router.handle(passed(25.0)) == ()
        commands = router.handle(passed(26.0))
        assert of(do.StopReplica, commands) == [do.StopReplica(replica=which)]
        state = "dead" if has_worked else "parked"
        assert told(commands) == [f"{which} {state} showed no progress for 10 s while starting 0"]

    def test_a_replica_that_says_why_it_cannot_serve_is_parked(self) -> None:
        """A reason at the first start will not go away by itself: wait for the operator or the timer."""
        router = started(line_of_2(), loaded=False)
        router.handle(on.ReplicaJoined(now=0.0, replica=replica(A)))
        failure = on.ReplicaStartFailed(now=0.0, replica=replica(A), reason="no module")
        assert told(router.handle(failure)) == ["a/0#1 parked no module 0"]
        assert router.handle(failure) == (), "late"
        assert of(do.StartReplica, router.handle(passed(59.9))) == []
        commands = router.handle(passed(60.0))
        assert of(do.StartReplica, commands) == [do.StartReplica(replica=replica(A, 0, 2))]

    def test_a_stage_that_has_worked_is_tried_again_soon(self) -> None:
        """Later start failures get the back-off, not the parking."""
        router = started(line_of_2())
        router.feed(died(replica(A)), passed(0.1))
        failure = on.ReplicaStartFailed(now=0.2, replica=replica(A, 0, 2), reason="no memory")
        router.handle(failure)
        assert phases(router) == ["dead"]

    def test_row_F7_a_crash_loop_parks_the_place(self) -> None:
        """Five deaths before ready within a minute; after another minute it is tried again."""
        router = started(line_of_2(limits=Limits(respawn_max_s=0.1)), loaded=False)
        now = 0.0
        for incarnation in range(1, 6):
            assert phases(router) == ["starting"]
            router.handle(died(replica(A, 0, incarnation), now=now))
            now += 0.1
            router.handle(passed(now))
        assert phases(router) == ["parked"]
        router.handle(passed(now + 60.0))
        assert phases(router) == ["starting"]


class TestDeath:
    """What a dead replica held is repeated or failed; nothing else is touched."""

    def test_row_F1_a_dead_replica_touches_only_what_it_held(self) -> None:
        """Of three requests the one without output is repeated, the one with output fails."""
        router = started(line_of_2(stages=TWO))
        router.feed(submitted(R1), submitted(R2), submitted(R3))
        lost, other = where(router, request=R1), where(router, request=R2)
        assert (where(router, request=R3), other) == (lost, replica(A, 1 - lost.slot))
        router.handle(produced(A, request=R3))
        commands = router.handle(died(lost))
        assert [type(c) for c in commands] == [
            do.StopReplica,
            do.Announce,
            do.Dispatch,
            do.Feed,
            do.CloseInput,
            do.Fail,
            do.CancelTask,
            do.Release,
        ]
        (dispatch,) = [c for c in commands if isinstance(c, do.Dispatch)]
        assert (dispatch.task, dispatch.replica) == (task(A, R1, 1), other)
        (fail,) = [c for c in commands if isinstance(c, do.Fail)]
        assert fail.request == R3
        assert fail.failure.kind is FailureKind.REPLICA_LOST
        assert fail.failure.where == str(lost)
        assert fail.failure.detail == (
            f"request 1.1-3: replica {lost} died (exit 9) after it had sent output; try again"
        )
        assert fail.failure.retry_after_s == 1.0

    def test_row_F4_one_death_has_one_outcome(self) -> None:
        """The second report of the same death is late."""
        router = started(line_of_2(stages=TWO))
        router.handle(submitted())
        router.feed(died(replica(A, 1)), died(replica(A, 0)))
        assert router.handle(died(replica(A, 0))) == ()
        counters = router.statistics().counters
        assert (counters.replica_deaths, counters.late) == (2, 1)

    def test_a_repeated_task_gets_its_inputs_from_the_beginning(self) -> None:
        """What B was fed comes again, and what was fed to the dead one is not lost."""
        router = started(line_of_2(stages=TWO))
        chunk = shm("frames")
        router.feed(submitted(), produced(A, payload=chunk), produced(A, 1), consumed(1))
        commands = router.handle(died(where(router, B)))
        fed = [(c.task, c.seq, c.payload) for c in commands if isinstance(c, do.Feed)]
        again = task(B, attempt=1)
        assert fed == [(again, 0, chunk), (again, 1, inline(f"{R1}.a.1"))]
        assert of(do.Release, commands) == []
        late = on.PayloadDone(now=0.0, holder=task(B), payload=chunk)
        assert router.handle(late) == ()
        assert router.handle(consumed(2)) == (), "of the former attempt"
        router.feed(consumed(2, attempt=1), produced(B, attempt=1), finished(A))
        commands = router.handle(finished(B, attempt=1))
        assert do.Release(payload=chunk) in commands
        assert [type(c) for c in terminals(commands)] == [do.Finish]
        counters = router.statistics().counters
        assert (counters.finished, counters.retried) == (1, 1)

    def test_a_repeated_source_starts_anew_for_a_consumer_that_has_not_begun(self) -> None:
        """What waits on a full edge is thrown away with the attempt that made it."""
        router = started(
            deployment(
                pipeline(
                    edge(TEXT, A),
                    edge(A, B, mode=FULL),
                    outputs=[(AUDIO, B)],
                ),
                stages=TWO,
            )
        )
        router.feed(submitted(), produced(A), produced(A, 1))
        lost = where(router)
        commands = router.handle(died(lost))
        assert [c.payload.key for c in commands if isinstance(c, do.Release)] == [
            f"{R1}.a.0",
            f"{R1}.a.1",
        ]
        router.handle(produced(A, attempt=1))
        commands = router.handle(finished(A, attempt=1))
        assert [c.seq for c in commands if isinstance(c, do.Feed)] == [0]

    def test_late_output_of_a_former_attempt_is_released(self) -> None:
        """It was on the way when its replica was given up."""
        router = started(line_of_2(stages=TWO))
        router.handle(submitted())
        lost = where(router)
        router.handle(died(lost))
        assert router.handle(produced(A)) == (do.Release(payload=inline(f"{R1}.a.0")),)
        assert router.feed(finished(A), failed(A), cancelled(A)) == ()
        assert router.statistics().counters.late == 4

    def test_a_task_waits_for_a_replica_and_then_goes_on(self) -> None:
        """Row F3: nobody is left, the successor takes it up."""
        router = started(line_of_2())
        router.handle(submitted())
        assert of(do.Dispatch, router.handle(died(replica(A)))) == []
        assert router.statistics().stages[0].reserved == 1
        assert router.handle(passed(0.05)) == ()
        commands = router.handle(passed(0.1))
        assert of(do.StartReplica, commands) == [do.StartReplica(replica=replica(A, 0, 2))]
        router.handle(on.ReplicaJoined(now=1.0, replica=replica(A, 0, 2)))
        commands = router.handle(on.ReplicaReady(now=1.0, replica=replica(A, 0, 2), slots=2))
        assert [c.task for c in commands if isinstance(c, do.Dispatch)] == [task(A, attempt=1)]

    def test_a_promise_that_a_death_broke_waits_for_another_slot(self) -> None:
        """Two slots of B were promised, one is left: the second task waits for the first."""
        one = StageSpec(id=B, replicas=2, slots=1)
        router = started(line_of_2(stages=(one,)))
        router.feed(submitted(R1), submitted(R2), died(replica(B, 1)))
        assert len(of(do.Dispatch, router.handle(produced(A, request=R1)))) == 1
        assert of(do.Dispatch, router.handle(produced(A, request=R2))) == []
        router.feed(produced(B, request=R1), finished(A, request=R1))
        commands = router.handle(finished(B, request=R1))
        assert [c.task for c in commands if isinstance(c, do.Dispatch)] == [task(B, R2)]

    def test_row_F8_three_deaths_in_a_row_are_poison(self) -> None:
        """The request ends; the others that were on those replicas go on."""
        router = started(line_of_2(stages=(StageSpec(id=A, replicas=4, slots=2),)))
        router.handle(submitted())
        fails: list[do.Fail] = []
        for attempt in range(3):
            commands = router.handle(died(where(router)))
            fails += [c for c in commands if isinstance(c, do.Fail)]
            assert bool(fails) == (attempt == 2)
        assert fails[0].failure.kind is FailureKind.POISON_REQUEST
        assert "3 replicas of a in a row died on it, the last: exit 9" in fails[0].failure.detail
        assert is_empty(router)

    def test_a_new_chunk_resets_the_count_of_deaths(self) -> None:
        """A task that makes something is not what kills."""
        router = started(
            deployment(
                pipeline(edge(TEXT, A), edge(A, B, mode=FULL), outputs=[(AUDIO, B)]),
                limits=Limits(poison_deaths=2),
                stages=(StageSpec(id=A, replicas=3, slots=2),),
            )
        )
        router.handle(submitted())
        for attempt in range(3):
            router.handle(produced(A, attempt=attempt))
            assert terminals(router.handle(died(where(router)))) == []

    def test_a_stage_that_never_repeats_fails_its_requests(self) -> None:
        """`recovery: fail` is honoured."""
        router = started(line_of_2(stages=(StageSpec(id=A, recovery="fail", replicas=2),)))
        router.handle(submitted())
        lost = where(router)
        (fail,) = [c for c in router.handle(died(lost)) if isinstance(c, do.Fail)]
        assert "this can't be repeated" in fail.failure.detail

    def test_a_backend_that_must_not_repeat_overrides_the_stage(self) -> None:
        """`recovery: fail` of a ready replica is honoured, also for a request that waited for it."""
        router = started(line_of_2(), loaded=False)
        router.handle(submitted())
        for which in (replica(A), replica(B)):
            router.handle(on.ReplicaJoined(now=0.0, replica=which))
            router.handle(
                on.ReplicaReady(
                    now=0.0,
                    replica=which,
                    slots=2,
                    recovery="fail" if which.stage == A else "retry",
                )
            )
        [failure] = terminals(router.handle(died(where(router))))
        assert isinstance(failure, do.Fail)
        assert failure.failure.kind is FailureKind.REPLICA_LOST

    def test_a_death_while_draining_an_aborted_request_forgets_it(self) -> None:
        """Its last task is gone, so is the request."""
        router = started(line_of_2())
        router.feed(submitted(), aborted())
        assert of(do.Fail, router.handle(died(replica(A)))) == []
        assert router.statistics().draining == 0

    def test_a_group_whose_second_stage_dies_keeps_its_promise(self) -> None:
        """B's replica dies before B has begun: A goes on, and B waits for the successor."""
        router = started(line_of_2())
        router.feed(submitted(), died(replica(B)))
        assert of(do.Dispatch, router.handle(produced(A))) == []
        router.handle(passed(0.1))
        router.handle(on.ReplicaJoined(now=0.2, replica=replica(B, 0, 2)))
        commands = router.handle(on.ReplicaReady(now=0.3, replica=replica(B, 0, 2), slots=2))
        assert [c.task for c in commands if isinstance(c, do.Dispatch)] == [task(B)]
        assert of(do.Feed, commands) == [
            do.Feed(
                replica=replica(B, 0, 2),
                task=task(B),
                edge=EdgeId("a->b.in"),
                seq=0,
                payload=inline(f"{R1}.a.0"),
            )
        ]


class TestAffinity:
    """A key leads back to the replica that served it."""

    PREFER = on.Affinity(key="k")
    REQUIRE = on.Affinity(key="k", mode="require")

    def serve(self, router: Checked, request: RequestId, affinity: on.Affinity) -> ReplicaId:
        """Run a request through stage a and return where it was."""
        router.handle(submitted(request, affinity=affinity))
        return where(router, A, request)

    def test_a_key_goes_where_it_was_and_others_are_spread(self) -> None:
        """The second request of a key meets the first one's replica, although another has less work."""
        router = started(line_of_2(stages=TWO))
        home = self.serve(router, R1, self.PREFER)
        assert self.serve(router, R2, self.PREFER) == home

    def test_a_preferred_replica_that_is_full_is_not_waited_for(self) -> None:
        """Preference costs nobody time."""
        router = started(line_of_2(stages=TWO))
        home = self.serve(router, R1, self.PREFER)
        self.serve(router, R2, self.PREFER)
        assert self.serve(router, R3, self.PREFER) != home

    def test_a_required_replica_that_is_full_is_waited_for(self) -> None:
        """The request is bound as soon as the home has a free slot, and nobody behind it waits."""
        router = started(line_of_2(stages=TWO))
        home = self.serve(router, R1, self.REQUIRE)
        self.serve(router, R2, self.REQUIRE)
        commands = router.handle(submitted(R3, affinity=self.REQUIRE))
        assert of(do.Dispatch, commands) == []
        commands = router.feed(aborted(R1), cancelled(A, request=R1))
        assert [c.replica for c in commands if isinstance(c, do.Dispatch)] == [home]

    @pytest.mark.parametrize("waits", [False, True])
    def test_a_lost_required_replica_is_a_typed_failure(self, *, waits: bool) -> None:
        """It is never replaced silently: the state that was there is gone."""
        router = started(line_of_2(stages=TWO))
        home = self.serve(router, R1, self.REQUIRE)
        if waits:
            self.serve(router, R2, self.REQUIRE)
            router.handle(submitted(R3, affinity=self.REQUIRE))
        commands = router.handle(died(home))
        if not waits:
            commands = router.handle(submitted(R3, affinity=self.REQUIRE))
        [failure] = [c for c in commands if isinstance(c, do.Fail) and c.request == R3]
        assert failure.failure.code == "affinity_lost"

    @pytest.mark.parametrize("with_chunk", [False, True])
    def test_a_loss_that_shows_in_mid_event_ends_the_request_once(
        self, *, with_chunk: bool
    ) -> None:
        """A's chunk or end would start B and D, but B's home is gone: one terminal, nothing kept."""
        fan_out = deployment(
            pipeline(
                edge(TEXT, A),
                edge(A, B),
                edge(A, C),
                edge(B, D, name="left"),
                edge(C, D, name="right"),
                outputs=[(AUDIO, D)],
            ),
            stages=(StageSpec(id=B, replicas=2),),
        )
        router = started(fan_out)
        router.feed(submitted(R1, affinity=self.REQUIRE), produced(A, request=R1))
        router.handle(submitted(R2, affinity=self.REQUIRE))
        router.handle(died(where(router, B, R1)))
        commands = router.handle(produced(A, request=R2) if with_chunk else finished(A, request=R2))
        assert [c.request for c in terminals(commands)] == [R2]
        assert router.state_of(R2) is not RequestState.RUNNING

    def test_a_waiting_request_hears_that_its_home_drains(self) -> None:
        """It will take nothing new, so waiting for it is in vain."""
        router = started(line_of_2(stages=TWO))
        home = self.serve(router, R1, self.REQUIRE)
        self.serve(router, R2, self.REQUIRE)
        router.handle(submitted(R3, affinity=self.REQUIRE))
        commands = router.handle(on.DrainRequested(now=0.0, replica=home))
        assert [c.request for c in terminals(commands)] == [R3]


class TestDraining:
    """A replica that takes nothing new, finishes, and leaves."""

    def test_row_M3_bound_tasks_finish_and_then_it_leaves(self) -> None:
        """No new task goes there; after the last one it is stopped, and not replaced."""
        router = started(line_of_2(stages=TWO))
        router.feed(submitted(R1), submitted(R2))
        lost = where(router)
        drain = on.DrainRequested(now=0.0, replica=lost)
        assert router.handle(drain) == (
            do.AnnounceTarget(stage=A, replicas=1),
            do.Announce(state=do.ReplicaState(replica=lost, state="draining")),
            do.DrainReplica(replica=lost),
        )
        assert router.handle(drain) == (), "late"
        (dispatch,) = [c for c in router.handle(submitted(R3)) if isinstance(c, do.Dispatch)]
        assert dispatch.replica != lost
        router.handle(produced(A, request=R1))
        commands = router.handle(finished(A, request=R1))
        assert do.StopReplica(replica=lost) in commands
        assert told(commands) == [f"{lost} stopped  0"]
        assert router.next_deadline() is not None
        assert of(do.StartReplica, router.handle(passed(100.0))) == []

    def test_an_idle_replica_leaves_at_once(self) -> None:
        """Also one that is still loading."""
        for loaded in (True, False):
            router = started(line_of_2(), loaded=loaded)
            commands = router.handle(on.DrainRequested(now=0.0, replica=replica(A)))
            assert commands[-2] == do.StopReplica(replica=replica(A))
            assert phases(router) == []
            router.handle(passed(999.0))
            assert phases(router) == [], "no deadline of it is left"

    def test_one_that_does_not_finish_in_time_is_killed(self) -> None:
        """Row M3: 60 seconds, then its tasks are repeated elsewhere."""
        router = started(line_of_2(stages=TWO, limits=Limits(request_timeout_s=999.0)))
        router.handle(submitted())
        lost = where(router)
        router.handle(on.DrainRequested(now=0.0, replica=lost))
        for now in range(1, 60, 10):
            router.handle(produced(A, now // 10, kind="preview", now=float(now)))
        commands = router.handle(passed(60.0))
        assert told(commands) == [f"{lost} stopped did not drain within 60 s 0"]
        assert [c.task for c in commands if isinstance(c, do.Dispatch)] == [task(A, attempt=1)]

    def test_a_death_while_draining_is_not_replaced(self) -> None:
        """It was leaving anyway; what it held is repeated."""
        router = started(line_of_2(stages=TWO))
        router.handle(submitted())
        lost = where(router)
        router.handle(on.DrainRequested(now=0.0, replica=lost))
        assert len(of(do.Dispatch, router.handle(died(lost)))) == 1
        assert phases(router) == ["ready"]

    def test_row_M4_one_that_leaves_is_seen_no_more(self) -> None:
        """Neither in the statistics, from which gauges are made, nor by channels that open later."""
        router = started(line_of_2(stages=TWO))
        router.handle(on.DrainRequested(now=0.0, replica=replica(A, 1)))
        (stage,) = [each for each in router.statistics().stages if each.stage == A]
        assert [each for each, _ in stage.replicas] == [replica(A)]
        assert replica(A, 1) not in [state.replica for state in router.replica_states()]

    def test_one_that_is_replaced_has_its_successor_at_once(self) -> None:
        """A restart without a gap: the stage keeps its number, in another place."""
        router = started(line_of_2())
        router.handle(submitted())
        commands = router.handle(on.DrainRequested(now=0.0, replica=replica(A), replace=True))
        assert of(do.StartReplica, commands) == [do.StartReplica(replica=replica(A, 1))]
        assert router.targets()[A] == 1
        assert phases(router) == ["draining", "starting"]


class TestScaling:
    """A stage's number of replicas is changed while it serves."""

    def scaled(
        self, router: Checked, replicas: int, stage: StageId = A
    ) -> tuple[do.AnyCommand, ...]:
        """Give the order, and expect an answer."""
        return router.handle(
            on.ScaleRequested(now=0.0, stage=stage, replicas=replicas, channel=API, number=7)
        )

    def test_row_M4_late_joiners_serve_and_are_seen(self) -> None:
        """New places start at once, are announced with the new target, and get work."""
        router = started(line_of_2(stages=(StageSpec(id=A, slots=1),)))
        router.feed(submitted(R1), submitted(R2))
        commands = self.scaled(router, 3)
        assert of(do.StartReplica, commands) == [
            do.StartReplica(replica=replica(A, slot)) for slot in (1, 2)
        ]
        assert of(do.AnnounceTarget, commands)[-1] == do.AnnounceTarget(stage=A, replicas=3)
        assert commands[-1] == do.AnswerOrder(channel=API, number=7)
        assert dispatched(ready(router, replica(A, 1))) == [replica(A, 1)]

    def test_row_E17_a_stage_that_begins_without_replicas_works_with_its_first(self) -> None:
        """Its requests wait; the first replica gets them; without one they wait again."""
        router = started(line_of_2(stages=(StageSpec(id=A, replicas=0),)))
        router.handle(submitted())
        self.scaled(router, 1)
        assert len(of(do.Dispatch, ready(router, replica(A)))) == 1
        self.scaled(router, 0)
        router.feed(submitted(R2), produced(A), finished(A))
        self.scaled(router, 1)
        assert len(of(do.Dispatch, ready(router, replica(A, 0, 2)))) == 1

    def test_situation_N5_those_with_the_least_work_leave_first_and_finish_it(self) -> None:
        """Idle ones at once, busy ones when they are done; no request is touched."""
        router = started(line_of_2(stages=(StageSpec(id=A, replicas=3, slots=4),)))
        router.feed(submitted(R1), submitted(R2))
        busy = [where(router, A, request) for request in (R1, R2)]
        commands = self.scaled(router, 1)
        assert len(of(do.StopReplica, commands)) == 1
        assert len(of(do.DrainReplica, commands)) == 1
        assert {c.replica for c in commands if isinstance(c, do.StopReplica)}.isdisjoint(busy)
        assert terminals(commands) == []

    def test_dead_places_leave_before_living_ones(self) -> None:
        """And no successor is started for them."""
        router = started(line_of_2(stages=(StageSpec(id=A, replicas=2),)))
        router.handle(died(replica(A)))
        self.scaled(router, 1)
        assert phases(router) == ["ready"]
        assert of(do.StartReplica, router.handle(passed(500.0))) == []

    @pytest.mark.parametrize(
        ("stage", "replicas", "text"), [("x", 1, "has: a, b"), ("a", 257, "0 to 256")]
    )
    def test_an_impossible_order_is_refused(self, stage: str, replicas: int, text: str) -> None:
        """The answer names what is possible, and nothing changes."""
        router = started(line_of_2())
        (answer,) = self.scaled(router, replicas, StageId(stage))
        assert isinstance(answer, do.AnswerOrder)
        assert answer.failure is not None
        assert text in answer.failure.detail


@pytest.mark.parametrize(
    "event",
    [
        on.ReplicaJoined(now=0.0, replica=replica(A, 0, 9)),
        on.ReplicaProgressed(now=0.0, replica=replica(A, 0, 0), what="", fraction=0.0),
        on.ReplicaReady(now=0.0, replica=replica(A, 7), slots=1),
        on.ReplicaStartFailed(now=0.0, replica=replica(A, 0, 0), reason=""),
        on.ReplicaDied(now=0.0, replica=replica(A, 0, 0), reason=""),
        on.DrainRequested(now=0.0, replica=replica(StageId("nobody"))),
    ],
    ids=lambda event: type(event).__name__,
)
def test_row_E13_messages_of_other_incarnations_are_late(event: on.AnyEvent) -> None:
    """Counted and dropped, they never touch the successor."""
    router = started(line_of_2())
    assert router.handle(event) == ()
    assert router.statistics().counters.late == 1
    assert phases(router) == ["ready"]


def test_replica_states_show_the_reason_of_a_death() -> None:
    """A channel that opens later learns it too."""
    router = started(line_of_2())
    router.handle(died(replica(A), reason="exit 137"))
    assert router.replica_states()[0] == do.ReplicaState(
        replica=replica(A), state="dead", detail="exit 137"
    )
    ready_again = replica(A, 0, 2)
    router.handle(passed(0.1))
    ready(router, ready_again)
    assert router.replica_states()[0].detail == ""
    assert router.statistics().channels == len((API,))
