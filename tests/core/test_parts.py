"""The small machines of the core, each on its own: flow, holds, deadlines, slots, admission, story."""

from __future__ import annotations

from random import Random

import pytest

from stretto.core.admission import DrainRate, WaitingLine
from stretto.core.deadlines import DeadlineKind, Deadlines
from stretto.core.events import Affinity
from stretto.core.flow import EdgeFlow, OutputFlow
from stretto.core.graph import Limits, StageSpec
from stretto.core.holds import Holds
from stretto.core.slots import REMEMBERED_KEYS, Pool, ReplicaPhase
from stretto.core.story import Story
from stretto.types import PipelineName, RequestId, StageId
from tests.core.builders import (
    AUDIO,
    FULL,
    R1,
    R2,
    R3,
    R4,
    A,
    B,
    C,
    edge,
    inline,
    replica,
    task,
)

P = PipelineName("p")


class TestFlow:
    """Cursors and windows."""

    def test_an_output_is_full_at_either_bound(self) -> None:
        """Chunks and bytes bound independently, and taking frees both."""
        for sizes in ((1, 1, 1), (90, 10)):
            output = OutputFlow(AUDIO, A, window_chunks=3, window_bytes=100)
            for size in sizes:
                assert not output.is_full
                output.produce(size)
            assert output.is_full
            output.consume(1)
            assert not output.is_full

    def test_consuming_moves_forward_only(self) -> None:
        """An older cursor changes nothing."""
        output = OutputFlow(AUDIO, A, window_chunks=2, window_bytes=100)
        output.produce(10)
        output.consume(1)
        output.consume(0)
        assert (output.consumed, output.bytes_consumed) == (1, 10)

    def test_a_stream_may_start_with_its_first_chunk(self) -> None:
        """One chunk is enough."""
        flow = EdgeFlow(edge(A, B), is_limiting=True)
        assert not flow.may_start
        flow.produce(10)
        assert flow.may_start

    def test_a_full_edge_starts_and_feeds_after_its_source_has_ended(self) -> None:
        """Before that it only collects."""
        flow = EdgeFlow(edge(A, B, mode=FULL), is_limiting=False)
        flow.produce(10)
        assert (flow.may_start, flow.may_feed) == (False, False)
        flow.has_ended = True
        assert (flow.may_start, flow.may_feed) == (True, True)

    def test_feeding_stops_at_the_window(self) -> None:
        """One chunk always may be on the way, more only within both bounds."""
        flow = EdgeFlow(edge(A, B, chunks=2, nbytes=100), is_limiting=False)
        for size in (500, 10, 10, 10):
            flow.produce(size)
        assert flow.may_feed
        flow.fed, flow.fed_bytes = 1, 500
        assert not flow.may_feed, "too many bytes on the way"
        flow.consume(1)
        flow.fed, flow.fed_bytes = 3, 520
        assert not flow.may_feed, "too many chunks on the way"

    def test_a_closed_edge_does_not_limit(self) -> None:
        """A consumer that wants no more holds nobody up."""
        flow = EdgeFlow(edge(A, B, chunks=1), is_limiting=True)
        flow.produce(10)
        assert flow.is_full
        flow.close()
        assert (flow.is_full, flow.is_closed) == (False, True)

    def test_rewinding_feeds_what_is_kept_once_more(self) -> None:
        """The consumer's next attempt starts from the first chunk."""
        flow = EdgeFlow(edge(A, B), is_limiting=True)
        for number in range(2):
            flow.produce(10)
            flow.chunks.append(inline(number))
        flow.fed, flow.fed_bytes, flow.close_sent = 2, 20, True
        flow.consume(2)
        flow.rewind()
        assert (flow.fed, flow.consumed, flow.close_sent) == (0, 0, False)
        flow.consume(2)
        assert flow.bytes_consumed == 20

    def test_restarting_counts_from_the_beginning(self) -> None:
        """The producer's next attempt starts with chunk 0."""
        flow = EdgeFlow(edge(A, B), is_limiting=True)
        flow.produce(10)
        flow.restart()
        assert (flow.produced, flow.bytes_produced, len(flow.sizes)) == (0, 0, 0)


class TestHolds:
    """Who still needs a payload."""

    def test_the_last_holder_frees(self) -> None:
        """Dropping tells whether anybody is left."""
        holds, payload = Holds(), inline("x")
        holds.hold(payload)
        holds.hold(payload)
        assert not holds.drop(payload)
        assert payload in holds
        assert holds.counts() == {payload: 1}
        assert holds.drop(payload)
        assert payload not in holds
        assert len(holds) == 0


