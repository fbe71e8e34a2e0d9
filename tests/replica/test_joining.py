"""The joiner's end of the handshake: whom it believes, and when it tries again."""

from __future__ import annotations

import asyncio
import os
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

import msgspec
import pytest

from stretto.core.commands import UNLIMITED
from stretto.errors import ConfigError, Failure, FailureKind, InvalidRequest, StrettoError
from stretto.messages import PROTOCOL_VERSION, link, proofs
from stretto.replica.joining import Joiner
from stretto.replica.settings import THREAD_VARIABLES, VISIBLE_GPUS
from stretto.transport import encode
from stretto.transport.connection import Connection
from stretto.transport.tcp import Address, listen_tcp
from stretto.types import (
    INLINE,
    CallId,
    IncarnationNumber,
    LaunchSpec,
    PayloadRef,
    PipelineName,
    ReplicaId,
)
from tests.replica.backends import forget
from tests.replica.rig import BOUND_S, RUN, STAGE, TEXT, task_key
from tests.support.waiting import becomes_true

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

TOKEN = "a token for tests only"  # noqa: S105 - it is one
OVERLOADED = Failure(kind=FailureKind.OVERLOADED, detail="it stops", retry_after_s=1.0)

T = TypeVar("T")


class FakeDoor:
    """Challenges whoever connects, and answers offers as the test says."""

    def __init__(self, protocol: int, answers: list[link.Down | None]) -> None:
        self.offers: list[link.Offer] = []
        self._protocol = protocol
        self._answers = answers
        self._connections: list[Connection[link.Up]] = []

    def accept(self) -> Connection[link.Up]:
        """Return the protocol for a new connection."""
        connection: Connection[link.Up] = Connection(
            msgspec.msgpack.Decoder(list[link.Up]), self._on_frame, lambda _c, _reason: None
        )
        connection.send(link.Challenge(self._protocol, b"c" * 32))
        self._connections.append(connection)
        return connection

    def hang_up(self) -> None:
        """End all connections."""
        for connection in self._connections:
            connection.abort()

    def _on_frame(
        self, connection: Connection[link.Up], messages: list[link.Up], body: memoryview
    ) -> None:
        del body
        for message in messages:
            assert isinstance(message, link.Offer)
            self.offers.append(message)
            answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
            if answer is None:
                connection.abort()
            else:
                connection.send(answer)


class OpenDoor(FakeDoor):
    """Lets everybody in, and keeps what comes on the newest link.

    Attributes:
        received: Messages of each link.
    """

    def __init__(self, backend: str) -> None:
        super().__init__(PROTOCOL_VERSION, [None])
        self.received: list[list[link.Up]] = []
        self._backend = backend

    def send(self, *messages: link.Down, text: str = "") -> None:
        """Send messages on the newest link; a chunk that is fed has this text."""
        for message in messages:
            body = encode({"text": text}).join() if isinstance(message, link.Feed) else None
            self._connections[-1].send(message, body)

    def open_task(self, name: str, text: str) -> None:
        """Open a task with one input that is not its last."""
        size = encode({"text": text}).size_bytes
        key = task_key(name)
        self.send(
            link.Open(key, PipelineName("p"), (TEXT,), None, 0, UNLIMITED, UNLIMITED),
            link.Feed(key, TEXT.id, 0, PayloadRef(INLINE, "", size)),
            text=text,
        )

    def of(self, kind: type[T]) -> list[T]:
        """Return what has come of one kind on the newest link."""
        return [m for m in (self.received or [[]])[-1] if isinstance(m, kind)]

    def _on_frame(
        self, connection: Connection[link.Up], messages: list[link.Up], body: memoryview
    ) -> None:
        del body
        for message in messages:
            if not isinstance(message, link.Offer):
                self.received[-1].append(message)
                continue
            self.offers.append(message)
            self.received.append([])
            number = IncarnationNumber(len(self.offers))
            launch = msgspec.msgpack.encode(
                LaunchSpec(
                    replica=ReplicaId(STAGE, 0, number),
                    run=RUN,
                    address="",
                    shared_memory_dir=None,
                    nonce=message.nonce,
                    backend=f"tests.replica.backends:{self._backend}",
                    options={},
                    runtime={},
                    environment={},
                )
            )
            parts = proofs.parts_of(b"c" * 32, message)
            proof = proofs.proof(TOKEN, "accept", launch, *parts)
            connection.send(link.Accepted(launch, proof))


