"""What every channel to an orchestrator must do, whatever it is made of: rows Q of the contract.

    class TestThread(ChannelSuite):
        topology = ThreadTopology()

Each method is a test for pytest with pytest-asyncio. It runs against a real orchestrator, which is
made to end in every way in which one can end. Most checks need no replica and take milliseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Protocol

import msgspec

from stretto.config.loading import load_settings
from stretto.config.overrides import Override
from stretto.core.graph import Limits
from stretto.engine.channel import CLOSED, CRASHED, Address, Channel
from stretto.engine.client import EngineClient
from stretto.engine.thread import in_thread
from stretto.errors import EngineDead, InvalidRequest, Overloaded, StrettoError
from stretto.launch.restarts import Restarts
from stretto.launch.supervisor import OrchestratorSupervisor, start_process
from stretto.testing.ending_orchestrator import Ending, EndingOrchestrator
from stretto.types import RequestId

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
    from typing import TypeVar

    from stretto.config.settings import Settings
    from stretto.engine.stream import Stream

    T = TypeVar("T")

IN_TIME_S = 5.0
"""Longest wait for anything that must happen."""

AT_ONCE_S = 1.0
"""Longest wait of a reader for the news of an end."""

WINDOW_CHUNKS = 8
MAX_QUEUED = 64

_CRASHES = (Ending.EXCEPTION, Ending.SILENT_EXCEPTION, Ending.UNSPEAKABLE_EXCEPTION)
_BASE_EXCEPTIONS = (
    Ending.SYSTEM_EXIT,
    Ending.KEYBOARD_INTERRUPT,
    Ending.CANCELLED,
    Ending.SYSTEM_EXIT_IN_LOOP,
    Ending.KEYBOARD_INTERRUPT_IN_LOOP,
    Ending.CANCELLED_IN_LOOP,
)


class ChannelTopology(Protocol):
    """Where the orchestrator under test runs.

    Attributes:
        deaths: Endings that only this topology knows.
    """

    deaths: tuple[Ending, ...]

    def supervise(
        self, settings: Settings, restarts: Restarts
    ) -> tuple[OrchestratorSupervisor, Callable[[], Address]]:
        """Return what runs an `EndingOrchestrator`, and where it is reached once started."""
        ...


class ThreadTopology:
    """In a thread of this process."""

    deaths: tuple[Ending, ...] = ()

    def supervise(
        self, settings: Settings, restarts: Restarts
    ) -> tuple[OrchestratorSupervisor, Callable[[], Address]]:
        """Return what runs it, and its listener."""
        owner, listener = in_thread(
            settings, make_orchestrator=EndingOrchestrator, restarts=restarts
        )
        return owner, lambda: listener


class ProcessTopology:
    """In a child process."""

    deaths: tuple[Ending, ...] = (Ending.HARD_EXIT, Ending.KILL)

    def supervise(
        self, settings: Settings, restarts: Restarts
    ) -> tuple[OrchestratorSupervisor, Callable[[], Address]]:
        """Return what runs it, and its socket."""
        command = (sys.executable, "-m", "stretto.testing.run_ending_orchestrator")
        owner = OrchestratorSupervisor(
            settings, start_life=partial(start_process, command=command), restarts=restarts
        )
        return owner, lambda: owner.channel_path


class Running:
    """An orchestrator under test, and channels to it."""

    def __init__(self, owner: OrchestratorSupervisor, address: Address) -> None:
        self.owner = owner
        self._address = address
        self._channels: list[Channel] = []

    async def channel(self) -> Channel:
        """Return a new channel."""
        channel = await in_time(
            Channel.connect(self._address, run=self.owner.run, name="suite", limits=_limits())
        )
        self._channels.append(channel)
        return channel

    def client(self) -> EngineClient:
        """Return what follows every life of it."""
        return EngineClient(self._address, run=self.owner.run, name="suite", limits=_limits())

    async def aclose(self) -> None:
        """Close every channel."""
        for channel in self._channels:
            await channel.aclose()


class ChannelSuite:
    """Rows Q1 to Q18 as far as they concern one orchestrator; derive and name a topology."""

    topology: ClassVar[ChannelTopology]

    # ---- what is sent and read

    async def test_row_Q1_reading_needs_no_thread_and_no_task_of_its_own(self) -> None:
        """Parked reads are their readers' tasks, and nothing else runs here for the channel."""
        async with self._running() as running:
            channel = await running.channel()
            threads, tasks = threading.active_count(), len(asyncio.all_tasks())
            reads = [_reading(submit(channel)) for _ in range(20)]
            await round_trip(channel)
            assert threading.active_count() == threads
            assert len(asyncio.all_tasks()) == tasks + len(reads)
            await _abandon(reads)

    async def test_row_Q2_another_loop_gets_a_typed_error_at_once(self) -> None:
        """A channel and its streams belong to the loop that made them."""
        async with self._running() as running:
            channel = await running.channel()
            stream = submit(channel)

            async def read() -> None:
                await anext(stream)

            async def ask() -> None:
                submit(channel)

            for use in (read, ask):
                error = await asyncio.to_thread(_error_of, use)
                assert isinstance(error, InvalidRequest), error
                assert error.code == "wrong_event_loop"

    async def test_row_Q3_a_parked_read_waits_and_then_raises(self) -> None:
        """It is not answered with nothing, neither while all is well nor at the end."""
        async with self._running() as running:
            channel = await running.channel()
            reading = _reading(submit(channel))
            await round_trip(channel)
            assert not reading.done()
            submit(channel, Ending.EXCEPTION)
            assert isinstance(await at_once(reading), EngineDead)

    async def test_row_Q16_messages_keep_their_order(self) -> None:
        """The orchestrator's answers come in the order of the questions."""
        async with self._running() as running:
            channel = await running.channel()
            order: list[int] = []

            async def read(number: int, stream: Stream) -> None:
                assert isinstance(await _end_of(stream), InvalidRequest)
                order.append(number)

            async with asyncio.timeout(IN_TIME_S), asyncio.TaskGroup() as tasks:
                for number in range(50):
                    tasks.create_task(read(number, submit(channel, pipeline="unknown")))
            assert order == list(range(50))

    # ---- how it ends

    async def test_row_Q4_a_crash_is_told_after_what_was_sent_before(self) -> None:
        """Exceptions with and without a text: answers first, one fatal message, then closed."""
        for ending in _CRASHES:
            death = await self._end_by(ending)
            assert death.code == CRASHED, ending
            assert "crashed" in death.detail, ending
            if ending is Ending.EXCEPTION:
                assert "asked to break" in death.detail

    async def test_row_Q5_every_other_way_to_die_is_told_as_well(self) -> None:
        """`SystemExit`, `KeyboardInterrupt`, `CancelledError`, wherever raised, and sudden death."""
        for ending in (*_BASE_EXCEPTIONS, *self.topology.deaths):
            assert (await self._end_by(ending)).code == CRASHED, ending

    async def test_situation_A8_a_parked_reader_wakes_whatever_way_the_engine_leaves(self) -> None:
        """Within a second, after what was sent before."""
        for ending in (Ending.RETURN, Ending.EXCEPTION, *self.topology.deaths):
            await self._end_by(ending)

    async def test_row_Q6_a_clean_return_is_no_crash(self) -> None:
        """No fatal message, no error in the log; requests that are still open end with `EngineDead`."""
        with _errors_logged() as errors:
            assert (await self._end_by(Ending.RETURN)).code == CLOSED
        assert errors == []

    async def test_row_Q7_what_was_sent_before_stays_readable(self) -> None:
        """Streams that nobody had read before the end give what they have, and only then the end."""
        async with self._running() as running:
            channel = await running.channel()
            refused = [submit(channel, pipeline="unknown") for _ in range(5)]
            waiting = submit(channel)
            submit(channel, Ending.SYSTEM_EXIT_IN_LOOP)
            await at_once(channel.closed)
            assert [type(await _end_of(stream)) for stream in refused] == [InvalidRequest] * 5
            assert isinstance(await _end_of(waiting), EngineDead)

    async def test_row_Q9_closed_is_one_type_at_every_read_and_wait(self) -> None:
        """Streams, aborts and calls that wait for their answers, and everything that is asked later."""
        async with self._running() as running:
            channel = await running.channel()
            stream = submit(channel)
            submit(channel, Ending.EXCEPTION)
            abort = asyncio.ensure_future(channel.abort(stream.request))
            call = asyncio.ensure_future(channel.call("ping"))
            ready = asyncio.ensure_future(channel.wait_ready())
            await at_once(channel.closed)
            for wait in (abort, call, ready):
                assert isinstance(await at_once(_outcome(wait)), EngineDead)
            for _ in range(2):
                assert isinstance(await _end_of(stream), EngineDead)

    async def test_row_Q11_death_is_latched_and_the_next_epoch_follows(self) -> None:
        """The old channel stays dead; a client has the next epoch within five seconds."""
        async with self._running(restart=True) as running:
            channel = await running.channel()
            client = running.client()
            client.start()
            try:
                submit(channel, Ending.EXCEPTION)
                await at_once(channel.closed)
                for _ in range(2):
                    with _raises(EngineDead):
                        submit(channel)
                    with _raises(EngineDead):
                        await channel.abort(RequestId(f"{channel.welcome.channel}-1"))
                    with _raises(EngineDead):
                        await channel.call("ping")
                async with asyncio.timeout(IN_TIME_S):
                    while not (client.is_connected and client.channel.welcome.epoch == 2):  # noqa: PLR2004
                        await (
                            client.latest.closed
                            if client.is_connected and client.latest
                            else _turn()
                        )
                await round_trip(client.channel)
                assert not channel.is_open
            finally:
                await client.aclose()

    async def test_row_Q11_without_restart_the_owner_gives_up_in_time(self) -> None:
        """Whoever waits for it learns why."""
        async with self._running() as running:
            submit(await running.channel(), Ending.EXCEPTION)
            assert "died" in await in_time(running.owner.wait_gave_up())

    async def test_row_Q10_one_channel_that_fails_does_not_keep_another_waiting(self) -> None:
        """All channels of a life hear of its end, also beside one that has just been cut."""
        async with self._running() as running:
            channels = [await running.channel() for _ in range(3)]
            reads = [_reading(submit(channel)) for channel in channels]
            await round_trip(channels[0])
            submit(channels[0], Ending.EXCEPTION)
            await channels[1].aclose()
            for read in reads:
                assert isinstance(await at_once(read), EngineDead)

    async def test_row_Q13_all_that_waits_ends_in_the_turn_of_the_end(self) -> None:
        """Reads, aborts and readiness are over when the channel is."""
        async with self._running() as running:
            channel = await running.channel()
            streams = [submit(channel) for _ in range(3)]
            reads = [_reading(stream) for stream in streams]
            await round_trip(channel)
            submit(channel, Ending.KEYBOARD_INTERRUPT)
            await at_once(channel.closed)
            await _turn()
            assert all(read.done() for read in reads)
            counters = channel.statistics()
            assert (counters.open_requests, counters.waiting_aborts) == (0, 0)

    async def test_row_Q14_what_is_asked_of_a_dead_channel_harms_nobody(self) -> None:
        """Clean-up after the end raises nothing."""
        async with self._running() as running:
            channel = await running.channel()
            streams = [submit(channel) for _ in range(3)]
            submit(channel, Ending.EXCEPTION)
            await at_once(channel.closed)
            for stream in streams:
                await stream.aclose()
                await stream.aclose()
            await channel.aclose()

    async def test_row_Q16_closing_wakes_everyone_and_may_be_repeated(self) -> None:
        """This side's own close ends reads and aborts, and the orchestrator lives on."""
        async with self._running() as running:
            channel, other = await running.channel(), await running.channel()
            reads = [_reading(submit(channel)) for _ in range(3)]
            await round_trip(channel)
            await channel.aclose()
            await channel.aclose()
            for read in reads:
                assert isinstance(await at_once(read), EngineDead)
            await round_trip(other)

    # ---- load

    async def test_row_Q17_submitting_never_waits_and_the_bound_holds(self) -> None:
        """Beyond the admission bound requests are refused; those within it wait."""
        async with self._running() as running:
            channel = await running.channel()
            streams = [submit(channel) for _ in range(2 * MAX_QUEUED)]
            await round_trip(channel)
            assert channel.statistics().open_requests == MAX_QUEUED
            for stream in streams[MAX_QUEUED:]:
                error = await at_once(_end_of(stream))
                assert isinstance(error, Overloaded), error
                assert error.retry_after_s is not None

    async def test_row_Q15_a_stopped_reader_holds_its_producer_back_and_gets_its_end(self) -> None:
        """No more than the window arrives; the end is not held back by a full window."""
        async with self._running(replicas=1) as running:
            channel = await running.channel()
            await in_time(channel.wait_ready())
            stream = submit(channel, words=200)
            async with asyncio.timeout(IN_TIME_S):
                while channel.statistics().received_total < WINDOW_CHUNKS:
                    await round_trip(channel)
            for _ in range(20):
                await round_trip(channel)
            assert channel.statistics().received_total == WINDOW_CHUNKS
            submit(channel, Ending.EXCEPTION)
            await at_once(channel.closed)
            seen = [(await anext(stream)).seq for _ in range(WINDOW_CHUNKS)]
            assert seen == list(range(WINDOW_CHUNKS))
            assert isinstance(await _end_of(stream), EngineDead)

    async def test_row_Q12_an_error_ends_its_own_request_only(self) -> None:
        """One refused request among others that wait."""
        async with self._running() as running:
            channel = await running.channel()
            waiting = [_reading(submit(channel)) for _ in range(3)]
            assert isinstance(
                await at_once(_end_of(submit(channel, pipeline="unknown"))), InvalidRequest
            )
            assert not any(read.done() for read in waiting)
            await _abandon(waiting)

    async def test_row_Q18_the_end_of_one_channel_concerns_its_own_requests(self) -> None:
        """Others keep theirs, names stay unique, and a successor gets nothing that is not its own."""
        async with self._running() as running:
            first, second = await running.channel(), await running.channel()
            lost, kept = submit(first), submit(second)
            reading = _reading(kept)
            await round_trip(first)
            await first.aclose()
            await round_trip(second)
            assert not reading.done()
            third = await running.channel()
            new = submit(third)
            assert len({lost.request, kept.request, new.request}) == 3  # noqa: PLR2004
            await round_trip(third)
            assert third.statistics().dropped_unknown_total == 0
            await _abandon([reading])

    # ---- inside

    async def _end_by(self, ending: Ending) -> EngineDead:
        """Have an orchestrator end with readers parked and answers under way; return what they hear."""
        async with self._running() as running:
            channel = await running.channel()
            parked = _reading(submit(channel))
            await round_trip(channel)
            answered = [_reading(submit(channel, pipeline="unknown")) for _ in range(3)]
            submit(channel, ending)
            death = await at_once(parked)
            assert isinstance(death, EngineDead), ending
            for answer in answered:
                assert isinstance(await at_once(answer), InvalidRequest), ending
            return await at_once(channel.closed)

    @contextlib.asynccontextmanager
    async def _running(
        self, *, restart: bool = False, replicas: int = 0
    ) -> AsyncGenerator[Running]:
        restarts = Restarts(first_s=0.01, longest_s=0.01)
        owner, address = self.topology.supervise(_settings(restart, replicas), restarts)
        owner.start()
        running = Running(owner, address())
        try:
            yield running
        finally:
            await running.aclose()
            await owner.stop(0.0)


