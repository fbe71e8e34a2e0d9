"""Channels to API processes: their messages become events, the router's answers become theirs.

The last messages of a channel are always the same: what was queued, then `Fatal` if the orchestrator
crashed, then `Closing`, then the end of the stream.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, assert_never

import msgspec

from stretto.core import events as on
from stretto.messages import MAX_CALL_BYTES, MAX_CALL_TIMEOUT_S, channel
from stretto.orchestrator.strangers import Strangers
from stretto.transport.connection import Connection
from stretto.transport.local import ChannelEnd, LocalConnection
from stretto.types import (
    INLINE,
    CallId,
    ChannelId,
    Clock,
    PayloadRef,
    RequestId,
    RunId,
    StageId,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from stretto.errors import Failure
    from stretto.messages.link import StageFacts
    from stretto.orchestrator.answers import Answers
    from stretto.orchestrator.calls import CallValues
    from stretto.orchestrator.dispatcher import Dispatcher, Inbox
    from stretto.orchestrator.payloads import PayloadTable

log = logging.getLogger("stretto.orchestrator")

MAX_UNSENT_BYTES = 256 * 1024 * 1024
"""An API process that leaves so much unread is gone for good; client windows bound what it could need."""

DECODER = msgspec.msgpack.Decoder(list[channel.Up])


class Peer:
    """One API process that has said hello."""

    def __init__(self, name: ChannelId, connection: ChannelEnd, inbox: Inbox) -> None:
        self.name = name
        self.connection = connection
        self.inbox = inbox
        self.last_number = 0
        self.last_call = 0


class Channels:
    """All channels of this life of the orchestrator.

    Args:
        dispatcher: Takes the events.
        payloads: Keeps inline bytes.
        run: The run that a hello must name.
        epoch: Which life of the orchestrator this is.
        clock: Monotonic seconds.
        welcome: Makes the welcome for a new channel.
        answers: Answers questions, and takes what is told for the metrics.
        calls: Keeps the arguments of calls.
    """

    def __init__(  # noqa: PLR0913 - its collaborators
        self,
        dispatcher: Dispatcher,
        payloads: PayloadTable,
        run: RunId,
        epoch: int,
        clock: Clock,
        welcome: Callable[[ChannelId], channel.Welcome],
        answers: Answers,
        calls: CallValues,
    ) -> None:
        self._dispatcher = dispatcher
        self._payloads = payloads
        self._run = run
        self._epoch = epoch
        self._clock = clock
        self._make_welcome = welcome
        self._answers = answers
        self._calls = calls
        self._peers: dict[ChannelId, Peer] = {}
        self._voices: dict[ChannelEnd, Peer] = {}
        self._strangers = Strangers("channel", run)
        self._touched: dict[ChannelId, Peer] = {}
        self._closing: dict[ChannelEnd, None] = {}
        self._all_closed = asyncio.Event()
        self._facts: dict[StageId, StageFacts] = {}
        self._counter = 0

    def accept(self) -> Connection[channel.Up]:
        """Return the protocol for a new connection; it must say hello in time."""
        connection = Connection(
            DECODER,
            self._on_frame,
            self._on_closed,
            high_water_bytes=MAX_UNSENT_BYTES,
            on_full=lambda full: self._strangers.refuse(full, "it does not read"),
        )
        self._strangers.arrived(connection)
        return connection

    def accept_local(self) -> LocalConnection[channel.Up]:
        """Return the end of a new connection from this process; it must say hello in time."""
        connection: LocalConnection[channel.Up] = LocalConnection(
            self._on_frame,
            self._on_closed,
            high_water_bytes=MAX_UNSENT_BYTES,
            on_full=lambda full: self._strangers.refuse(full, "it does not read"),
        )
        self._strangers.arrived(connection)
        return connection

    def send(
        self, name: ChannelId, message: channel.Down, payload: PayloadRef | None = None
    ) -> None:
        """Queue a message; one for a channel that is gone is dropped."""
        peer = self._peers.get(name)
        if peer is None:
            return
        body = None if payload is None else self._payloads.on_wire(payload)[1]
        peer.connection.send(message, body)
        self._touched[name] = peer

    def broadcast(self, message: channel.Down) -> None:
        """Queue a message for every channel."""
        for name in self._peers:
            self.send(name, message)

    def learn(self, stage: StageId, facts: StageFacts) -> None:
        """Tell every channel, now and later, what a stage declares."""
        if self._facts.get(stage) != facts:
            self._facts[stage] = facts
            self.broadcast(channel.StageNotice(stage, facts))

    def end_turn(self) -> None:
        """Write what was queued: one frame per channel that was touched."""
        touched, self._touched = self._touched, {}
        for peer in touched.values():
            peer.connection.flush()

    def close(self, fatal: Failure | None) -> None:
        """End every channel: what was queued, the fatal message after a crash, and the end."""
        self._strangers.close()
        peers, self._peers = self._peers, {}
        for peer in peers.values():
            self._voices.pop(peer.connection, None)
            self._closing[peer.connection] = None
        for peer in peers.values():
            if fatal is not None:
                _guarded(peer.connection.send, channel.Fatal(fatal))
            _guarded(peer.connection.send, channel.Closing())
            _guarded(peer.connection.close)
        if not self._closing:
            self._all_closed.set()

    async def wait_closed(self, timeout_s: float) -> None:
        """Sleep until the last words are written, at most `timeout_s` seconds; then they are dropped."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._all_closed.wait()
        except TimeoutError:
            for connection in list(self._closing):
                connection.abort()

    # ------------------------------------------------------------------ what a connection reports

    def _on_frame(
        self, connection: ChannelEnd, messages: list[channel.Up], body: memoryview
    ) -> None:
        now = self._clock()
        offset = 0
        for message in messages:
            peer = self._voices.get(connection)
            if peer is None:
                if not self._welcome(connection, message, now):
                    return
                continue
            size = sum(ref.size_bytes for ref in channel.inline_payloads(message))
            event = self._event(peer, message, body[offset : offset + size], now)
            offset += size
            if event is not None:
                self._dispatcher.post(event, peer.inbox)

    def _on_closed(self, connection: ChannelEnd, reason: str) -> None:
        self._strangers.left(connection)
        if connection in self._closing:
            del self._closing[connection]
            if not self._closing:
                self._all_closed.set()
        peer = self._voices.pop(connection, None)
        if peer is not None and self._peers.pop(peer.name, None) is not None:
            log.debug("channel %s has closed: %s", peer.name, reason)
            self._touched.pop(peer.name, None)
            self._dispatcher.post(
                on.ChannelClosed(now=self._clock(), channel=peer.name), peer.inbox
            )

    def _welcome(self, connection: ChannelEnd, message: channel.Up, now: float) -> bool:
        """Let an API process in; return whether it was one."""
        hello = message if isinstance(message, channel.Hello) else None
        if not self._strangers.is_ours(connection, hello):
            return False
        self._strangers.left(connection)
        self._counter += 1
        name = ChannelId(f"{self._epoch}.{self._counter}")
        inbox = self._dispatcher.inbox(connection.pause_reading, connection.resume_reading)
        peer = self._peers[name] = self._voices[connection] = Peer(name, connection, inbox)
        connection.send(self._make_welcome(name))
        for stage, facts in self._facts.items():
            connection.send(channel.StageNotice(stage, facts))
        self._dispatcher.post(on.ChannelOpened(now=now, channel=name), peer.inbox)
        return True

    # ------------------------------------------------------------------ what a message means

    def _event(  # noqa: C901, PLR0911, PLR0912 - one arm each
        self, peer: Peer, message: channel.Up, body: memoryview, now: float
    ) -> on.AnyEvent | None:
        """Return the event that a message is; one that changes nothing is dealt with here."""
        match message:
            case channel.Submit():
                return self._submitted(peer, message, body, now)
            case channel.Append():
                return self._appended(peer, message, body, now)
            case channel.CloseInput(number=number, input=name):
                return on.InputClosed(now=now, request=_request_id(peer, number), input=name)
            case channel.Drained():
                return on.ConsumerDrained(
                    now=now,
                    request=_request_id(peer, message.number),
                    output=message.output,
                    up_to=message.up_to,
                )
            case channel.Viewed():
                return on.PayloadDone(now=now, holder=peer.name, payload=message.payload)
            case channel.Abort():
                return on.RequestAborted(
                    now=now,
                    request=_request_id(peer, message.number),
                    channel=peer.name,
                    acknowledge=message.acknowledge,
                )
            case channel.Call():
                return self._called(peer, message, now)
            case channel.Ask():
                peer.connection.send(self._answers.answer(message, now))
                return None
            case channel.Scale(number=number, stage=stage, replicas=replicas):
                return on.ScaleRequested(
                    now=now, stage=stage, replicas=replicas, channel=peer.name, number=number
                )
            case channel.Drain(number=number, replica=replica, replace=replace):
                return on.DrainRequested(
                    now=now, replica=replica, replace=replace, channel=peer.name, number=number
                )
            case channel.HttpDone():
                self._answers.http_done(message)
                return None
            case channel.Hello():
                return self._repeated_hello(peer, now)
            case _:
                assert_never(message)

    def _submitted(
        self, peer: Peer, message: channel.Submit, body: memoryview, now: float
    ) -> on.RequestSubmitted | on.ChannelClosed:
        if message.number <= peer.last_number:
            return self._broken(peer, f"it used request number {message.number} twice", now)
        peer.last_number = message.number
        offset = 0

        def keep(ref: PayloadRef) -> PayloadRef:
            nonlocal offset
            data = bytes(body[offset : offset + ref.size_bytes])
            offset += ref.size_bytes
            return self._payloads.keep(data)

        if any(ref.place != INLINE for _, ref in message.inputs):
            return self._broken(peer, "its inputs are not inline", now)
        inputs = tuple((name, keep(ref)) for name, ref in message.inputs)
        return on.RequestSubmitted(
            now=now,
            channel=peer.name,
            request=_request_id(peer, message.number),
            pipeline=message.pipeline,
            inputs=inputs,
            outputs=message.outputs,
            options=None if message.options is None else keep(message.options),
            timeout_s=message.timeout_s,
            priority=message.priority,
            session=message.session,
            label=message.label,
            affinity=message.affinity,
            open_inputs=message.open_inputs,
            companions=message.companions,
            companion_of=(
                None if message.companion_of is None else _request_id(peer, message.companion_of)
            ),
        )

    def _appended(
        self, peer: Peer, message: channel.Append, body: memoryview, now: float
    ) -> on.AnyEvent:
        if message.payload.place != INLINE:
            return self._broken(peer, "its input is not inline", now)
        return on.InputAppended(
            now=now,
            request=_request_id(peer, message.number),
            input=message.input,
            payload=self._payloads.keep(bytes(body)),
        )

    def _called(
        self, peer: Peer, message: channel.Call, now: float
    ) -> on.RpcRequested | on.ChannelClosed:
        if message.number <= peer.last_call:
            return self._broken(peer, f"it used call number {message.number} twice", now)
        if len(message.arguments) > MAX_CALL_BYTES:
            return self._broken(peer, f"its arguments have {len(message.arguments)} bytes", now)
        if not 0 < message.timeout_s <= MAX_CALL_TIMEOUT_S:
            return self._broken(peer, f"its call may take {message.timeout_s} s", now)
        peer.last_call = message.number
        call = CallId(f"{peer.name}-call-{message.number}")
        self._calls.begin(call, message.arguments)
        return on.RpcRequested(
            now=now,
            call=call,
            channel=peer.name,
            method=message.method,
            timeout_s=message.timeout_s,
            stages=message.stages,
        )

    def _repeated_hello(self, peer: Peer, now: float) -> on.ChannelClosed:
        return self._broken(peer, "it said hello twice", now)

    def _broken(self, peer: Peer, what: str, now: float) -> on.ChannelClosed:
        """An API process that breaks the protocol is treated as gone."""
        log.error("API process on channel %s broke the protocol: %s", peer.name, what)
        self._peers.pop(peer.name, None)
        self._voices.pop(peer.connection, None)
        peer.connection.abort()
        return on.ChannelClosed(now=now, channel=peer.name)


def _guarded(step: Callable[..., object], *arguments: object) -> None:
    """Take one step of the end; whatever it meets, the other steps, and the other channels, follow."""
    try:
        step(*arguments)
    except Exception:
        log.exception("a channel was not closed in order")


def _request_id(peer: Peer, number: int) -> RequestId:
    return RequestId(f"{peer.name}-{number}")


def number_of(request: RequestId | CallId) -> int:
    """Return the number by which the API process knows a request or a call."""
    return int(request.rpartition("-")[2])
