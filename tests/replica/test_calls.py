"""Calls into a replica, at the other end of a real link."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, ClassVar

import msgspec
import pytest

from stretto.errors import ConfigError, FailureKind
from stretto.messages import MAX_CALL_BYTES, link
from stretto.replica.calls import BUILT_IN, PROFILE_LINES, checked_methods
from stretto.types import CallClass, CallId
from tests.replica import backends
from tests.replica.rig import REPLICA, Rig, listening, replica_here, replica_process, task_key

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from stretto.errors import Failure

A = task_key("a")
CALLED = f"{backends.__name__}:Called"


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncGenerator[Rig]:
    """Listen for a replica."""
    async with listening(tmp_path) as rig:
        yield rig


class Caller:
    """Calls methods of the rig's replica."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.count = 0

    def begin(self, method: str, **arguments: object) -> CallId:
        """Send a call of the class that the replica has told."""
        self.count += 1
        call = CallId(f"1.1-call-{self.count}")
        (ready,) = self.rig.of(link.Ready)
        call_class = ready.methods[method]
        self.rig.send(link.Call(call, method, call_class, msgspec.msgpack.encode(arguments)))
        return call

    def answer(self, call: CallId) -> link.CallAnswered | None:
        """Return the answer; at most one is ever sent."""
        found = [each for each in self.rig.of(link.CallAnswered) if each.call == call]
        assert len(found) <= 1
        return found[0] if found else None

    async def answered(self, call: CallId) -> link.CallAnswered:
        """Wait for the answer."""
        return await self.rig.until(lambda: self.answer(call))

    async def value(self, method: str, **arguments: object) -> object:
        """Return what a call gives."""
        answer = await self.answered(self.begin(method, **arguments))
        assert answer.failure is None, answer.failure
        return msgspec.msgpack.decode(answer.value)

    async def failure(self, method: str, **arguments: object) -> Failure:
        """Return why a call fails."""
        answer = await self.answered(self.begin(method, **arguments))
        assert answer.failure is not None
        assert not answer.value
        return answer.failure


async def test_every_replica_tells_what_can_be_called(rig: Rig) -> None:
    """Its own methods, and those that its backend offers."""
    async with replica_here(rig, "scripted"):
        (ready,) = rig.of(link.Ready)
        assert ready.methods == {
            **BUILT_IN,
            "echo": "control",
            "wait": "control",
            "compute": "exclusive",
            "kill": "control",
        }
        caller = Caller(rig)
        assert await caller.value("ping") == "pong"
        assert await caller.value("echo", value={"a": [1, None]}) == {"a": [1, None]}


@pytest.mark.parametrize(("backend", "least"), [("scripted", 3), ("scripted_stream", 3)])
async def test_statistics_count_what_the_replica_does(rig: Rig, backend: str, least: int) -> None:
    """Slots, open tasks, steps, memory and age."""
    name = {"scripted": "scripted", "scripted_stream": "stretto.backends.scripted:ScriptedStream"}
    async with replica_here(rig, name[backend], slots=5):
        rig.run_task(A, "hello", '{"chunks": 3, "bytes": 100}')
        await rig.ended(A)
        rig.open(task_key("b"))
        found = await Caller(rig).value("statistics")
        assert isinstance(found, dict)
        assert found["slots"] == 5
        assert found["tasks"] == 1
        assert found["steps"] >= least
        assert found["max_rss_bytes"] > 10_000_000
        assert found["uptime_s"] > 0
        assert found["is_asleep"] is False


async def test_row_M5_a_slow_call_delays_neither_tasks_nor_other_calls(rig: Rig) -> None:
    """A control call that waits is beside everything."""
    async with replica_here(rig, "scripted"):
        caller = Caller(rig)
        slow = caller.begin("wait", seconds=60)
        assert await caller.value("ping") == "pong"
        rig.run_task(A, "hello", '{"chunks": 2}')
        assert (await rig.ended(A)).outcome == "finished"
        assert caller.answer(slow) is None


async def test_an_exclusive_method_runs_in_the_compute_thread(rig: Rig) -> None:
    """A control method does not."""
    async with replica_here(rig, CALLED):
        caller = Caller(rig)
        assert await caller.value("thread_alone") == "stretto-compute"
        assert await caller.value("thread_beside") != "stretto-compute"


@pytest.mark.parametrize("method", ["break_alone", "break_beside", "break_later"])
async def test_what_a_method_raises_fails_its_call_only(rig: Rig, method: str) -> None:
    """Type and text arrive; the replica goes on."""
    async with replica_here(rig, CALLED):
        caller = Caller(rig)
        failure = await caller.failure(method)
        assert failure.kind is FailureKind.STAGE_ERROR
        assert (failure.detail, failure.where) == ("ValueError: on purpose", str(REPLICA))
        assert await caller.value("ping") == "pong"