class TestDeadlines:
    """A heap whose entries can be moved and cleared."""

    def test_the_earliest_comes_first_and_once(self) -> None:
        """Due keys come in the order of their times, each disarmed."""
        deadlines = Deadlines()
        deadlines.set(DeadlineKind.REQUEST, R1, 2.0)
        deadlines.set(DeadlineKind.REQUEST, R2, 1.0)
        deadlines.set(DeadlineKind.SHUTDOWN, None, 9.0)
        assert deadlines.next() == 1.0
        assert deadlines.pop_due(0.5) is None
        assert deadlines.pop_due(5.0) == (DeadlineKind.REQUEST, R2)
        assert deadlines.pop_due(5.0) == (DeadlineKind.REQUEST, R1)
        assert deadlines.pop_due(5.0) is None
        assert len(deadlines) == 1

    def test_a_moved_or_cleared_deadline_does_not_ring_at_its_old_time(self) -> None:
        """Only the last setting counts."""
        deadlines = Deadlines()
        deadlines.set(DeadlineKind.REQUEST, R1, 1.0)
        deadlines.set(DeadlineKind.REQUEST, R1, 3.0)
        deadlines.set(DeadlineKind.REQUEST, R1, 3.0)
        deadlines.set(DeadlineKind.REQUEST, R2, 2.0)
        deadlines.clear(DeadlineKind.REQUEST, R2)
        deadlines.clear(DeadlineKind.REQUEST, R2)
        assert deadlines.next() == 3.0
        assert not deadlines.has(DeadlineKind.REQUEST, R2)
        deadlines.clear(DeadlineKind.REQUEST, R1)
        assert deadlines.next() is None

    def test_a_deadline_that_moves_often_costs_no_memory(self) -> None:
        """Stale entries are swept out, and the live one survives."""
        deadlines = Deadlines()
        for number in range(10_000):
            deadlines.set(DeadlineKind.REQUEST, R1, float(number))
        heap = vars(deadlines)["_heap"]
        assert len(heap) < 100
        assert deadlines.next() == 9999.0


