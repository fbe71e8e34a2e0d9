"""The client's end of a channel: one connection to one life of the orchestrator.

Rules

* What was sent before an end is delivered before it: outputs, then the terminal, then death.
* The end of the channel is one error, `EngineDead`, at every stream, every abort, question and call that
  waits for its answer, and everything later. It is latched: an engine that comes back has another channel.
* An end that was announced (`Closing`) is clean. One that was not is a crash, and this side says so.
* Nothing here waits for the orchestrator: `submit` and aborts are queued and sent in this turn.
* A request has an entry in `_inboxes` until its terminal arrives, or until its reader gives it up; then
  its number stays in `_abandoned` until the terminal arrives. Both are empty when nothing is open.

A channel belongs to the event loop on which it was made.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, assert_never

import msgspec

from stretto.core.commands import ReplicaState, Timings
from stretto.core.graph import Limits
from stretto.engine.calls import RpcResult, call_message, call_results
from stretto.engine.payloads import OutputPayloads, inline_payload
from stretto.engine.readiness import Readiness
from stretto.engine.stream import Inbox, Stream, Window
from stretto.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineDead,
    InvalidRequest,
    Overloaded,
    StrettoError,
)
from stretto.messages import PROTOCOL_VERSION
from stretto.messages import channel as wire
from stretto.transport.connection import Connection, connect_unix
from stretto.transport.frames import FrameError
from stretto.transport.local import ChannelEnd, LocalConnection, LocalListener
from stretto.types import (
    INLINE,
    InputName,
    OutputName,
    Payload,
    PayloadRef,
    PipelineName,
    ReplicaId,
    RequestId,
    RunId,
    SessionId,
    StageId,
    Value,
)

if TYPE_CHECKING:
    from stretto.core.events import Affinity

log = logging.getLogger("stretto.engine")

ReplicaCallback = Callable[[ReplicaState], None]

Address = str | LocalListener[wire.Up, wire.Down]
"""Where an orchestrator is reached: the path of its channel socket, or its thread in this process."""

CRASHED = "engine_crashed"
"""Code of an `EngineDead` whose end came without notice: a successor may follow."""

CLOSED = "engine_closed"
"""Code of an `EngineDead` that was announced, or asked for by this side."""

ABSENT = "engine_absent"
"""Code of an `EngineDead` where nobody listens, or what listens is another version: no use in retrying."""

ASK_TIMEOUT_S = 2.0
"""How long a question waits for its answer, unless told otherwise."""

MAX_ASKS = 64
"""How many questions may wait for their answers on one channel."""

CALL_TIMEOUT_S = 10.0
"""How long a call waits for the answers of its replicas, unless told otherwise."""

_CALL_GRACE_S = 0.2
"""How much longer this side waits: the orchestrator, if it lives, says by its deadline who is silent."""

Topic = Literal["status", "story", "metrics"]

_CLOSE_S = 1.0
"""How long closing waits for unsent messages to be taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelStatistics:
    """What a channel holds, and has done since it was made.

    Attributes:
        open_requests: Requests without a terminal whose streams may still be read.
        abandoned_requests: Requests given up by their readers, without a terminal yet.
        waiting_aborts: Aborts that wait for their answer.
        waiting_asks: Questions that wait for theirs.
        waiting_calls: Calls that wait for theirs.
        submitted_total: Requests submitted.
        received_total: Output messages received.
        dropped_late_total: Output messages of abandoned requests.
        dropped_unknown_total: Messages about requests that are not known here.
    """

    open_requests: int
    abandoned_requests: int
    waiting_aborts: int
    waiting_asks: int
    waiting_calls: int
    submitted_total: int
    received_total: int
    dropped_late_total: int
    dropped_unknown_total: int


