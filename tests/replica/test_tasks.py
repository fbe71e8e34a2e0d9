"""The bookkeeping of tasks, without thread, loop or socket."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stretto.core.commands import UNLIMITED
from stretto.errors import Failure, FailureKind
from stretto.messages.link import Consumed, Ended, Open, Produced, Reported, Viewed
from stretto.replica.tasks import PATIENCE, HeldTask, Output, StepResult, TaskState, TaskTable
from stretto.types import INLINE, SHARED_MEMORY, EdgeId, PayloadRef, PipelineName, TaskKey
from tests.replica.rig import TEXT, task_key

A = task_key("a")
BROKEN = Failure(kind=FailureKind.STAGE_ERROR, detail="broken")
_numbers = itertools.count()


def opening(
    key: TaskKey = A, chunks: int = UNLIMITED, nbytes: int = UNLIMITED, skip_units: int = 0
) -> Open:
    """Return the message that opens a task with one edge."""
    return Open(key, PipelineName("test"), (TEXT,), None, skip_units, chunks, nbytes)


def output(
    size: int = 10, length: int = 1, media_s: float = 0.0, *, preview: bool = False
) -> Output:
    """Return an output whose payload lies in shared memory under a name of its own."""
    payload = PayloadRef(SHARED_MEMORY, f"w.{next(_numbers)}", size)
    kind = "preview" if preview else "data"
    return Output(payload=payload, body=None, length=length, media_s=media_s, kind=kind)


def feed(table: TaskTable, key: TaskKey = A, seq: int = 0) -> None:
    """Feed a task one small chunk."""
    table.feed(key, TEXT.id, seq, PayloadRef(INLINE, "", 4), b"data")


def sent(table: TaskTable) -> list[object]:
    """Return what is to be sent, and empty the outbox."""
    messages: list[object] = [message for message, _ in table.outbox]
    table.outbox.clear()
    return messages


def step(table: TaskTable, result: StepResult) -> HeldTask:
    """Let the one ready task take part in a step."""
    (task,) = table.next_batch(8)
    table.stepped(task, result)
    return task


def opened(
    table: TaskTable,
    chunks: int = UNLIMITED,
    nbytes: int = UNLIMITED,
    skip_units: int = 0,
    key: TaskKey = A,
) -> HeldTask:
    """Open a task and feed it."""
    task = table.open(opening(key, chunks, nbytes, skip_units), None)
    feed(table, key)
    return task


def test_outputs_go_out_in_order_with_their_place_in_the_stream() -> None:
    """Sequence numbers count chunks, offsets count units from the skipped ones on."""
    table = TaskTable()
    opened(table, skip_units=100)
    step(table, StepResult(outputs=[output(length=5), output(length=7), output(length=0)]))
    produced = [m for m in sent(table) if isinstance(m, Produced)]
    assert [(m.seq, m.offset, m.length) for m in produced] == [
        (0, 100, 5),
        (1, 105, 7),
        (2, 112, 0),
    ]


def test_nothing_is_sent_beyond_the_send_right() -> None:
    """The second chunk waits for a grant, and the task gets no step meanwhile."""
    table = TaskTable()
    opened(table, chunks=1)
    step(table, StepResult(outputs=[output(), output()], has_backlog=True))
    assert [m.seq for m in sent(table) if isinstance(m, Produced)] == [0]
    assert table.next_batch(8) == []
    table.grant(A, 2, UNLIMITED)
    assert [m.seq for m in sent(table) if isinstance(m, Produced)] == [1]
    assert table.next_batch(8) == []
    table.grant(A, 3, UNLIMITED)
    assert len(table.next_batch(8)) == 1


def test_without_send_right_a_task_does_not_begin() -> None:
    """Its chunk stays unconsumed until it may send."""
    table = TaskTable()
    task = opened(table, chunks=0)
    assert table.next_batch(8) == []
    table.grant(A, 1, UNLIMITED)
    assert table.next_batch(8) == [task]


def test_one_chunk_may_pass_the_byte_limit() -> None:
    """A chunk may be sent while fewer bytes than granted were sent, however large it is."""
    table = TaskTable()
    opened(table, nbytes=5)
    step(table, StepResult(outputs=[output(size=100), output(size=1)]))
    assert len([m for m in sent(table) if isinstance(m, Produced)]) == 1
    table.grant(A, UNLIMITED, 100)
    assert sent(table) == []
    table.grant(A, UNLIMITED, 101)
    assert len(sent(table)) == 1


def test_a_send_right_never_shrinks() -> None:
    """A smaller grant changes nothing."""
    table = TaskTable()
    task = opened(table, chunks=2)
    table.grant(A, 1, 1)
    step(table, StepResult(outputs=[output(), output()]))
    assert len(sent(table)) == 2
    assert not task.may_send


def test_finishing_waits_for_buffered_outputs() -> None:
    """The end is sent after the last output, and only then is the slot free."""
    table = TaskTable()
    opened(table, chunks=0)
    task = table.get(A)
    assert task is not None
    table.grant(A, 1, UNLIMITED)
    step(table, StepResult(outputs=[output(), output()], end="finished"))
    assert [type(m) for m in sent(table)] == [Produced]
    assert len(table) == 1
    table.grant(A, 2, UNLIMITED)
    assert [type(m) for m in sent(table)] == [Produced, Ended]
    assert len(table) == 0


@pytest.mark.parametrize("is_handed_over", [False, True])
def test_the_end_of_an_input_needs_no_send_right(is_handed_over: bool) -> None:  # noqa: FBT001 - a fact under test
    """A task that has sent all it may gets the step that ends it, but none for another chunk."""
    table = TaskTable()
    task = opened(table, chunks=1)
    (task,) = table.next_batch(8)
    task.take_arrivals()
    if not is_handed_over:
        table.close_input(A, TEXT.id)
    table.stepped(
        task,
        StepResult(outputs=[output()], has_backlog=is_handed_over, is_end_next=is_handed_over),
    )
    assert not task.may_send
    assert table.next_batch(8) == [task]
    table.stepped(task, StepResult(has_backlog=True))
    assert table.next_batch(8) == []


def test_all_of_a_task_precedes_its_end() -> None:
    """Views and outputs of the last step are sent before the end."""
    table = TaskTable()
    opened(table)
    payload = PayloadRef(SHARED_MEMORY, "x.1", 10)
    (task,) = table.next_batch(8)
    table.absorbed(task, {EdgeId("e"): 3})
    table.stepped(task, StepResult(outputs=[output()], viewed=[payload], end="finished"))
    messages = sent(table)
    assert [type(m) for m in messages] == [Consumed, Viewed, Produced, Ended]
    assert messages[0] == Consumed(A, EdgeId("e"), 3)
    assert messages[-1] == Ended(A, "finished")


def test_row_E8_statistics_end_with_the_last_task() -> None:
    """Nobody runs or waits then; who told nothing has nothing to correct."""
    table = TaskTable()
    for _ in range(2):
        opened(table)
        step(table, StepResult(end="finished"))
        assert sent(table) == [Ended(A, "finished")]
    others = [opened(table, key=task_key(name)) for name in "ab"]
    table.report(1, {"x": 0.5})
    assert sent(table) == [Reported(1, 1, {"x": 0.5})]
    for task in others:
        table.ended(task, "finished")
    assert [type(m) for m in sent(table)] == [Ended, Ended, Reported]
    opened(table)
    step(table, StepResult(end="finished"))
    assert sent(table) == [Ended(A, "finished")], "once"


def test_tasks_that_say_too_much_together_are_cut_short() -> None:
    """Each has kept to the limit, so nobody is at fault, and the link has its limit too."""
    table = TaskTable()
    table.report(2, {str(n): 0.0 for n in range(40)})
    (reported,) = sent(table)
    assert isinstance(reported, Reported)
    assert list(reported.values) == [str(n) for n in range(32)]


def test_a_failure_takes_what_was_not_sent_with_it() -> None:
    """Outputs that wait for send right are discarded when the task fails."""
    table = TaskTable()
    task = opened(table, chunks=1)
    table.produced(task, [output(), output()])
    sent(table)
    table.ended(task, BROKEN)
    assert sent(table) == [Ended(A, "failed", BROKEN)]
    assert len(table.unsent) == 1


def test_previews_take_no_send_right() -> None:
    """A preview is sent at once, without number or length of its own."""
    table = TaskTable()
    opened(table, chunks=1)
    step(table, StepResult(outputs=[output(preview=True), output(), output(preview=True)]))
    produced = [m for m in sent(table) if isinstance(m, Produced)]
    assert [(m.kind, m.seq) for m in produced] == [("preview", 0), ("preview", 0), ("data", 0)]
    assert produced[0].length == 0


@pytest.mark.parametrize("message", ["feed", "close_input", "grant", "cancel", "resume"])
def test_a_message_about_an_ended_task_is_late(message: str) -> None:
    """What crosses a task's end on the wire changes nothing."""
    table = TaskTable()
    match message:
        case "feed":
            feed(table)
        case "close_input":
            table.close_input(A, TEXT.id)
        case "grant":
            table.grant(A, 1, 1)
        case "cancel":
            table.cancel(A)
        case _:
            table.resume(A)
    assert sent(table) == []
    assert len(table) == 0