class TestPool:
    """Places and their slots."""

    def pool(self, replicas: int = 2, slots: int = 2) -> Pool:
        """Return a pool whose replicas are ready."""
        pool = Pool(StageSpec(id=A, replicas=replicas))
        for place in pool.replicas:
            pool.start(place)
            pool.become_ready(place, slots, "retry")
        return pool

    def test_work_goes_to_the_least_loaded_and_ties_rotate(self) -> None:
        """Four tasks on two replicas alternate; a full pool offers nobody."""
        pool = self.pool()
        chosen: list[int] = []
        for number in range(4):
            place = pool.pick()
            assert place is not None
            pool.reserved += 1
            pool.bind(place, task(attempt=number))
            chosen.append(place.id.slot)
        assert sorted(chosen[:2]) == sorted(chosen[2:]) == [0, 1]
        assert pool.pick() is None
        assert (pool.free, pool.room, pool.reserved) == (0, 0, 0)

    def test_an_idle_pool_does_not_always_begin_with_the_same_replica(self) -> None:
        """One task at a time wanders over all of them."""
        pool = self.pool(replicas=3)
        chosen: set[int] = set()
        for number in range(3):
            place = pool.pick()
            assert place is not None
            pool.bind(place, task(attempt=number))
            pool.unbind(place, task(attempt=number))
            chosen.add(place.id.slot)
        assert chosen == {0, 1, 2}

    def test_the_choice_is_what_a_look_at_every_place_would_choose(self) -> None:
        """The least work wins, and of equals the next in the circle; also when places come and go."""
        random = Random(1)  # noqa: S311 - chance that repeats
        pool = self.pool(replicas=7, slots=3)
        for turn in range(1, 500):
            place = pool.pick()
            circle = [pool.replicas[(turn + offset) % 7] for offset in range(7)]
            usable = [each for each in circle if each.phase is ReplicaPhase.READY and each.has_room]
            assert place is min(usable, key=lambda each: len(each.bound), default=None)
            if place is not None:
                pool.bind(place, task(attempt=turn))
            other = random.choice(pool.replicas)
            if other.phase is ReplicaPhase.SUSPECT:
                pool.enter_ready(other)
            elif random.random() < 0.2:
                pool.leave_ready(other, ReplicaPhase.SUSPECT, now=0.0)
            for each in random.sample([*other.bound], k=len(other.bound) // 2):
                pool.unbind(other, each)

    def test_the_affinity_keys_that_were_not_used_for_longest_are_forgotten(self) -> None:
        """Memory is bounded; a key in use stays."""
        pool = self.pool()
        home, other = pool.replicas
        used, unused = Affinity(key="used"), Affinity(key="unused")
        pool.remember(unused, home)
        pool.remember(used, home)
        for number in range(REMEMBERED_KEYS - 1):
            pool.remember(Affinity(key=str(number)), other)
            pool.remember(used, home)
        pool.bind(home, task())
        assert pool.pick(used) is home
        assert pool.pick(unused) is other

    def test_a_preferred_replica_that_is_gone_is_replaced(self) -> None:
        """Required, it is lost instead; a key that nobody has served yet is never lost."""
        pool = self.pool()
        home, other = pool.replicas
        require = Affinity(key="k", mode="require")
        assert not pool.has_lost(require)
        pool.remember(require, home)
        assert not pool.has_lost(require)
        pool.leave_ready(home, ReplicaPhase.DRAINING, now=0.0)
        assert pool.pick(Affinity(key="k")) is other
        assert (pool.has_lost(require), pool.has_lost(Affinity(key="k"))) == (True, False)

    def test_slots_of_a_lost_replica_are_counted_out(self) -> None:
        """What it held does not come back as room."""
        pool = self.pool()
        place = pool.replicas[0]
        pool.reserved += 1
        pool.bind(place, task())
        pool.leave_ready(place, ReplicaPhase.DEAD, now=7.0)
        assert (pool.capacity, pool.free, pool.empty_since) == (2, 2, 0.0)
        pool.unbind(place, task())
        assert pool.free == 2
        pool.leave_ready(pool.replicas[1], ReplicaPhase.DEAD, now=8.0)
        assert (pool.capacity, pool.free, pool.empty_since) == (0, 0, 8.0)

    def test_a_process_is_found_by_its_incarnation_only(self) -> None:
        """A predecessor, a stranger and a dead one are not found."""
        pool = self.pool(replicas=1)
        assert pool.find(replica(A, 0, 1)) is pool.replicas[0]
        assert pool.find(replica(A, 0, 0)) is None
        assert pool.find(replica(A, 1, 1)) is None
        assert pool.find(replica(A, -1, 1)) is None
        pool.leave_ready(pool.replicas[0], ReplicaPhase.DEAD, now=0.0)
        assert pool.find(replica(A, 0, 1)) is None

    def test_back_off_doubles_to_its_bound_and_a_finished_task_resets_it(self) -> None:
        """Row F7: 0.1 s doubling to 10 s."""
        place = self.pool(replicas=1).replicas[0]
        limits = Limits(breaker_deaths=100)
        waits = [place.died("x", limits, 0.0, for_good=False) for _ in range(9)]
        assert waits == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0])
        place.did_work()
        assert place.died("x", limits, 0.0, for_good=False) == pytest.approx(0.1)

    def test_deaths_without_work_park_the_place_if_they_come_fast(self) -> None:
        """Row F7: only deaths within the window count, and after parking the count begins anew."""
        place = self.pool(replicas=1).replicas[0]
        limits = Limits(breaker_deaths=3, breaker_window_s=60.0, breaker_rearm_s=50.0)
        for now in (0.0, 30.0, 70.0):
            place.died("x", limits, now, for_good=False)
            assert place.phase is ReplicaPhase.DEAD
        assert place.died("x", limits, 80.0, for_good=False) == 130.0
        assert place.phase is ReplicaPhase.PARKED
        place.died("x", limits, 81.0, for_good=False)
        assert place.phase is ReplicaPhase.DEAD

    def test_the_death_of_a_process_that_has_worked_does_not_count(self) -> None:
        """Row F7: even a breaker of one does not park what has finished a task."""
        pool = self.pool(replicas=1)
        place = pool.replicas[0]
        limits = Limits(breaker_deaths=1)
        place.did_work()
        place.died("x", limits, 0.0, for_good=False)
        assert place.phase is ReplicaPhase.DEAD
        pool.start(place)
        place.died("x", limits, 0.0, for_good=False)
        assert place.phase is ReplicaPhase.PARKED


