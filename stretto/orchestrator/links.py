"""Links to replicas: frames in become events, and death is noticed once.

A replica's process ends in two ways at once: its link reaches EOF and its process exits. Both belong to
one death. The link's last messages come first, so an exit waits for the EOF, and an EOF waits for the
exit's reason, each for at most `GRACE_S`; then the replica is dead whatever the other one does.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
from typing import TYPE_CHECKING, assert_never

import msgspec

from stretto.core import events as on
from stretto.messages import MAX_CALL_BYTES, PROTOCOL_VERSION, link
from stretto.orchestrator.payloads import PayloadTable, owner_of
from stretto.orchestrator.strangers import Strangers
from stretto.transport.connection import Connection
from stretto.types import (
    INLINE,
    MAX_METRICS,
    SHARED_MEMORY,
    CallId,
    Clock,
    PayloadRef,
    ReplicaId,
    RunId,
    StageId,
    TaskKey,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from stretto.orchestrator.calls import CallValues
    from stretto.orchestrator.dispatcher import Dispatcher, Inbox

log = logging.getLogger("stretto.orchestrator")

GRACE_S = 0.05
"""How long one sign of death waits for the other."""

MAX_UNSENT_BYTES = 64 * 1024 * 1024
"""A replica that leaves so much unread does not read at all; windows bound what it could need."""

DECODER = msgspec.msgpack.Decoder(list[link.Up])


class ProtocolViolated(Exception):
    """A replica sent what it must not send; the replica is at fault, never the router."""


class Link:
    """One launched replica: its process, its connection, and the tasks that are open there.

    Args:
        replica: Identity.
        nonce: What its hello must repeat.
        owner: The name under which it writes payload files.
        inbox: Where its events go.
    """

    def __init__(self, replica: ReplicaId, nonce: str, owner: str, inbox: Inbox) -> None:
        self.replica = replica
        self.nonce = nonce
        self.owner = owner
        self.inbox = inbox
        self.connection: Connection[link.Up] | None = None
        self.next_seq: dict[TaskKey, int] = {}
        """Open tasks, and the number of the next data chunk of each."""
        self.calls: dict[CallId, None] = {}
        """Calls that it has not answered."""
        self.freed: list[str] = []
        """Payload files to release, sent together at the end of the turn."""
        self.has_loaded = False
        self.closed_reason: str | None = None
        self.exit_reason: str | None = None
        self.place = SHARED_MEMORY
        """Where its payload files are."""
        self.is_joined = False
        """It was started elsewhere: its link is the only sign of its life."""
        self.is_draining = False
        self.grace: asyncio.TimerHandle | None = None

    def send(self, message: link.Down, body: bytes | None = None) -> None:
        """Queue a message; a replica whose connection is gone gets nothing more."""
        if self.connection is not None:
            self.connection.send(message, body)

    def pause(self) -> None:
        """Read nothing more until `resume`."""
        if self.connection is not None:
            self.connection.pause_reading()

    def resume(self) -> None:
        """Read again."""
        if self.connection is not None:
            self.connection.resume_reading()


class Links:
    """All links of this life of the orchestrator.

    Args:
        dispatcher: Takes the events.
        payloads: Keeps inline bytes.
        run: The run that a hello must name.
        clock: Monotonic seconds.
        on_facts: Called when a replica declares its stage's facts.
        calls: Keeps what calls return.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        payloads: PayloadTable,
        run: RunId,
        clock: Clock,
        on_facts: Callable[[StageId, link.StageFacts], None],
        calls: CallValues,
    ) -> None:
        self._dispatcher = dispatcher
        self._payloads = payloads
        self._run = run
        self._clock = clock
        self._on_facts = on_facts
        self._calls = calls
        self._loop = asyncio.get_running_loop()
        self._links: dict[ReplicaId, Link] = {}
        self._owners: dict[str, Link] = {}
        self._voices: dict[Connection[link.Up], Link] = {}
        self._strangers = Strangers("replica", run)
        self._touched: dict[ReplicaId, Link] = {}

    def expect(self, replica: ReplicaId, nonce: str, owner: str) -> None:
        """A process for this identity is being started."""
        inbox = self._dispatcher.inbox()
        found = Link(replica, nonce, owner, inbox)
        inbox.pause, inbox.resume = found.pause, found.resume
        self._links[replica] = self._owners[owner] = found

    def accept(self) -> Connection[link.Up]:
        """Return the protocol for a new connection; it must say hello in time."""
        connection = Connection(
            DECODER,
            self._on_frame,
            self._on_closed,
            high_water_bytes=MAX_UNSENT_BYTES,
            on_full=self._on_full,
        )
        self._strangers.arrived(connection)
        return connection

    def adopt(
        self,
        connection: Connection[link.Up],
        replica: ReplicaId,
        nonce: str,
        owner: str,
        place: str,
    ) -> None:
        """Take over the connection of a process from elsewhere, which has this identity now."""
        self.expect(replica, nonce, owner)
        found = self._links[replica]
        found.is_joined = True
        found.place = place
        found.connection = connection
        self._voices[connection] = found
        self._touched[replica] = found
        connection.hand_over(self._on_frame, self._on_closed, self._on_full)

    def kept(self, owner: str) -> tuple[str, ...]:
        """Return the keys of a producer's payloads that somebody may still read."""
        return self._payloads.announced(owner)

    def drain(self, replica: ReplicaId) -> None:
        """Tell a replica that it may leave when it has finished."""
        found = self.find(replica)
        if found is not None:
            found.is_draining = True
            found.send(link.Drain())

    def find(self, replica: ReplicaId) -> Link | None:
        """Return a replica's link and mark it for writing at the end of the turn."""
        found = self._links.get(replica)
        if found is not None:
            self._touched[replica] = found
        return found

    def release(self, payload: PayloadRef) -> None:
        """Nobody holds the payload: drop its bytes, or tell the owner to free its file."""
        self._payloads.forget(payload)
        if payload.place == INLINE:
            return
        producer = self._owners.get(owner_of(payload))
        if producer is None:
            self._payloads.unlink(payload)
            return
        producer.freed.append(payload.key)
        self._touched[producer.replica] = producer

    def end_turn(self) -> None:
        """Write what was queued: one frame per link that was touched."""
        touched, self._touched = self._touched, {}
        for each in touched.values():
            if each.freed:
                each.send(link.Release(tuple(each.freed)))
                each.freed.clear()
            if each.connection is not None:
                each.connection.flush()

    def exited(self, replica: ReplicaId, reason: str) -> None:
        """A replica's process has ended."""
        found = self._links.get(replica)
        if found is not None:
            found.exit_reason = found.exit_reason or reason
            self._may_be_dead(found)

    def forget(self, replica: ReplicaId) -> None:
        """The replica is out: close its connection, and hear nothing more of it."""
        found = self._links.pop(replica, None)
        if found is None:
            return
        self._touched.pop(replica, None)
        if self._owners.get(found.owner) is found:
            del self._owners[found.owner]
        if found.grace is not None:
            found.grace.cancel()
        if found.connection is not None:
            self._voices.pop(found.connection, None)
            if found.is_joined and found.is_draining:
                found.connection.close()  # it must hear why, or it would come back
            else:
                found.connection.abort()
            found.connection = None
        found.inbox.pause = found.inbox.resume = (
            None  # a cycle would keep all of it until a collection
        )
        self._payloads.reclaim(found.owner)

    def close(self) -> None:
        """Close every connection."""
        self._strangers.close()
        for replica in list(self._links):
            self.forget(replica)

    # ------------------------------------------------------------------ what a connection reports

    def _on_frame(
        self, connection: Connection[link.Up], messages: list[link.Up], body: memoryview
    ) -> None:
        now = self._clock()
        offset = 0
        for message in messages:
            inline = link.inline_payload(message)
            size = 0 if inline is None else inline.size_bytes
            source = self._voices.get(connection)
            if source is None:
                if not self._welcome(connection, message, now):
                    return
                continue
            try:
                event = self._event(source, message, body[offset : offset + size], now)
            except ProtocolViolated as error:
                self._violated(source, str(error))
                return
            except Exception as error:
                log.exception("what replica %s sent can't be handled", source.replica)
                self._violated(source, f"{type(error).__name__} while it was handled")
                return
            self._dispatcher.post(event, source.inbox)
            offset += size

    def _on_closed(self, connection: Connection[link.Up], reason: str) -> None:
        self._strangers.left(connection)
        source = self._voices.pop(connection, None)
        if source is not None:
            source.closed_reason = reason
            self._may_be_dead(source)

    def _on_full(self, connection: Connection[link.Up]) -> None:
        source = self._voices.get(connection)
        if source is not None:
            self._violated(source, "it does not read its link")

    def _violated(self, source: Link, what: str) -> None:
        log.error("replica %s broke the protocol: %s", source.replica, what)
        source.exit_reason = f"it broke the protocol: {what}"
        if source.connection is not None:
            source.connection.abort()

    def _welcome(self, connection: Connection[link.Up], message: link.Up, now: float) -> bool:
        """Let an expected replica in; return whether it was one."""
        hello = message if isinstance(message, link.Hello) else None
        if not self._strangers.is_ours(connection, hello):
            return False
        assert isinstance(message, link.Hello)
        found = self._links.get(message.replica)
        if (
            found is None
            or found.connection is not None
            or not hmac.compare_digest(found.nonce.encode(), message.nonce.encode())
        ):
            self._strangers.refuse(connection, f"nobody expects {message.replica} here")
            return False
        self._strangers.left(connection)
        self._voices[connection] = found
        found.connection = connection
        connection.send(link.Welcome(PROTOCOL_VERSION, self._run))
        self._dispatcher.post(on.ReplicaJoined(now=now, replica=found.replica), found.inbox)
        return True

    def _may_be_dead(self, dying: Link) -> None:
        """Report a death when both of its signs are there, or one and its grace is over."""
        has_link_ended = dying.closed_reason is not None or dying.connection is None
        if has_link_ended and (dying.is_joined or dying.exit_reason is not None):
            self._dead(dying)
        elif dying.grace is None:
            dying.grace = self._loop.call_later(GRACE_S, self._dead, dying)

    def _dead(self, dead: Link) -> None:
        if dead.grace is not None:
            dead.grace.cancel()
        reason = dead.exit_reason or dead.closed_reason or "gone"
        event = on.ReplicaDied(now=self._clock(), replica=dead.replica, reason=reason)
        self._dispatcher.post(event, dead.inbox)

    # ------------------------------------------------------------------ what a message means

    def _event(  # noqa: C901, PLR0911, PLR0912 - one arm per message
        self, source: Link, message: link.Up, body: memoryview, now: float
    ) -> on.AnyEvent:
        """Check a message against what this replica may say, and make an event of it.

        Raises:
            ProtocolViolated: It may not say that.
        """
        match message:
            case link.Produced():
                return self._produced(source, message, body, now)
            case link.Consumed():
                _check_open(source, message.task)
                return on.InputConsumed(
                    now=now, task=message.task, edge=message.edge, up_to=message.up_to
                )
            case link.Viewed():
                _check_open(source, message.task)
                return on.PayloadDone(now=now, holder=message.task, payload=message.payload)
            case link.Ended():
                return _ended(source, message, now)
            case link.LoadProgress():
                _check_loading(source)
                return on.ReplicaProgressed(
                    now=now, replica=source.replica, what=message.what, fraction=message.fraction
                )
            case link.Ready():
                return self._ready(source, message, now)
            case link.StartFailed():
                _check_loading(source)
                return on.ReplicaStartFailed(now=now, replica=source.replica, reason=message.reason)
            case link.Reported():
                return _reported(source, message, now)
            case link.Alive(step_age_s=age_s):
                return on.ReplicaAlive(now=now, replica=source.replica, step_age_s=age_s)
            case link.CallAnswered():
                return self._answered(source, message, now)
            case link.Leaving():
                return on.DrainRequested(now=now, replica=source.replica)
            case link.Hello() | link.Offer():
                raise ProtocolViolated("it said hello twice")
            case _:
                assert_never(message)

    def _ready(self, source: Link, message: link.Ready, now: float) -> on.ReplicaReady:
        _check_loading(source)
        if message.slots < 1:
            raise ProtocolViolated(f"it offers {message.slots} slots")
        source.has_loaded = True
        self._on_facts(source.replica.stage, message.facts)
        return on.ReplicaReady(
            now=now,
            replica=source.replica,
            slots=message.slots,
            recovery=message.facts.recovery,
            max_step_s=message.facts.max_step_s,
            methods=tuple(message.methods.items()),
        )

    def _answered(self, source: Link, message: link.CallAnswered, now: float) -> on.RpcAnswered:
        if message.call not in source.calls:
            raise ProtocolViolated(f"it answers call {message.call}, which is not open there")
        if len(message.value) > MAX_CALL_BYTES:
            raise ProtocolViolated(
                f"it answers call {message.call} with {len(message.value)} bytes"
            )
        del source.calls[message.call]
        self._calls.keep(message.call, source.replica, message.value)
        return on.RpcAnswered(
            now=now,
            call=message.call,
            replica=source.replica,
            failure=message.failure,
            is_asleep=message.is_asleep,
        )

    def _produced(
        self, source: Link, message: link.Produced, body: memoryview, now: float
    ) -> on.ChunkProduced:
        expected = _check_open(source, message.task)
        if message.kind == "data":
            if message.seq != expected:
                raise ProtocolViolated(
                    f"{message.task} sent chunk {message.seq} instead of {expected}"
                )
            source.next_seq[message.task] = expected + 1
        payload = message.payload
        if payload.place == INLINE:
            payload = self._payloads.keep(bytes(body))
        elif payload.place == source.place and owner_of(payload) == source.owner:
            self._payloads.announce(payload)
        else:
            raise ProtocolViolated(f"it announced {payload.key}, which is not its own")
        return on.ChunkProduced(
            now=now,
            task=message.task,
            seq=message.seq,
            payload=payload,
            offset=message.offset,
            length=message.length,
            kind=message.kind,
            media_s=message.media_s,
            boundary=message.boundary,
            transfer_s=message.transfer_s,
            finish_reason=message.finish_reason,
        )