class TestCancel:
    """A cancel ends a task exactly once, in whatever state it is."""

    def test_before_its_first_step(self) -> None:
        """The compute thread knows nothing of it, so it ends at once."""
        table = TaskTable()
        opened(table)
        table.cancel(A)
        assert sent(table) == [Ended(A, "cancelled")]

    def test_between_steps(self) -> None:
        """It ends when the compute thread has released its state."""
        table = TaskTable()
        opened(table)
        step(table, StepResult(has_backlog=True))
        table.cancel(A)
        assert sent(table) == []
        assert table.next_batch(8) == []
        (task,) = table.closing()
        table.closed(task, [])
        assert sent(table) == [Ended(A, "cancelled")]

    def test_during_a_step(self) -> None:
        """The step's outputs are discarded, its payloads are reported, and its state is then released."""
        table = TaskTable()
        opened(table)
        (task,) = table.next_batch(8)
        table.cancel(A)
        assert table.closing() == []
        payload = PayloadRef(SHARED_MEMORY, "x.1", 10)
        table.absorbed(task, {EdgeId("e"): 1})
        table.stepped(task, StepResult(outputs=[output()], viewed=[payload]))
        assert sent(table) == [Viewed(A, payload)]
        assert len(table.unsent) == 1
        assert table.closing() == [task]

    def test_during_its_last_step(self) -> None:
        """A state that the step has released is not released again."""
        table = TaskTable()
        opened(table)
        (task,) = table.next_batch(8)
        table.cancel(A)
        table.stepped(task, StepResult(outputs=[output()], end="finished"))
        assert sent(table) == [Ended(A, "cancelled")]
        assert table.closing() == []

    def test_while_it_waits_for_send_right(self) -> None:
        """The outputs that wait are discarded; the state is already released."""
        table = TaskTable()
        opened(table, chunks=1)
        step(table, StepResult(outputs=[output(), output()], end="finished"))
        sent(table)
        table.cancel(A)
        assert sent(table) == [Ended(A, "cancelled")]
        assert len(table.unsent) == 1

    def test_while_it_pauses(self) -> None:
        """A pause that ends later wakes nobody."""
        table = TaskTable()
        opened(table)
        task = step(table, StepResult(has_backlog=True, after_s=1.0))
        assert task.state is TaskState.PAUSED
        table.cancel(A)
        table.resume(A)
        assert table.closing() == [task]