def submit(
    channel: Channel, ending: Ending | None = None, *, pipeline: str = "scripted", words: int = 1
) -> Stream:
    """Submit a request that waits, is refused, or ends the orchestrator."""
    return channel.submit(
        pipeline=pipeline,
        inputs={"text": {"text": "word " * words}},
        label="" if ending is None else ending.label,
    )


async def round_trip(channel: Channel) -> None:
    """Return when the orchestrator has dealt with all that was sent before."""
    assert isinstance(await in_time(_end_of(submit(channel, pipeline="unknown"))), InvalidRequest)


async def in_time(awaitable: Awaitable[T]) -> T:
    """Return the result; it must come within `IN_TIME_S`."""
    async with asyncio.timeout(IN_TIME_S):
        return await awaitable


async def at_once(awaitable: Awaitable[T]) -> T:
    """Return the result; it must come within `AT_ONCE_S`."""
    async with asyncio.timeout(AT_ONCE_S):
        return await awaitable


def _limits() -> Limits:
    return Limits(client_window_chunks=WINDOW_CHUNKS, max_queued=MAX_QUEUED)


def _settings(restart: bool, replicas: int) -> Settings:  # noqa: FBT001 - read by name above
    stages = ("relay", "tone")
    overrides = [
        Override.of_flag(f"stages.{stage}.replicas", replicas, "--suite") for stage in stages
    ]
    loaded = load_settings(["scripted"], environ={}, overrides=overrides)
    return msgspec.structs.replace(
        loaded,
        orchestrator=msgspec.structs.replace(
            loaded.orchestrator, restart=restart, limits=_limits()
        ),
        server=msgspec.structs.replace(loaded.server, drain_timeout_s=0.0),
    )


