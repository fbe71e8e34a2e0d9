"""Step backends in a replica, at the other end of a real link."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from stretto.backends.scripted import check_counter_audio, tag_of
from stretto.core.commands import UNLIMITED
from stretto.errors import FailureKind
from stretto.messages.link import (
    Cancel,
    Consumed,
    Drain,
    Ended,
    Grant,
    Produced,
    Release,
    Reported,
    Viewed,
)
from stretto.types import INLINE, SHARED_MEMORY, TaskKey
from tests.replica import backends
from tests.replica.rig import REPLICA, Rig, edge, listening, numbered, replica_here, task_key

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

OBEDIENT = f"{backends.__name__}:Obedient"
A, B, C = (task_key(name) for name in "abc")


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncGenerator[Rig]:
    """Listen for a replica."""
    shared = tmp_path / "shm"
    shared.mkdir()
    async with listening(tmp_path, shared) as rig:
        yield rig


@pytest.fixture
def seen() -> backends.Recorder:
    """Record what the backend is asked."""
    return backends.forget()


def begin(rig: Rig, *keys: TaskKey) -> None:
    """Open tasks without feeding them."""
    for key in keys:
        rig.open(key)


def say(rig: Rig, **texts: str) -> None:
    """Feed each named task one text, in one frame."""
    for name, text in texts.items():
        rig.feed(task_key(name), {"text": text})


async def test_a_task_runs_from_open_to_finished(rig: Rig) -> None:
    """Its chunks arrive in order, complete, and its end comes last."""
    async with replica_here(rig, "scripted"):
        rig.run_task(A, "hello", '{"chunks": 7, "bytes": 100}')
        assert (await rig.ended(A)).outcome == "finished"
        produced = rig.of(Produced, A)
        assert [m.seq for m in produced] == list(range(7))
        assert [m.offset for m in produced] == [50 * n for n in range(7)]
        assert check_counter_audio(rig.audio(A), tag_of("hello")) == 350
        assert rig.of(Consumed, A)[-1].up_to == 1


async def test_tasks_do_not_mix(rig: Rig) -> None:
    """Each of many concurrent tasks gets its own audio, whole."""
    async with replica_here(rig, "scripted", max_batch=3):
        keys = list(numbered(12))
        for key in keys:
            rig.run_task(key, key.request, '{"chunks": 9}')
        for key in keys:
            await rig.ended(key)
            assert check_counter_audio(rig.audio(key), tag_of(key.request)) == 9 * 480


async def test_what_is_there_is_batched_and_sent_in_one_frame(
    rig: Rig, seen: backends.Recorder
) -> None:
    """Inputs that arrive together are stepped together, and their outputs travel together."""
    async with replica_here(rig, OBEDIENT):
        begin(rig, A, B, C)
        say(rig, a="x", b="y", c="z")
        await rig.until(lambda: len(rig.of(Produced)) == 3)
        assert seen.batches == [["a", "b", "c"]]
        assert sum(any(isinstance(m, Produced) for m in frame) for frame in rig.frames) == 1


async def test_no_more_tasks_than_configured_are_in_a_step(
    rig: Rig, seen: backends.Recorder
) -> None:
    """`max_batch` bounds each step."""
    async with replica_here(rig, OBEDIENT, max_batch=2):
        begin(rig, A, B, C)
        say(rig, a="x", b="y", c="z")
        await rig.until(lambda: len(rig.of(Produced)) == 3)
        assert [len(batch) for batch in seen.batches] == [2, 1]


async def test_a_step_waits_for_company_if_so_configured(rig: Rig, seen: backends.Recorder) -> None:
    """A task that becomes ready within `max_wait_ms` joins the step."""
    async with replica_here(rig, OBEDIENT, max_wait_ms=3000):
        begin(rig, A, B)
        say(rig, a="x")
        begin(rig, C)
        rig.send(Cancel(C))
        await rig.ended(C)
        say(rig, b="y")
        await rig.until(lambda: len(rig.of(Produced)) == 2)
        assert seen.batches == [["a", "b"]]


async def test_a_lone_task_does_not_wait_for_company(rig: Rig) -> None:
    """With no other task open nobody can come; waiting would only add delay."""
    async with replica_here(rig, OBEDIENT, max_wait_ms=60_000):
        begin(rig, A)
        say(rig, a="x")
        await rig.until(lambda: rig.of(Produced, A))


class TestIsolation:
    """What goes wrong with one task stays with it."""

    async def test_an_exception_as_outcome_fails_its_task_only(
        self, rig: Rig, seen: backends.Recorder
    ) -> None:
        """The failure carries type, text and replica; the neighbour's chunk arrives."""
        async with replica_here(rig, OBEDIENT):
            begin(rig, A, B)
            say(rig, a="fail so", b="fine")
            failure = (await rig.ended(A)).failure
            assert failure is not None
            assert failure.kind is FailureKind.STAGE_ERROR
            assert (failure.detail, failure.where) == ("ValueError: so", str(REPLICA))
            await rig.until(lambda: rig.chunks(B) == [{"text": "fine"}])
            assert seen.closed == {"a": 1}

    async def test_an_exception_out_of_a_step_fails_the_tasks_of_this_step_only(
        self, rig: Rig, seen: backends.Recorder
    ) -> None:
        """Memory errors included; tasks of other steps go on."""
        async with replica_here(rig, OBEDIENT):
            begin(rig, A, B, C)
            say(rig, a="break", b="fine")
            for key in (A, B):
                failure = (await rig.ended(key)).failure
                assert failure is not None
                assert failure.detail == "MemoryError: broken on purpose"
            say(rig, c="fine")
            await rig.until(lambda: rig.chunks(C))
            assert seen.closed == {"a": 1, "b": 1}

    @pytest.mark.parametrize(
        ("text", "detail"),
        [
            ("short", "gave 0 outcomes for 1 items"),
            ("nothing", "returned a NoneType; the outcomes of a step"),
            ("none", "returned a NoneType; an item's outcome"),
            ("bad", "'bad' can't be carried"),
        ],
    )
    async def test_a_backend_that_breaks_the_contract_is_told_how(
        self, rig: Rig, seen: backends.Recorder, text: str, detail: str
    ) -> None:
        """The task fails with a text that says what the backend did; the replica stays."""
        async with replica_here(rig, OBEDIENT):
            begin(rig, A)
            say(rig, a=text)
            failure = (await rig.ended(A)).failure
            assert failure is not None
            assert detail in failure.detail
            assert seen.closed == {"a": 1}
            begin(rig, B)
            say(rig, b="fine")
            await rig.until(lambda: rig.chunks(B))

    async def test_a_task_that_is_refused_at_open_is_not_closed(
        self, rig: Rig, seen: backends.Recorder
    ) -> None:
        """There is no state to release."""
        async with replica_here(rig, OBEDIENT):
            rig.open(A, options={"refuse": 1})
            rig.feed(A, {"text": "x"})
            failure = (await rig.ended(A)).failure
            assert failure is not None
            assert "refused at open" in failure.detail
            assert not seen.closed

    async def test_an_exception_at_close_changes_nothing_for_the_task(
        self, rig: Rig, seen: backends.Recorder
    ) -> None:
        """The task has already ended well."""
        async with replica_here(rig, OBEDIENT):
            rig.open(A, options={"stuck": 1})
            say(rig, a="x")
            rig.close_input(A)
            assert (await rig.ended(A)).outcome == "finished"
            assert seen.closed == {"a": 1}

    async def test_options_that_are_wrong_are_the_clients_fault(self, rig: Rig) -> None:
        """The failure names the field."""
        async with replica_here(rig, "scripted"):
            rig.run_task(A, "x", '{"chunks": "many"}')
            failure = (await rig.ended(A)).failure
            assert failure is not None
            assert (failure.kind, failure.param) == (FailureKind.INVALID_REQUEST, "script")

    async def test_a_lost_payload_fails_its_task(self, rig: Rig) -> None:
        """The failure is retryable, so the router may produce it again."""
        async with replica_here(rig, OBEDIENT):
            begin(rig, A)
            payload = rig.feed(A, {"text": "x" * 100_000})
            assert payload.place == SHARED_MEMORY
            assert rig.shared_memory_dir is not None
            (Path(rig.shared_memory_dir) / payload.key).unlink()
            failure = (await rig.ended(A)).failure
            assert failure is not None
            assert failure.kind is FailureKind.PAYLOAD_LOST


