"""The door for replicas from other hosts: who is let in, and what strangers can do."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar, cast

import msgspec
import pytest

from stretto.config.settings import OrchestratorSettings, Settings
from stretto.errors import FailureKind
from stretto.messages import PROTOCOL_VERSION, link, proofs
from stretto.orchestrator.door import MAX_OFFER_BYTES, MAX_STRANGERS, Door
from stretto.transport.connection import Connection
from stretto.transport.tcp import Address, connect_tcp, listen_tcp
from stretto.types import SHARED_MEMORY, LaunchSpec, PayloadRef, StageId
from tests.orchestrator.world import B, World, running, two_stages
from tests.support.fake_replica import FACTS
from tests.support.waiting import becomes_true

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from stretto.orchestrator.links import Links

TOKEN = "a token for tests only"  # noqa: S105 - it is one
BOUND_S = 5.0
T = TypeVar("T")


class Stranger:
    """Somebody at the door, under the test's control."""

    def __init__(self) -> None:
        self.received: list[link.Down] = []
        self.has_closed = False
        self.offered: tuple[object, ...] = ()
        self._changed = asyncio.Event()
        self.connection: Connection[link.Down] = Connection(
            msgspec.msgpack.Decoder(list[link.Down]), self._on_frame, self._on_closed
        )

    async def first(self, kind: type[T]) -> T:
        """Wait for the first message of a kind."""
        async with asyncio.timeout(BOUND_S):
            while not (found := [m for m in self.received if isinstance(m, kind)]):
                assert not self.has_closed, f"closed instead of {kind.__name__}"
                self._changed.clear()
                await self._changed.wait()
        return found[0]

    async def is_heard(self) -> bool:
        """Wait for a challenge or the end; return whether it was a challenge."""
        async with asyncio.timeout(BOUND_S):
            while not self.received and not self.has_closed:
                self._changed.clear()
                await self._changed.wait()
        return bool(self.received)

    async def closed(self) -> None:
        """Wait until the door has hung up."""
        async with asyncio.timeout(BOUND_S):
            while not self.has_closed:
                self._changed.clear()
                await self._changed.wait()

    async def offer(
        self,
        *,
        token: str = TOKEN,
        stage: StageId = B,
        nonce: str = "nonce",
        protocol: int = PROTOCOL_VERSION,
    ) -> link.Offer:
        """Make an offer; return what was sent."""
        challenge = (await self.first(link.Challenge)).challenge
        offer = link.Offer(protocol, stage, nonce, proofs.new_challenge(), 1, "host", 7, b"")
        self.offered = proofs.parts_of(challenge, offer)
        made = proofs.proof(token, "offer", *self.offered)
        offer = msgspec.structs.replace(offer, proof=made)
        self.connection.send(offer)
        return offer

    async def accepted(self) -> LaunchSpec:
        """Wait to be let in; check the orchestrator's proof."""
        answer = await self.first(link.Accepted)
        assert proofs.is_proof(answer.proof, TOKEN, "accept", answer.launch, *self.offered)
        return msgspec.msgpack.decode(answer.launch, type=LaunchSpec)

    async def refusal(self) -> str:
        """Wait to be refused and for the end of the connection; return why."""
        failure = (await self.first(link.Refused)).failure
        await self.closed()
        return f"{failure.kind.value}: {failure.detail}"

    def _on_frame(
        self, _: Connection[link.Down], messages: list[link.Down], body: memoryview
    ) -> None:
        del body
        self.received += messages
        self._changed.set()

    def _on_closed(self, _: Connection[link.Down], reason: str) -> None:
        del reason
        self.has_closed = True
        self._changed.set()