@asynccontextmanager
async def joined(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncGenerator[tuple[OpenDoor, asyncio.Task[int | StrettoError]]]:
    """Run a joiner with a backend until the block ends; it sets variables of this process."""
    for name in (*THREAD_VARIABLES, VISIBLE_GPUS):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    fake = OpenDoor(backend)
    listener = listen_tcp(Address("127.0.0.1", 0), BOUND_S)
    address = Address(*listener.getsockname()[:2])
    server = await asyncio.get_running_loop().create_server(fake.accept, sock=listener)
    joiner = Joiner(STAGE, address, TOKEN, BOUND_S, lambda _: None)
    living = asyncio.create_task(outcome(joiner))
    try:
        assert await becomes_true(lambda: bool(fake.of(link.Ready)))
        yield fake, living
    finally:
        server.close()
        joiner.leave()
        fake.hang_up()
        await living


@asynccontextmanager
async def door(
    *answers: link.Down | None, protocol: int = PROTOCOL_VERSION, patience_s: float = BOUND_S
) -> AsyncGenerator[tuple[FakeDoor, Joiner, list[str]]]:
    """Provide a door, a joiner that will knock there, and the lines that it tells."""
    fake = FakeDoor(protocol, list(answers))
    listener = listen_tcp(Address("127.0.0.1", 0), BOUND_S)
    address = Address(*listener.getsockname()[:2])
    server = await asyncio.get_running_loop().create_server(fake.accept, sock=listener)
    lines: list[str] = []
    try:
        yield fake, Joiner(STAGE, address, TOKEN, BOUND_S, lines.append, patience_s), lines
    finally:
        server.close()
        fake.hang_up()
        await asyncio.sleep(0)


async def outcome(joiner: Joiner) -> int | StrettoError:
    """Return how a joiner ends, within a bound."""
    try:
        async with asyncio.timeout(BOUND_S):
            return await joiner.live()
    except StrettoError as error:
        return error


async def test_the_offer_proves_the_token_without_naming_it() -> None:
    """A refusal for good is the error that it names."""
    failure = Failure(kind=FailureKind.INVALID_REQUEST, detail="no such stage")
    async with door(link.Refused(failure)) as (fake, joiner, _):
        assert isinstance(await outcome(joiner), InvalidRequest)
        (offer,) = fake.offers
        parts = proofs.parts_of(b"c" * 32, offer)
        assert proofs.is_proof(offer.proof, TOKEN, "offer", *parts)
        assert not proofs.is_proof(offer.proof, TOKEN, "accept", *parts)
        assert TOKEN.encode() not in msgspec.msgpack.encode(offer)


async def test_a_server_that_can_not_prove_the_token_is_not_believed() -> None:
    """Its description names code to run, so nothing of it is looked at."""
    async with door(link.Accepted(b"\xc1", b"p" * 32)) as (_, joiner, _lines):
        error = await outcome(joiner)
        assert isinstance(error, ConfigError)
        assert "could not prove" in error.detail


async def test_a_server_of_another_release_is_told_from_one_that_is_away() -> None:
    """Before anything is offered."""
    async with door(None, protocol=99) as (fake, joiner, _):
        error = await outcome(joiner)
        assert isinstance(error, ConfigError)
        assert ("version 99" in error.detail, fake.offers) == (True, [])


@pytest.mark.parametrize("first", [None, link.Refused(OVERLOADED), link.Drain()])
async def test_what_may_pass_is_tried_again(first: link.Down | None) -> None:
    """Under the same nonce, with another challenge; it is told once."""
    end = link.Refused(Failure(kind=FailureKind.CONFIG_ERROR, detail="enough"))
    async with door(first, first, end) as (fake, joiner, lines):
        assert isinstance(await outcome(joiner), ConfigError)
        assert len(fake.offers) == 3
        assert len({offer.nonce for offer in fake.offers}) == 1
        assert len({offer.challenge for offer in fake.offers}) == 3
        assert len(lines) == 1
        assert "trying again" in lines[0]


async def test_a_silent_server_is_given_so_much_time() -> None:
    """Then it counts as away."""
    with_no_voice = listen_tcp(Address("127.0.0.1", 0), BOUND_S)
    lines: list[str] = []
    address = Address(*with_no_voice.getsockname()[:2])
    joiner = Joiner(STAGE, address, TOKEN, BOUND_S, lines.append, 0.05)
    living = asyncio.create_task(outcome(joiner))
    assert await becomes_true(lambda: bool(lines))
    assert "no answer within 0.05 s" in lines[0]
    joiner.leave()
    assert await living == 0
    with_no_voice.close()


async def test_it_leaves_in_the_midst_of_an_attempt() -> None:
    """Without waiting for an answer that may not come."""
    with_no_voice = listen_tcp(Address("127.0.0.1", 0), BOUND_S)
    address = Address(*with_no_voice.getsockname()[:2])
    joiner = Joiner(STAGE, address, TOKEN, BOUND_S, lambda _: None, 60.0)
    living = asyncio.create_task(outcome(joiner))
    await asyncio.sleep(0)
    joiner.leave()
    assert await living == 0
    with_no_voice.close()


async def test_row_M2_what_a_lost_link_has_left_is_closed_before_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also a step that is being computed: no offer is made before its end; the model stays."""
    seen = forget()
    async with joined("Obedient", monkeypatch) as (door, _):
        assert door.of(link.LoadProgress)
        seen.may_step.clear()
        door.open_task("a", "hello")
        assert await becomes_true(seen.stepping.is_set)
        door.hang_up()
        assert not await becomes_true(lambda: len(door.offers) > 1, timeout_s=0.3)
        seen.may_step.set()
        assert await becomes_true(lambda: bool(len(door.offers) == 2 and door.of(link.Ready)))
        assert (seen.opened["a"], seen.closed["a"]) == (1, 1)
        assert door.offers[0].nonce == door.offers[1].nonce
        assert not door.of(link.LoadProgress), "nothing is loaded again"
        door.open_task("b", "hello")
        assert await becomes_true(lambda: bool(door.of(link.Produced)))
        assert {m.task for m in door.of(link.Produced)} == {task_key("b")}


async def test_row_M2_a_generator_ends_with_its_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its clean-up is done before the next offer."""
    seen = forget()
    async with joined("Streaming", monkeypatch) as (door, _):
        door.open_task("a", "hang")
        assert await becomes_true(lambda: bool(seen.inputs.get("a")))
        seen.may_tidy.clear()
        door.hang_up()
        assert await becomes_true(seen.tidying.is_set)
        assert not await becomes_true(lambda: len(door.offers) > 1, timeout_s=0.2)
        seen.may_tidy.set()
        assert await becomes_true(lambda: bool(len(door.offers) == 2 and door.of(link.Ready)))
        assert seen.closed["a"] == 1


async def test_one_that_is_drained_does_not_offer_itself_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It ends well, when it has finished."""
    async with joined("Obedient", monkeypatch) as (door, living):
        door.send(link.Drain())
        assert await living == 0
        assert len(door.offers) == 1


async def test_one_that_sleeps_is_woken_before_it_offers_itself_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever put it to sleep is gone, and the next link takes it for awake."""
    async with joined("Sleeper", monkeypatch) as (door, _):
        door.send(link.Call(CallId("1"), "sleep", "exclusive", b"\x80"))
        assert await becomes_true(lambda: bool(door.of(link.CallAnswered)))
        assert door.of(link.CallAnswered)[0].is_asleep
        door.hang_up()
        assert await becomes_true(lambda: bool(len(door.offers) == 2 and door.of(link.Ready)))
        door.open_task("a", "hello")
        assert await becomes_true(lambda: bool(door.of(link.Produced)))