async def test_row_E21_metrics_are_told_whatever_comes_of_the_chunk(rig: Rig) -> None:
    """The numbers of an outcome that can't be sent are true all the same."""
    backends.forget()
    async with replica_here(rig, OBEDIENT):
        rig.run_task(A, "measured")
        assert (await rig.ended(A)).outcome == "failed"
        told = await rig.until(lambda: rig.of(Reported)[1:] and rig.of(Reported))
        assert [(m.running, m.values) for m in told] == [(1, {"seen": 1.0}), (0, {"seen": 1.0})]


class TestEnds:
    """When a task has ended, and what may still follow."""

    async def test_the_end_of_the_inputs_ends_a_task(
        self, rig: Rig, seen: backends.Recorder
    ) -> None:
        """The backend sees one last, empty item."""
        async with replica_here(rig, OBEDIENT):
            begin(rig, A)
            say(rig, a="x")
            rig.close_input(A)
            assert (await rig.ended(A)).outcome == "finished"
            assert [(item.final, item.last) for item in seen.inputs["a"]] == [
                (False, False),
                (True, True),
            ]
            assert seen.closed == {"a": 1}

    async def test_a_backend_may_finish_before_its_inputs_do(
        self, rig: Rig, seen: backends.Recorder
    ) -> None:
        """What arrives later is late and does no harm."""
        async with replica_here(rig, OBEDIENT):
            begin(rig, A)
            say(rig, a="finish")
            await rig.ended(A)
            say(rig, a="late")
            rig.close_input(A)
            rig.send(Cancel(A))
            begin(rig, B)
            say(rig, b="x")
            await rig.until(lambda: rig.chunks(B))
            assert rig.end(A) is not None
            assert seen.closed == {"a": 1}

    async def test_an_edge_is_final_and_the_last_one_is_last(
        self, rig: Rig, seen: backends.Recorder
    ) -> None:
        """With two edges the task goes on until both have ended."""
        one, other = edge("one"), edge("other")
        async with replica_here(rig, OBEDIENT):
            rig.open(A, one, other)
            rig.feed(A, {"text": "x"}, one)
            rig.close_input(A, one)
            rig.feed(A, {"text": "y"}, other)
            rig.close_input(A, other)
            await rig.ended(A)
            assert [(i.name, i.final, i.last) for i in seen.inputs["a"]] == [
                ("one", False, False),
                ("one", True, False),
                ("other", False, False),
                ("other", True, True),
            ]

    async def test_draining_waits_for_the_last_task(self, rig: Rig) -> None:
        """Then the replica leaves by itself, with exit code 0."""
        async with replica_here(rig, OBEDIENT) as living:
            begin(rig, A)
            say(rig, a="x")
            rig.send(Drain())
            await rig.until(lambda: rig.chunks(A))
            assert not living.done()
            rig.close_input(A)
            await rig.until(lambda: rig.closed)
            assert rig.end(A) is not None
            assert await living == 0