class TestWaitingLine:
    """Who is next."""

    def admitted(self, line: WaitingLine, **rooms: int) -> list[RequestId]:
        """Admit whoever can be, with so many free slots; a stage that is not named has no replica."""
        order: list[RequestId] = []
        free = {StageId(stage): room for stage, room in rooms.items()}
        while head := line.first_admissible(lambda s: s in free, lambda s: free[s]):
            request, group = head
            line.leave(request, group)
            order.append(request)
            for stage in group:
                free[stage] -= 1
        return order

    def test_priority_goes_before_arrival(self) -> None:
        """Smaller first, then first come first served."""
        line = WaitingLine()
        for request, priority in ((R1, 5), (R2, 0), (R3, 5), (R4, 0)):
            line.join(request, (A,), (True, priority))
        assert self.admitted(line, a=9) == [R2, R4, R1, R3]
        assert len(line) == 0

    def test_running_requests_go_before_queued_ones(self) -> None:
        """They hold slots that others wait for."""
        line = WaitingLine()
        line.join(R1, (A,), (True, 0))
        line.join(R2, (A,), (False, 9))
        assert self.admitted(line, a=9) == [R2, R1]

    def test_a_line_that_is_stuck_does_not_stop_another(self) -> None:
        """With room to spare, who needs only A goes although the first in line also needs B."""
        line = WaitingLine()
        line.join(R1, (A, B), (True, 0))
        line.join(R2, (A,), (True, 0))
        assert self.admitted(line, a=2, b=0) == [R2]

    def test_a_request_for_several_stages_is_not_starved(self) -> None:
        """The last free slot of A waits for the first in line, which also needs B."""
        line = WaitingLine()
        line.join(R1, (A, B), (True, 0))
        line.join(R2, (A,), (True, 0))
        assert self.admitted(line, a=1, b=0) == []
        assert self.admitted(line, a=1, b=1) == [R1]

    def test_a_stage_without_replica_claims_nothing_elsewhere(self) -> None:
        """An outage of B does not hold up who needs only A."""
        line = WaitingLine()
        line.join(R1, (A, B), (True, 0))
        line.join(R2, (A,), (True, 0))
        assert self.admitted(line, a=1) == [R2]

    def test_a_running_request_does_not_claim(self) -> None:
        """Two that hold what the other needs must not wait for each other's claim."""
        line = WaitingLine()
        line.join(R1, (A, B), (False, 0))
        line.join(R2, (A,), (False, 0))
        assert self.admitted(line, a=1, b=0) == [R2]

    def test_joining_twice_keeps_the_place_and_leaving_frees_it(self) -> None:
        """A request waits once per group, in as many groups as it needs."""
        line = WaitingLine()
        line.join(R1, (A,), (True, 0))
        line.join(R2, (A,), (True, 0))
        line.join(R1, (A,), (True, 0))
        line.join(R1, (B, C), (True, 0))
        line.leave(R1, (A,))
        assert R1 in line
        line.leave(R1, (B, C))
        line.leave(R1, (B, C))
        line.leave(R3, (A,))
        assert R1 not in line
        assert self.admitted(line, a=9) == [R2]

    def test_a_promoted_request_keeps_all_its_lines(self) -> None:
        """Its rank changes in each of them."""
        line = WaitingLine()
        line.join(R1, (A,), (True, 0))
        line.join(R2, (A,), (True, 0))
        line.join(R2, (B,), (True, 0))
        line.promote(R2, (False, 0))
        line.promote(R3, (False, 0))
        assert self.admitted(line, a=1, b=1) == [R2, R2]


class TestDrainRate:
    """How long a refused client should wait."""

    def test_without_experience_it_is_a_second(self) -> None:
        """No start, one start, or starts at one moment tell nothing."""
        rate = DrainRate()
        assert rate.retry_after_s(P, 100, 0.0) == 1.0
        rate.started(P, 0.0)
        assert rate.retry_after_s(P, 100, 5.0) == 1.0
        rate.started(P, 0.0)
        assert rate.retry_after_s(P, 100, 0.0) == 1.0

    def test_it_grows_with_the_queue_and_is_bounded(self) -> None:
        """Ten starts in ten seconds, forty waiting: twenty seconds until half of them have gone."""
        rate = DrainRate()
        for number in range(10):
            rate.started(P, float(number))
        assert rate.retry_after_s(P, 40, 10.0) == pytest.approx(20.0)
        assert rate.retry_after_s(P, 1, 10.0) == 1.0
        assert rate.retry_after_s(P, 10_000, 10.0) == 60.0


class TestStory:
    """What happened to a request."""

    def test_a_repeated_line_is_one_line_with_a_count(self) -> None:
        """The first time and the number are kept."""
        story = Story()
        assert story.entries() == ()
        for at in (1.0, 2.0, 3.0):
            story.add(at, "waits")
        story.add(4.0, "runs")
        assert str(story) == "1.000 waits x3\n4.000 runs"

    def test_it_keeps_the_last_64_lines(self) -> None:
        """The oldest fall out."""
        story = Story()
        for number in range(100):
            story.add(float(number), f"line {number}")
        entries = story.entries()
        assert len(entries) == Story.CAPACITY == 64
        assert (entries[0].what, entries[-1].what) == ("line 36", "line 99")