async def _end_of(stream: Stream) -> StrettoError | None:
    """Read a stream to its end and return what ended it."""
    try:
        async for _ in stream:
            pass
    except StrettoError as error:
        return error
    return None


def _reading(stream: Stream) -> asyncio.Task[StrettoError | None]:
    return asyncio.ensure_future(_end_of(stream))


async def _abandon(reads: list[asyncio.Task[StrettoError | None]]) -> None:
    for read in reads:
        read.cancel()
    await asyncio.wait(reads)


async def _outcome(wait: Awaitable[object]) -> object:
    try:
        return await wait
    except StrettoError as error:
        return error


def _error_of(use: Callable[[], Awaitable[None]]) -> StrettoError | None:
    """Return what a use on a loop of its own raises."""

    async def run() -> StrettoError | None:
        try:
            await use()
        except StrettoError as error:
            return error
        return None

    return asyncio.run(run())


async def _turn() -> None:
    """Let the loop turn once."""
    loop = asyncio.get_running_loop()
    turn = loop.create_future()
    loop.call_soon(turn.set_result, None)
    await turn


@contextlib.contextmanager
def _raises(kind: type[StrettoError]) -> Generator[None]:
    try:
        yield
    except kind:
        return
    raise AssertionError(f"{kind.__name__} was not raised")


@contextlib.contextmanager
def _errors_logged() -> Generator[list[str]]:
    """Collect what is logged here as an error or worse."""
    seen: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record.getMessage())

    handler = Collector(logging.ERROR)
    logging.getLogger().addHandler(handler)
    try:
        yield seen
    finally:
        logging.getLogger().removeHandler(handler)