class TestCredit:
    """A send right is a limit, and credit for inputs flows back in time."""

    async def test_nothing_is_sent_beyond_the_send_right(
        self, rig: Rig, seen: backends.Recorder
    ) -> None:
        """Chunks come one by one as they are granted, and no step runs for those that may not be sent."""
        async with replica_here(rig, "scripted"):
            rig.open(A, options={"script": '{"chunks": 5}'}, chunks=0)
            rig.feed(A, {"text": "x"})
            rig.close_input(A)
            rig.run_task(B, "y", '{"chunks": 2}')
            await rig.ended(B)
            for granted in range(1, 6):
                assert len(rig.of(Produced, A)) == granted - 1
                rig.send(Grant(A, granted, UNLIMITED))
                await rig.until(lambda n=granted: len(rig.of(Produced, A)) == n)
                key = task_key(f"after{granted}")
                rig.run_task(key, "z", '{"chunks": 3}')
                await rig.ended(key)
            assert (await rig.ended(A)).outcome == "finished"
            assert not seen.batches

    async def test_bytes_limit_too(self, rig: Rig) -> None:
        """A chunk may be sent while fewer bytes than granted were sent."""
        async with replica_here(rig, "scripted"):
            rig.open(A, options={"script": '{"chunks": 5, "bytes": 1000}'}, nbytes=1001)
            rig.feed(A, {"text": "x"})
            rig.run_task(B, "y", '{"chunks": 20}')
            await rig.ended(B)
            assert len(rig.of(Produced, A)) == 1
            rig.send(Grant(A, UNLIMITED, 5000))
            await rig.until(lambda: len(rig.of(Produced, A)) == 5)

    async def test_a_steps_surplus_waits_and_the_task_with_it(
        self, rig: Rig, seen: backends.Recorder
    ) -> None:
        """Outputs of one step beyond the right are kept; other tasks go on."""
        async with replica_here(rig, OBEDIENT):
            rig.open(A, chunks=2)
            say(rig, a="many 4")
            rig.feed(A, {"text": "next"})
            begin(rig, B)
            say(rig, b="x")
            await rig.until(lambda: rig.chunks(B))
            assert rig.chunks(A) == [{"n": 0}, {"n": 1}]
            assert "next" not in [i.payload.get("text") for i in seen.inputs["a"]]
            rig.send(Grant(A, 5, UNLIMITED))
            await rig.until(lambda: len(rig.chunks(A)) == 5)
            assert rig.chunks(A)[2:] == [{"n": 2}, {"n": 3}, {"text": "next"}]

    async def test_chunks_are_consumed_before_their_step_ends(
        self, rig: Rig, seen: backends.Recorder
    ) -> None:
        """Credit must not wait for the output: the step here does not end until it has come."""
        async with replica_here(rig, OBEDIENT):
            seen.may_step.clear()
            begin(rig, A)
            say(rig, a="x")
            await rig.until(lambda: rig.of(Consumed, A))
            assert not rig.chunks(A)
            seen.may_step.set()
            await rig.until(lambda: rig.chunks(A))

    async def test_chunks_that_nobody_needs_yet_are_not_consumed(
        self, rig: Rig, seen: backends.Recorder
    ) -> None:
        """A task without send right closes its input window."""
        async with replica_here(rig, OBEDIENT):
            rig.open(A, chunks=1)
            for text in ("one", "two", "three"):
                say(rig, a=text)
            await rig.until(lambda: rig.chunks(A))
            begin(rig, B)
            say(rig, b="x")
            await rig.until(lambda: rig.chunks(B))
            assert [m.up_to for m in rig.of(Consumed, A)] == [1]
            assert len(seen.inputs["a"]) == 1