def test_a_paused_task_gets_no_step_until_it_resumes() -> None:
    """Its backend asked for time; others go on."""
    table = TaskTable()
    opened(table)
    task = step(table, StepResult(has_backlog=True, after_s=1.0))
    assert table.next_batch(8) == []
    table.resume(A)
    assert table.next_batch(8) == [task]


def test_tasks_that_have_sent_nothing_go_first() -> None:
    """A new task comes before one that was passed over, also where playback time means nothing."""
    table = TaskTable()
    for key in (task_key("first"), task_key("second")):
        task = table.open(opening(key), None)
        feed(table, key)
        table.produced(task, [output()])
    assert [task.key.request for task in table.next_batch(1)] == ["first"]
    table.open(opening(task_key("new")), None)
    feed(table, task_key("new"))
    assert [task.key.request for task in table.next_batch(1)] == ["new"]


def test_the_task_nearest_to_running_dry_goes_next() -> None:
    """Among tasks that have sent something, the one with the least playback time comes first."""
    table = TaskTable()
    keys = [task_key(name) for name in ("long", "short", "middle")]
    for key, media_s in zip(keys, (3.0, 1.0, 2.0), strict=True):
        task = table.open(opening(key), None)
        feed(table, key)
        table.produced(task, [output(media_s=media_s)])
    assert [task.key.request for task in table.next_batch(2)] == ["short", "middle"]