class Channel:
    """A live or dead channel. Made by `connect`, which returns when the orchestrator has answered.

    Attributes:
        closed: Done when the channel has ended, with the reason; it never raises.
    """

    def __init__(self, window: Window) -> None:
        self._loop = asyncio.get_running_loop()
        self._window = window
        self._connection: ChannelEnd | None = None
        self._welcome: asyncio.Future[wire.Welcome] = self._loop.create_future()
        self.closed: asyncio.Future[EngineDead] = self._loop.create_future()
        self._death: EngineDead | None = None
        self._is_disconnected = asyncio.Event()
        self._payloads = OutputPayloads(None)
        self._readiness = Readiness({})
        self._numbers = 0
        self._inboxes: dict[int, Inbox] = {}
        self._abandoned: set[int] = set()
        self._acknowledgements: dict[int, asyncio.Future[bool]] = {}
        self._asks: dict[int, asyncio.Future[str]] = {}
        self._asked = 0
        self._calls: dict[int, asyncio.Future[wire.CallAnswered]] = {}
        self._called = 0
        self._callbacks: list[ReplicaCallback] = []
        self._changed = asyncio.Event()
        self._received = 0
        self._dropped_late = 0
        self._dropped_unknown = 0

    @classmethod
    async def connect(
        cls, address: Address, *, run: RunId, name: str, limits: Limits | None = None
    ) -> Channel:
        """Connect to an orchestrator and wait until it has answered.

        An orchestrator that does not run yet is waited for, as long as its socket listens.

        Args:
            address: The channel socket's path, or the orchestrator's listener in this process.
            run: The run that the orchestrator must belong to.
            name: Who this is, for people.
            limits: The deployment's limits; only the client's window is read.

        Raises:
            EngineDead: Nobody listens there, or the orchestrator hung up before it answered;
                `code` says which.
        """
        bounds = limits or Limits()
        self = cls(Window(bounds.client_window_chunks, bounds.client_window_bytes))
        try:
            connection = await self._dial(address)
        except OSError as error:
            place = f" at {address}" if isinstance(address, str) else ""
            detail = f"No engine listens{place}: {error.strerror or error}."
            raise EngineDead(detail, code=ABSENT) from error
        self._connection = connection
        connection.send(wire.Hello(protocol=PROTOCOL_VERSION, run=run, pid=os.getpid(), name=name))
        try:
            await self._welcome
        except BaseException:
            connection.abort()
            raise
        return self

    # ---- what is known

    @property
    def is_open(self) -> bool:
        """Whether requests can be submitted."""
        return self._death is None

    @property
    def welcome(self) -> wire.Welcome:
        """What the orchestrator said at first."""
        return self._welcome.result()

    @property
    def readiness(self) -> Readiness:
        """The stages as they stand now."""
        return self._readiness

    def statistics(self) -> ChannelStatistics:
        """Return the counters as they are now."""
        return ChannelStatistics(
            open_requests=len(self._inboxes),
            abandoned_requests=len(self._abandoned),
            waiting_aborts=len(self._acknowledgements),
            waiting_asks=len(self._asks),
            waiting_calls=len(self._calls),
            submitted_total=self._numbers,
            received_total=self._received,
            dropped_late_total=self._dropped_late,
            dropped_unknown_total=self._dropped_unknown,
        )

    # ---- requests

    def submit(  # noqa: PLR0913 - all but two have defaults
        self,
        *,
        pipeline: str,
        inputs: Mapping[str, Payload],
        outputs: Sequence[str] = (),
        options: Payload | None = None,
        timeout_s: float | None = None,
        priority: int = 0,
        session: str | None = None,
        affinity: Affinity | None = None,
        label: str = "",
        open_inputs: Sequence[str] = (),
        companions: int = 0,
        companion_of: Stream | None = None,
    ) -> Stream:
        """Submit a request; never blocks. Whether it is accepted is the stream's first news.

        Args:
            pipeline: Which pipeline.
            inputs: Named values, by input name.
            outputs: The wanted outputs; none means all.
            options: Named values for every stage.
            timeout_s: Longest life of the request, if shorter than the engine's own limit.
            priority: Smaller goes first.
            session: The session that it belongs to.
            affinity: Which replicas it should meet again.
            label: The client's own id, for people.
            open_inputs: Inputs that go on after this; see `Stream.append`.
            companions: So many requests follow that go with this one; see `Engine.generate`.
            companion_of: The request that this one goes with.

        Raises:
            EngineDead: The channel has ended.
            InvalidRequest: A value can't be sent, or this is not the channel's event loop.
        """
        self._check_usable()
        if companion_of is not None and not self._owns(companion_of.request):
            raise InvalidRequest(
                f"Request {companion_of.request} is not one of this channel, {self.welcome.channel}: the "
                "engine was started again since. Submit both again.",
                param="companion_of",
            )
        encoded = [(name, *inline_payload(name, values)) for name, values in inputs.items()]
        option_ref, option_data = inline_payload("options", options) if options else (None, b"")
        self._numbers += 1
        number = self._numbers
        message = wire.Submit(
            number=number,
            pipeline=PipelineName(pipeline),
            inputs=tuple((InputName(name), ref) for name, ref, _ in encoded),
            outputs=tuple(OutputName(name) for name in outputs),
            options=option_ref,
            timeout_s=timeout_s,
            priority=priority,
            session=None if session is None else SessionId(session),
            affinity=affinity,
            label=label,
            open_inputs=tuple(InputName(name) for name in open_inputs),
            companions=companions,
            companion_of=None if companion_of is None else companion_of.number,
        )
        body = b"".join((*(data for _, _, data in encoded), option_data))
        self._send_checked(message, body)
        inbox = Inbox(number, self, self._window, message.open_inputs)
        self._inboxes[number] = inbox
        return Stream(RequestId(f"{self.welcome.channel}-{number}"), inbox, self._loop)

    async def abort(self, request: RequestId) -> bool:
        """Abort a request by its id; return whether there was anything to stop.

        Its stream, if it is still read, ends with `Cancelled` after the chunks that came before.

        Raises:
            EngineDead: The channel has ended, now or while waiting for the answer.
        """
        self._check_usable()
        _, _, digits = request.rpartition("-")
        if not self._owns(request) or not digits.isdecimal():
            return False
        number = int(digits)
        if not 0 < number <= self._numbers:
            return False
        answer = self._acknowledgements.get(number)
        if answer is None:
            answer = self._acknowledgements[number] = self._loop.create_future()
            self._send(wire.Abort(number=number, acknowledge=True))
        return await asyncio.shield(answer)

    def _owns(self, request: RequestId) -> bool:
        """Say whether a request is named like one of this channel."""
        return request.rpartition("-")[0] == self.welcome.channel

    # ---- questions

    async def ask(
        self, topic: Topic, argument: str = "", *, timeout_s: float = ASK_TIMEOUT_S
    ) -> str:
        """Ask the orchestrator something that changes nothing; return its answer.

        Args:
            topic: What about; see `stretto.messages.channel.Ask`.
            argument: The subject, if the topic has one.
            timeout_s: How long to wait for the answer.

        Raises:
            EngineDead: The channel has ended, now or while waiting.
            DeadlineExceeded: No answer came in time; a late one is dropped.
            Overloaded: Too many questions wait for their answers.
            InvalidRequest: There is nothing by that name.
        """
        return await self._answer(lambda number: wire.Ask(number, topic, argument), timeout_s)

    async def scale(
        self, stage: StageId, replicas: int, *, timeout_s: float = ASK_TIMEOUT_S
    ) -> None:
        """Have a stage get so many replicas; return when the order is taken, not when it is done.

        Raises:
            EngineDead: The channel has ended, now or while waiting.
            DeadlineExceeded: No answer came in time.
            Overloaded: The server starts or stops.
            InvalidRequest: There is no such stage, or it can't have so many.
        """
        await self._answer(lambda number: wire.Scale(number, stage, replicas), timeout_s)

    async def drain(
        self, replica: ReplicaId, *, replace: bool, timeout_s: float = ASK_TIMEOUT_S
    ) -> None:
        """Have a replica finish what it has and leave; return when the order is taken.

        Raises:
            EngineDead: The channel has ended, now or while waiting.
            DeadlineExceeded: No answer came in time.
            InvalidRequest: It is gone, or leaves already.
        """
        await self._answer(lambda number: wire.Drain(number, replica, replace), timeout_s)

    async def _answer(self, message: Callable[[int], wire.Up], timeout_s: float) -> str:
        self._check_usable()
        if len(self._asks) >= MAX_ASKS:
            raise Overloaded(f"{MAX_ASKS} questions wait for their answers.", code="queue_full")
        self._asked += 1
        number = self._asked
        answer = self._asks[number] = self._loop.create_future()
        try:
            self._send(message(number))
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise DeadlineExceeded(
                f"The orchestrator did not answer within {timeout_s:g} s."
            ) from None
        finally:
            self._asks.pop(number, None)

    # ---- calls

    async def call(
        self,
        method: str,
        *,
        stages: Sequence[str] | None = None,
        arguments: Mapping[str, object] | None = None,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> dict[ReplicaId, RpcResult]:
        """Call a method at replicas, all at the same time; see `stretto.engine.Engine.collective_rpc`.

        Raises:
            EngineDead: The channel has ended, now or while waiting.
            DeadlineExceeded: Not every replica answered in time; late answers are dropped.
            Overloaded: Too many calls wait for their answers.
            NoReplica: No replica can be called now.
            InvalidRequest: There is no such method or stage, or a value can't be sent.
        """
        self._check_usable()
        message = call_message(self._called + 1, method, stages, arguments, timeout_s)
        self._called += 1
        answer = self._calls[message.number] = self._loop.create_future()
        try:
            self._send(message)
            async with asyncio.timeout(timeout_s + _CALL_GRACE_S):
                return call_results(await answer)
        except TimeoutError:
            raise DeadlineExceeded(
                f"The orchestrator did not answer the call of {method!r} within {timeout_s:g} s."
            ) from None
        finally:
            self._calls.pop(message.number, None)

    def report(self, message: wire.HttpDone) -> None:
        """Tell the orchestrator something for its metrics; never waits."""
        self._send(message)

    # ---- stages

    def subscribe(self, callback: ReplicaCallback) -> Callable[[], None]:
        """Call `callback` with each change of a replica; return what ends that."""
        self._callbacks.append(callback)
        return lambda: self._callbacks.remove(callback) if callback in self._callbacks else None

    async def wait_ready(self) -> None:
        """Wait until every stage has a ready replica.

        Raises:
            StartFailed: A stage failed too often before it was ever ready.
            EngineDead: The channel has ended.
        """
        while True:
            self._check_usable()
            if self._readiness.has_started:
                return
            failure = self._readiness.start_failure()
            if failure is not None:
                raise failure
            await self._changed.wait()

    async def aclose(self) -> None:
        """Close the channel: the orchestrator aborts what is open. May be called twice."""
        self._die("The channel was closed by its own side.", CLOSED)
        if self._connection is None or self._is_disconnected.is_set():
            return
        self._connection.close()
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self._is_disconnected.wait()
        except TimeoutError:
            self._connection.abort()

    # ---- what streams call (`Upstream`)

    def grant(self, number: int, output: OutputName, up_to: int) -> None:
        """Return credit for the output's chunks below `up_to`."""
        self._send(wire.Drained(number=number, output=output, up_to=up_to))

    def append(self, number: int, name: InputName, values: Payload) -> None:
        """Send more of a request's open input.

        Raises:
            EngineDead: The channel has ended.
            InvalidRequest: A value can't be sent, or this is not the channel's event loop.
        """
        self._check_usable()
        ref, data = inline_payload(name, values)
        self._send_checked(wire.Append(number, name, ref), data)

    def close_input(self, number: int, name: InputName) -> None:
        """End a request's open input."""
        self._send(wire.CloseInput(number, name))

    def abandon(self, number: int) -> None:
        """Abort a request whose reader is gone."""
        if self._inboxes.pop(number, None) is not None:
            self._abandoned.add(number)
            self._send(wire.Abort(number=number, acknowledge=False))

    async def pulled(self, payload: PayloadRef) -> bytes | memoryview:
        """Return the bytes of a payload that is on another host."""
        return await self._payloads.pulled(payload)

    def values(self, payload: PayloadRef, inline: bytes | memoryview | None) -> dict[str, Value]:
        """Return a payload's values and give it up."""
        try:
            return self._payloads.read(payload, inline)
        finally:
            self.discard(payload)

    def discard(self, payload: PayloadRef) -> None:
        """Give up a payload."""
        if payload.place != INLINE:
            self._send(wire.Viewed(payload=payload))

    # ---- what the connection calls

    async def _dial(self, address: Address) -> ChannelEnd:
        if isinstance(address, str):
            return await connect_unix(address, self._make_connection)
        connection = LocalConnection(self._on_frame, self._on_closed, is_checked=True)
        address.connect(connection)
        return connection

    def _make_connection(self) -> Connection[wire.Down]:
        return Connection(msgspec.msgpack.Decoder(list[wire.Down]), self._on_frame, self._on_closed)

    def _on_frame(
        self, connection: ChannelEnd, messages: list[wire.Down], body: memoryview
    ) -> None:
        del connection
        start = 0
        for message in messages:
            data: bytes | None = None
            for payload in wire.inline_payloads(message):  # an output has one at most
                data = bytes(body[start : start + payload.size_bytes])
                start += payload.size_bytes
            self._handle(message, data)

    def _handle(  # noqa: C901, PLR0912 - one arm each
        self, message: wire.Down, data: bytes | None
    ) -> None:
        match message:
            case wire.Output():
                self._on_output(message, data)
            case wire.Finished(number=number, timings=timings):
                self._terminate(number, None, timings)
            case (
                wire.Failed(number=number, failure=failure)
                | wire.Rejected(number=number, failure=failure)
            ):
                self._terminate(number, failure.exception())
            case wire.Cancelled(number=number):
                self._terminate(
                    number, Cancelled(f"Request {self.welcome.channel}-{number} was aborted.")
                )
            case wire.AbortAcknowledged(number=number, stopped=stopped):
                self._on_acknowledged(number, stopped=stopped)
            case wire.ReplicaNotice(state=state):
                self._readiness.replica(state)
                for callback in self._callbacks:
                    self._loop.call_soon(callback, state)  # what it raises is not ours
                self._wake()
            case wire.StageNotice(stage=stage, facts=facts):
                self._readiness.stage(stage, facts)
            case wire.TargetNotice(stage=stage, replicas=replicas):
                self._readiness.target(stage, replicas)
            case wire.Answer():
                self._on_answer(message)
            case wire.CallAnswered():
                self._on_call_answered(message)
            case wire.Welcome():
                self._on_welcome(message)
            case wire.Fatal(failure=failure):
                self._die(f"The engine has crashed: {failure.detail or 'no reason given'}", CRASHED)
            case wire.Closing():
                self._die("The engine was shut down.", CLOSED)
            case _:
                assert_never(message)

    def _on_closed(self, connection: ChannelEnd, reason: str) -> None:
        del connection
        self._die(
            f"The engine has crashed: its connection ended without notice ({reason}).", CRASHED
        )
        self._payloads.close()
        self._is_disconnected.set()

    # ---- inside

    def _on_welcome(self, welcome: wire.Welcome) -> None:
        if welcome.protocol != PROTOCOL_VERSION:
            self._die(
                f"The engine speaks version {welcome.protocol} of the channel protocol and this process "
                f"version {PROTOCOL_VERSION}; start both from the same installation.",
                ABSENT,
            )
            return
        self._readiness = Readiness(welcome.targets, welcome.replicas)
        self._payloads = OutputPayloads(welcome.shared_memory_dir, welcome.payload_token)
        if not self._welcome.done():
            self._welcome.set_result(welcome)

    def _on_output(self, message: wire.Output, data: bytes | None) -> None:
        self._received += 1
        inbox = self._inboxes.get(message.number)
        if inbox is not None:
            inbox.put(message, data)
            return
        if message.number in self._abandoned:
            self._dropped_late += 1
        else:
            self._dropped_unknown += 1
        if message.payload is not None:
            self.discard(message.payload)

    def _on_acknowledged(self, number: int, *, stopped: bool) -> None:
        answer = self._acknowledgements.pop(number, None)
        if answer is None:
            self._dropped_unknown += 1
        elif not answer.done():
            answer.set_result(stopped)

    def _on_answer(self, message: wire.Answer) -> None:
        answer = self._asks.pop(message.number, None)
        if answer is None or answer.done():
            self._dropped_late += 1
        elif message.failure is not None:
            answer.set_exception(message.failure.exception())
        else:
            answer.set_result(message.text)

    def _on_call_answered(self, message: wire.CallAnswered) -> None:
        answer = self._calls.pop(message.number, None)
        if answer is None or answer.done():
            self._dropped_late += 1
        else:
            answer.set_result(message)

    def _terminate(
        self, number: int, error: StrettoError | None, timings: Timings | None = None
    ) -> None:
        inbox = self._inboxes.pop(number, None)
        if inbox is not None:
            inbox.end(error, timings)
        elif number in self._abandoned:
            self._abandoned.remove(number)
        else:
            self._dropped_unknown += 1

    def _die(self, detail: str, code: str) -> None:
        """End everything that waits, in this turn. Only the first reason counts."""
        if self._death is not None:
            return
        self._death = EngineDead(detail, code=code)
        # Each under a guard of its own: whatever one of them meets, nobody else goes on waiting.
        for end in (self._end_streams, self._end_answers, self._end_welcome, self._wake):
            try:
                end()
            except Exception:
                log.exception("the end of a channel was not told to everybody")
        if not self.closed.done():
            self.closed.set_result(self._death)

    def _end_streams(self) -> None:
        inboxes, self._inboxes = self._inboxes, {}
        self._abandoned.clear()
        for inbox in inboxes.values():
            inbox.end(self._dead())

    def _end_answers(self) -> None:
        aborts, self._acknowledgements = self._acknowledgements, {}
        asks, self._asks = self._asks, {}
        calls, self._calls = self._calls, {}
        for answer in (*aborts.values(), *asks.values(), *calls.values()):
            if not answer.done():
                answer.set_exception(self._dead())
                answer.exception()  # the one who asked may have been cancelled

    def _end_welcome(self) -> None:
        if not self._welcome.done():
            self._welcome.set_exception(self._dead())
            self._welcome.exception()

    def _dead(self) -> EngineDead:
        """Return the end as an error; each waiter gets its own."""
        assert self._death is not None
        return EngineDead(self._death.detail, code=self._death.code)

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _check_usable(self) -> None:
        if asyncio.get_running_loop() is not self._loop:
            raise InvalidRequest(
                "This channel belongs to another event loop; use it where it was made.",
                code="wrong_event_loop",
            )
        if self._death is not None:
            raise self._dead()

    def _send_checked(self, message: wire.Up, body: bytes) -> None:
        """Send what holds a client's values.

        Raises:
            InvalidRequest: They can't be sent.
        """
        try:
            self._send(message, body)
        except (FrameError, UnicodeEncodeError, OverflowError) as error:
            raise InvalidRequest(
                f"The request can't be sent: {error}", code="invalid_value"
            ) from error

    def _send(self, message: wire.Up, body: bytes | None = None) -> None:
        if self._connection is not None:
            self._connection.send(message, body)