async def test_arguments_that_do_not_fit_are_the_callers_mistake(rig: Rig) -> None:
    """Wrong names, missing ones, and bytes that are no arguments."""
    async with replica_here(rig, "scripted"):
        caller = Caller(rig)
        for arguments in ({"minutes": 1}, {}):
            failure = await caller.failure("wait", **arguments)
            assert (failure.kind, failure.param) == (FailureKind.INVALID_REQUEST, "arguments")
        rig.send(link.Call(CallId("x"), "ping", "control", b"\x01"))
        answer = await caller.answered(CallId("x"))
        assert answer.failure is not None
        assert answer.failure.kind is FailureKind.INVALID_REQUEST


async def test_results_that_cannot_be_sent_fail_the_call(rig: Rig) -> None:
    """An object that msgpack does not know, and one that is too large."""
    async with replica_here(rig, CALLED):
        caller = Caller(rig)
        assert "can't be sent" in (await caller.failure("give_object")).detail
        failure = await caller.failure("give_bytes", count=MAX_CALL_BYTES)
        assert str(MAX_CALL_BYTES) in failure.detail


async def test_a_replica_sleeps_and_wakes(rig: Rig) -> None:
    """Its answers say so; doing it twice is doing it once."""
    async with replica_here(rig, "scripted"):
        caller = Caller(rig)
        states = [
            (await caller.answered(caller.begin(method))).is_asleep
            for method in ("ping", "sleep", "sleep", "ping", "wake", "wake", "sleep", "wake")
        ]
        assert states == [False, True, True, True, False, False, True, False]


@pytest.mark.parametrize("method", ["sleep", "wake"])
async def test_a_backend_that_cannot_sleep_says_so(rig: Rig, method: str) -> None:
    """A typed refusal, and the replica stays awake."""
    async with replica_here(rig, CALLED):
        caller = Caller(rig)
        answer = await caller.answered(caller.begin(method))
        assert answer.failure is not None
        assert (answer.failure.code, answer.is_asleep) == ("not_supported", False)


async def test_the_compute_thread_is_profiled_while_it_works(rig: Rig) -> None:
    """The report names the functions that took time; a start needs a stop, and a stop a start."""
    async with replica_here(rig, "scripted"):
        caller = Caller(rig)
        assert (await caller.failure("profile_stop")).code == "not_possible"
        assert await caller.value("profile_start") is None
        assert (await caller.failure("profile_start")).code == "not_possible"
        rig.run_task(A, "hello", '{"chunks": 3, "cost_s": 0.005}')
        await rig.ended(A)
        report = await caller.value("profile_stop", lines=PROFILE_LINES)
        assert isinstance(report, str)
        assert "scripted.py" in report
        assert "step" in report
        assert (await caller.failure("profile_stop")).code == "not_possible"


@pytest.mark.parametrize("lines", ["many", 0, PROFILE_LINES + 1])
async def test_a_report_of_a_strange_length_is_refused(rig: Rig, lines: object) -> None:
    """The profile goes on."""
    async with replica_here(rig, "scripted"):
        caller = Caller(rig)
        await caller.value("profile_start")
        failure = await caller.failure("profile_stop", lines=lines)
        assert (failure.kind, failure.param) == (FailureKind.INVALID_REQUEST, "arguments")
        await caller.value("profile_stop")


async def test_a_method_that_exits_takes_its_replica_with_it(rig: Rig) -> None:
    """Exit code 1 and the reason, instead of a replica that looks alive."""
    async with replica_process(rig, CALLED) as process:
        await rig.start()
        Caller(rig).begin("leave")
        async with asyncio.timeout(10):
            assert await process.wait() == 1


class Offering:
    """A backend's class."""

    rpc_methods: ClassVar[object] = {}
    number = 1

    def plain(self) -> None:
        """Do nothing."""

    async def later(self) -> None:
        """Do nothing."""


@pytest.mark.parametrize(
    ("offered", "words"),
    [
        (["plain"], "is a mapping"),
        ({1: "control"}, "a public name"),
        ({"_plain": "control"}, "a public name"),
        ({"ping": "control"}, "take another name"),
        ({"plain": "often"}, "use `control` or `exclusive`"),
        ({"nothing": "control"}, "no such method"),
        ({"number": "control"}, "no such method"),
        ({"later": "exclusive"}, "plain function"),
    ],
)
def test_a_backend_that_offers_what_cannot_be_called_is_refused(
    offered: object, words: str
) -> None:
    """When it is loaded, with what to change."""
    with pytest.raises(ConfigError, match=words):
        checked_methods("x:Offering", type("Bad", (Offering,), {"rpc_methods": offered}))


def test_a_backend_that_offers_nothing_is_fine() -> None:
    """The attribute may be missing."""
    assert checked_methods("x:Object", object) == {}
    good: dict[str, CallClass] = {"plain": "exclusive", "later": "control"}
    assert checked_methods("x", type("Good", (Offering,), {"rpc_methods": good})) == good