class House:
    """An orchestrator with a door."""

    def __init__(self, world: World, address: Address) -> None:
        self.world = world
        self.address = address
        self._strangers: list[Stranger] = []

    async def come(self) -> Stranger:
        """Return a new stranger at the door."""
        stranger = Stranger()
        await connect_tcp(self.address, lambda: stranger.connection, BOUND_S)
        self._strangers.append(stranger)
        return stranger

    async def leave(self) -> None:
        """End all their connections."""
        for stranger in self._strangers:
            stranger.connection.abort()
            await stranger.closed()

    def states(self) -> dict[str, str]:
        """Return where the replicas of the second stage stand."""
        stages = {each.stage: each for each in self.world.orchestrator.statistics().stages}
        return {str(replica): state for replica, state in stages[B].replicas}


def settings_with(token: str) -> Settings:
    """Return two stages, the second without replicas, and a token."""
    settings = two_stages()
    first, second = settings.stages
    return msgspec.structs.replace(
        settings,
        stages=(first, msgspec.structs.replace(second, replicas=0)),
        orchestrator=OrchestratorSettings(join_token=token),
    )


@asynccontextmanager
async def house(folder: Path) -> AsyncGenerator[House]:
    """Run an orchestrator with a door until the block ends."""
    listener = listen_tcp(Address("127.0.0.1", 0), BOUND_S)
    address = Address(*listener.getsockname()[:2])
    async with running(folder, settings_with(TOKEN), join_fd=listener.detach()) as world:
        found = House(world, address)
        try:
            yield found
        finally:
            await found.leave()


async def test_one_that_knows_the_token_gets_all_that_it_needs(tmp_path: Path) -> None:
    """The answer proves the token too, and describes the stage: no pipeline file is needed."""
    async with house(tmp_path) as here:
        stranger = await here.come()
        await stranger.offer()
        spec = await stranger.accepted()
        assert (str(spec.replica), spec.backend, spec.nonce) == ("b/0#1", "scripted", "nonce")
        assert spec.runtime["payload_place"] == "tcp:127.0.0.1:7"
        assert here.states() == {"b/0#1": "loading"}
        stranger.connection.send(link.Ready(4, FACTS))
        assert await becomes_true(lambda: here.states() == {"b/0#1": "ready"})


async def test_a_wrong_token_is_refused(tmp_path: Path) -> None:
    """In words, with no hint at the right one, and nothing has changed."""
    async with house(tmp_path) as here:
        stranger = await here.come()
        await stranger.offer(token="guessed " * 3)
        assert "config_error: its join token" in await stranger.refusal()
        assert here.states() == {}


async def test_an_offer_that_was_overheard_is_worth_nothing(tmp_path: Path) -> None:
    """Each connection has its own challenge."""
    async with house(tmp_path) as here:
        first, second = await here.come(), await here.come()
        heard = await first.offer()
        await first.accepted()
        await second.first(link.Challenge)
        second.connection.send(heard)
        assert "join token" in await second.refusal()
        assert here.states() == {"b/0#1": "loading"}


async def test_what_an_offer_says_can_not_be_changed(tmp_path: Path) -> None:
    """The proof covers the stage, the nonce and where payloads are."""
    async with house(tmp_path) as here:
        for changed in ({"stage": StageId("a")}, {"nonce": "other"}, {"payload_port": 8}):
            stranger = await here.come()
            challenge = (await stranger.first(link.Challenge)).challenge
            offer = link.Offer(PROTOCOL_VERSION, B, "n", proofs.new_challenge(), 1, "h", 7, b"")
            made = proofs.proof(TOKEN, "offer", *proofs.parts_of(challenge, offer))
            stranger.connection.send(msgspec.structs.replace(offer, proof=made, **changed))
            assert "join token" in await stranger.refusal()


async def test_another_release_or_stage_is_named(tmp_path: Path) -> None:
    """So is a nonce that could not be part of a file's name."""
    async with house(tmp_path) as here:
        stranger = await here.come()
        await stranger.offer(protocol=99)
        assert "version 99" in await stranger.refusal()
        stranger = await here.come()
        await stranger.offer(stage=StageId("c"))
        refusal = await stranger.refusal()
        assert refusal.startswith(FailureKind.INVALID_REQUEST.value)
        assert "no stage 'c'; this server has: a, b" in refusal
        stranger = await here.come()
        await stranger.offer(nonce="../x")
        assert "malformed" in await stranger.refusal()
        assert here.states() == {}