def _reported(source: Link, message: link.Reported, now: float) -> on.StatsReported:
    if len(message.values) > MAX_METRICS or any(len(name) > MAX_METRICS for name in message.values):
        raise ProtocolViolated(f"it reports {len(message.values)} metrics, or one with a long name")
    if not all(math.isfinite(value) for value in message.values.values()):
        raise ProtocolViolated("it reports a metric that is no finite number")
    return on.StatsReported(
        now=now,
        replica=source.replica,
        running=message.running,
        waiting=message.waiting,
        values=message.values,
    )


def _check_loading(source: Link) -> None:
    if source.has_loaded:
        raise ProtocolViolated("it reports about loading after it was ready")


def _check_open(source: Link, task: TaskKey) -> int:
    expected = source.next_seq.get(task)
    if expected is None:
        raise ProtocolViolated(f"it speaks of task {task}, which is not open there")
    return expected


def _ended(source: Link, message: link.Ended, now: float) -> on.AnyEvent:
    _check_open(source, message.task)
    del source.next_seq[message.task]
    match message.outcome:
        case "finished":
            return on.TaskFinished(now=now, task=message.task)
        case "cancelled":
            return on.TaskCancelled(now=now, task=message.task)
        case "failed":
            if message.failure is None:
                raise ProtocolViolated(f"task {message.task} failed without a failure")
            return on.TaskFailed(now=now, task=message.task, failure=message.failure)
        case _:
            assert_never(message.outcome)