@pytest.mark.slow
@given(
    tasks=st.integers(1, 12),
    limit=st.integers(1, 5),
    media=st.lists(st.sampled_from([0.0, 0.1, 1.0]), min_size=12, max_size=12),
    silent=st.integers(0, 12),
)
@settings(max_examples=60, deadline=None)
def test_everybodys_turn_comes(tasks: int, limit: int, media: list[float], silent: int) -> None:
    """No ready task waits for longer than the others' patience, whatever they make or do not make."""
    table = TaskTable()
    keys = [task_key(f"r{number}") for number in range(tasks)]
    for key in keys:
        table.open(opening(key), None)
        feed(table, key)
    waits = dict.fromkeys(keys, 0)
    longest = 0
    for _ in range(200):
        batch = table.next_batch(limit)
        assert len(batch) == min(limit, tasks)
        for key in keys:
            waits[key] += 1
        for task in batch:
            waits[task.key] = 0
            number = keys.index(task.key)
            made = [] if number < silent else [output(media_s=media[number])]
            table.stepped(task, StepResult(outputs=made, has_backlog=True))
        longest = max(longest, *waits.values())
    rounds_for_all = -(-tasks // limit)
    assert longest <= PATIENCE + rounds_for_all


class Tables(RuleBasedStateMachine):
    """Any order of messages and outcomes, checked against what the wire must show."""

    def __init__(self) -> None:
        super().__init__()
        self.table = TaskTable()
        self.granted: dict[TaskKey, tuple[int, int]] = {}
        self.stepping: list[HeldTask] = []
        self.closing: list[HeldTask] = []
        self.sent: dict[TaskKey, list[object]] = {}
        self.made: list[PayloadRef] = []

    def take(self) -> None:
        """Look at every message as it goes out."""
        for message in sent(self.table):
            assert isinstance(message, Produced | Consumed | Viewed | Ended)
            before = self.sent[message.task]
            assert not any(isinstance(m, Ended) for m in before), "something follows the end"
            if isinstance(message, Produced):
                data = [m for m in before if isinstance(m, Produced)]
                chunks, nbytes = self.granted[message.task]
                assert message.seq == len(data)
                assert message.seq < chunks
                assert sum(m.payload.size_bytes for m in data) < nbytes
            before.append(message)

    @rule(chunks=st.integers(0, 3), nbytes=st.integers(0, 30))
    def open(self, chunks: int, nbytes: int) -> None:
        """Open another task with a small send right."""
        key = task_key(f"r{len(self.granted)}")
        self.granted[key] = (chunks, nbytes)
        self.sent[key] = []
        self.table.open(opening(key, chunks, nbytes), None)

    @precondition(lambda self: self.granted)
    @rule(data=st.data(), what=st.sampled_from(["feed", "close", "cancel", "resume"]))
    def message(self, data: st.DataObject, what: str) -> None:
        """Send something about a task that may have ended."""
        key = data.draw(st.sampled_from(list(self.granted)))
        match what:
            case "feed":
                feed(self.table, key)
            case "close":
                self.table.close_input(key, TEXT.id)
            case "cancel":
                self.table.cancel(key)
            case _:
                self.table.resume(key)
        self.take()

    @precondition(lambda self: self.granted)
    @rule(data=st.data(), chunks=st.integers(0, 4), nbytes=st.integers(0, 40))
    def grant(self, data: st.DataObject, chunks: int, nbytes: int) -> None:
        """Raise a send right."""
        key = data.draw(st.sampled_from(list(self.granted)))
        old_chunks, old_bytes = self.granted[key]
        self.granted[key] = (old_chunks + chunks, old_bytes + nbytes)
        self.table.grant(key, *self.granted[key])
        self.take()

    @precondition(lambda self: not self.stepping and not self.closing)
    @rule(limit=st.integers(1, 3))
    def start_round(self, limit: int) -> None:
        """Let the compute thread begin."""
        self.closing = self.table.closing()
        self.stepping = self.table.next_batch(limit)
        for task in self.stepping:
            assert not task.buffered
            task.take_arrivals()

    @precondition(lambda self: self.stepping or self.closing)
    @rule(
        outcomes=st.lists(
            st.tuples(
                st.lists(st.integers(1, 20), max_size=3),
                st.sampled_from([None, None, "finished", BROKEN]),
                st.booleans(),
                st.sampled_from([0.0, 1.0]),
            ),
            min_size=3,
            max_size=3,
        )
    )
    def end_round(self, outcomes: list[tuple[list[int], object, bool, float]]) -> None:
        """Let the compute thread report."""
        for task in self.closing:
            self.table.closed(task, [])
        for task, (sizes, end, backlog, after_s) in zip(self.stepping, outcomes, strict=False):
            outputs = [] if end is BROKEN else [output(size=size) for size in sizes]
            self.made += [made.payload for made in outputs]
            result = StepResult(outputs=outputs, has_backlog=backlog, after_s=after_s)
            result.end = BROKEN if end is BROKEN else "finished" if end else None
            self.table.stepped(task, result)
        self.stepping, self.closing = [], []
        self.take()

    @invariant()
    def nothing_is_lost(self) -> None:
        """Every payload made is sent, waiting or discarded, and ended tasks are gone."""
        announced = [m.payload for s in self.sent.values() for m in s if isinstance(m, Produced)]
        waiting: list[PayloadRef] = []
        for key, messages in self.sent.items():
            task = self.table.get(key)
            assert (task is None) == any(isinstance(m, Ended) for m in messages)
            waiting += [] if task is None else [made.payload for made in task.buffered]
        assert sorted(self.made) == sorted(announced + waiting + self.table.unsent)


Tables.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestTables = pytest.mark.slow(Tables.TestCase)