class TestMore:
    """An item that takes several steps."""

    async def test_other_tasks_get_their_steps_in_between(
        self, rig: Rig, seen: backends.Recorder
    ) -> None:
        """A long output does not keep the thread."""
        async with replica_here(rig, "scripted", max_batch=1):
            rig.run_task(A, "long", '{"chunks": 200}')
            await rig.until(lambda: rig.of(Produced, A))
            rig.run_task(B, "short", '{"chunks": 1}')
            await rig.ended(B)
            assert rig.end(A) is None
            await rig.ended(A)
            assert not seen.batches

    async def test_a_pause_holds_back_its_task_only(self, rig: Rig) -> None:
        """A task that waits for the end of days does not hold up another."""
        async with replica_here(rig, OBEDIENT):
            begin(rig, A, B)
            say(rig, a="sleep inf", b="x")
            await rig.until(lambda: rig.chunks(B))
            rig.send(Cancel(A))
            assert (await rig.ended(A)).outcome == "cancelled"

    async def test_a_pause_ends(self, rig: Rig) -> None:
        """The scripted delay passes and the chunk comes."""
        async with replica_here(rig, "scripted"):
            rig.run_task(A, "x", '{"chunks": 2, "first_delay_s": 0.01, "delay_s": 0.01}')
            assert (await rig.ended(A)).outcome == "finished"
            assert len(rig.chunks(A)) == 2