async def test_what_is_no_offer_is_cut_off(tmp_path: Path) -> None:
    """A hello, a frame that is too large for an offer, bytes that are no frame, two offers."""
    async with house(tmp_path) as here:
        stranger = await here.come()
        stranger.connection.send(link.Leaving())
        await stranger.closed()
        stranger = await here.come()
        stranger.connection.send(link.StartFailed("x" * MAX_OFFER_BYTES))
        await stranger.closed()
        stranger = await here.come()
        await stranger.offer()
        await stranger.offer(nonce="second")
        await stranger.closed()
        reader, writer = await asyncio.open_connection(*here.address)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        async with asyncio.timeout(BOUND_S):
            while await reader.read(4096):
                pass
        writer.close()


async def test_a_silent_stranger_is_sent_away(tmp_path: Path) -> None:
    """It has so much time and no more."""
    async with house(tmp_path) as here:
        orchestrator = here.world.orchestrator
        door = Door(
            orchestrator.dispatcher,
            cast("Links", None),
            TOKEN,
            here.world.run,
            time.monotonic,
            patience_s=0.05,
        )
        listener = listen_tcp(Address("127.0.0.1", 0), BOUND_S)
        here.address = Address(*listener.getsockname()[:2])
        await door.open(listener)
        stranger = await here.come()
        assert await stranger.is_heard()
        await stranger.closed()
        door.close()


async def test_only_so_many_strangers_are_heard_at_a_time(tmp_path: Path) -> None:
    """Who is silent takes up room, and not for long."""
    async with house(tmp_path) as here:
        silent = [await here.come() for _ in range(MAX_STRANGERS)]
        for each in silent:
            await each.first(link.Challenge)
        one_more = await here.come()
        await one_more.closed()
        silent[0].connection.abort()
        await silent[0].closed()
        async with asyncio.timeout(BOUND_S):
            while not await (late := await here.come()).is_heard():
                pass
        await late.offer()
        await late.accepted()


async def test_row_M1_the_same_process_on_a_new_connection_replaces_itself(tmp_path: Path) -> None:
    """The former connection is ended, and what comes on it is not heard."""
    async with house(tmp_path) as here:
        first, second = await here.come(), await here.come()
        await first.offer()
        await first.accepted()
        await second.offer()
        assert str((await second.accepted()).replica) == "b/0#2"
        await first.closed()
        assert here.states() == {"b/0#2": "loading"}


@pytest.mark.parametrize("place_elsewhere", ["tcp:10.0.0.1:80", SHARED_MEMORY])
async def test_it_can_not_speak_of_payloads_elsewhere(tmp_path: Path, place_elsewhere: str) -> None:
    """A place that is not its own is a violation: nobody is sent to a host of its choice."""
    async with house(tmp_path) as here:
        stranger = await here.come()
        await stranger.offer()
        await stranger.accepted()
        stranger.connection.send(link.Ready(4, FACTS))
        _stream = here.world.channel.submit(pipeline="line", inputs={"text": {"text": "hi"}})
        a = await here.world.launcher.get("a")
        a.produce((await a.wait_for(link.Open))[0].task, 0)
        task = (await stranger.first(link.Open)).task
        owner = f"{B}-joined-nonce"
        for place, is_its_own in (("tcp:127.0.0.1:7", True), (place_elsewhere, False)):
            ref = PayloadRef(place, f"{owner}.{int(is_its_own)}", 100_000)
            stranger.connection.send(
                link.Produced(task, int(not is_its_own), ref, 0, 1, "data", 0.0)
            )
            if is_its_own:
                stranger.connection.flush()
        await stranger.closed()
        assert await becomes_true(lambda: not here.states())