class TestCancel:
    """A cancelled task ends, once, and leaves nothing behind."""

    async def test_in_the_middle(self, rig: Rig, seen: backends.Recorder) -> None:
        """Its state is released once; nothing follows its end."""
        async with replica_here(rig, OBEDIENT):
            begin(rig, A)
            say(rig, a="more")
            await rig.until(lambda: rig.chunks(A))
            rig.send(Cancel(A))
            rig.send(Cancel(A))
            assert await rig.ended(A) == Ended(A, "cancelled")
            begin(rig, B)
            say(rig, b="x")
            await rig.until(lambda: rig.chunks(B))
            assert rig.end(A) is not None
            assert seen.closed == {"a": 1}

    async def test_before_it_has_started(self, rig: Rig, seen: backends.Recorder) -> None:
        """Opened and cancelled in one frame, it never reaches the backend."""
        async with replica_here(rig, OBEDIENT):
            begin(rig, A)
            say(rig, a="x")
            rig.send(Cancel(A))
            assert (await rig.ended(A)).outcome == "cancelled"
            assert not seen.opened

    async def test_during_a_step(self, rig: Rig, seen: backends.Recorder) -> None:
        """The step's outputs for it are discarded, its neighbour's are not."""
        async with replica_here(rig, OBEDIENT):
            begin(rig, A, B)
            seen.may_step.clear()
            say(rig, a="x", b="y")
            await asyncio.to_thread(seen.stepping.wait, 5)
            rig.send(Cancel(A))
            rig.send(Grant(B, UNLIMITED, UNLIMITED))
            begin(rig, C)
            await rig.until(lambda: rig.of(Consumed))
            seen.may_step.set()
            await rig.ended(A)
            await rig.until(lambda: rig.chunks(B))
            assert seen.closed == {"a": 1}

    async def test_while_its_last_outputs_wait(self, rig: Rig, seen: backends.Recorder) -> None:
        """Its state is already released and is not released again."""
        async with replica_here(rig, OBEDIENT):
            rig.open(A, chunks=1)
            say(rig, a="many 3")
            rig.close_input(A)
            await rig.until(lambda: rig.chunks(A))
            rig.send(Cancel(A))
            assert (await rig.ended(A)).outcome == "cancelled"
            assert seen.closed == {"a": 1}


class TestSharedMemory:
    """Large payloads travel by reference."""

    async def test_a_view_may_be_given_back_uncopied(self, rig: Rig) -> None:
        """Input in shared memory, output in shared memory, the same bytes."""
        data = bytes(range(256)) * 400
        async with replica_here(rig, f"{backends.__name__}:Copycat"):
            begin(rig, A)
            payload = rig.feed(A, {"data": memoryview(data)})
            await rig.until(lambda: rig.of(Viewed, A))
            (made,) = rig.of(Produced, A)
            assert made.payload.place == SHARED_MEMORY != INLINE
            assert made.payload.key.startswith("nonce.")
            view = rig.chunks(A)[0]["data"]
            assert isinstance(view, memoryview)
            assert view.tobytes() == data
            assert rig.of(Viewed, A) == [Viewed(A, payload)]
            rig.send(Release((made.payload.key,)))

    async def test_a_view_that_a_backend_keeps_is_reported_when_it_is_gone(self, rig: Rig) -> None:
        """At the latest when the task ends, and before its end."""
        async with replica_here(rig, f"{backends.__name__}:Hoarder"):
            begin(rig, A, B)
            rig.feed(A, {"data": memoryview(bytes(100_000))})
            rig.feed(B, {"data": memoryview(bytes(10))})
            rig.close_input(B)
            await rig.ended(B)
            assert not rig.of(Viewed, A)
            rig.close_input(A)
            await rig.ended(A)
            assert len(rig.of(Viewed, A)) == 1

    async def test_discarded_outputs_are_freed(self, rig: Rig) -> None:
        """The store has room for two files only, and each task discards one of its two."""
        async with replica_here(
            rig, f"{backends.__name__}:Twice", shared_memory_bytes=2 * 128 * 1024
        ):
            for key in numbered(4):
                rig.open(key, chunks=1)
                rig.feed(key, {"data": memoryview(bytes(100_000))})
                (made,) = await rig.until(lambda k=key: rig.of(Produced, k))
                assert made.payload.place == SHARED_MEMORY
                rig.send(Cancel(key))
                await rig.ended(key)
                rig.send(Release((made.payload.key,)))
            rig.open(A)
            rig.feed(A, {"data": memoryview(bytes(100_000))})
            await rig.until(lambda: len(rig.of(Produced, A)) == 2)
            assert [m.payload.place for m in rig.of(Produced, A)] == [SHARED_MEMORY] * 2
