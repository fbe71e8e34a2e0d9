"""The door for replicas from other hosts: who knows the token is offered to the router.

    connected ─► challenge ─► offer with a proof ─► the router admits or refuses ─► a link, or the end

Whoever stands here is a stranger: what it may send is small, it has little time, and there is room for
few of them. What it says is decoded by type, and believed after its proof.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from stretto.core import events as on
from stretto.errors import Failure, FailureKind
from stretto.messages import PROTOCOL_VERSION, link, proofs
from stretto.orchestrator.links import DECODER, MAX_UNSENT_BYTES
from stretto.orchestrator.strangers import HELLO_TIMEOUT_S, Strangers
from stretto.transport.connection import Connection
from stretto.transport.listening import BACKLOG
from stretto.transport.pulling import place_of
from stretto.transport.tcp import Address

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping

    from stretto.core import commands as do
    from stretto.orchestrator.dispatcher import Dispatcher
    from stretto.orchestrator.links import Links
    from stretto.types import Clock, LaunchSpec, ReplicaId, RunId

log = logging.getLogger("stretto.orchestrator")

MAX_OFFER_BYTES = 2048
"""Nothing that a stranger has to say is longer."""

MAX_STRANGERS = 64
"""Who comes when so many are here is sent away."""

MAX_NONCE_CHARS = 64


class _Offered(NamedTuple):
    """An offer that the router has not answered yet."""

    connection: Connection[link.Up]
    offer: link.Offer
    challenge: bytes


class Door:
    """One life's TCP socket for joining.

    Args:
        dispatcher: Takes the events.
        links: Takes over who is admitted.
        token: What both ends must know.
        run: The run that is joined.
        clock: Monotonic seconds.
        payload_port: Where payload files of this host can be pulled.
        patience_s: How long a stranger may take.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        links: Links,
        token: str,
        run: RunId,
        clock: Clock,
        payload_port: int = 0,
        patience_s: float = HELLO_TIMEOUT_S,
    ) -> None:
        self._dispatcher = dispatcher
        self._links = links
        self._token = token
        self._clock = clock
        self._payload_port = payload_port
        self._strangers = Strangers("join", run, patience_s)
        self._challenges: dict[Connection[link.Up], bytes] = {}
        self._offered: dict[int, _Offered] = {}
        self._connections = 0
        self._server: asyncio.AbstractServer | None = None

    async def open(self, listener: socket.socket) -> None:
        """Accept connections on a socket that listens."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self.accept, sock=listener, backlog=BACKLOG)

    def accept(self) -> Connection[link.Up]:
        """Return the protocol for a new connection, with a challenge on its way."""
        connection = Connection(
            DECODER,
            self._on_frame,
            self._on_closed,
            max_received_bytes=MAX_OFFER_BYTES,
            high_water_bytes=MAX_UNSENT_BYTES,
        )
        if len(self._challenges) + len(self._offered) >= MAX_STRANGERS:
            connection.abort()
            return connection
        challenge = self._challenges[connection] = proofs.new_challenge()
        self._strangers.arrived(connection)
        connection.send(link.Challenge(PROTOCOL_VERSION, challenge))
        return connection

    def admit(
        self,
        command: do.AdmitReplica,
        launch_spec: Callable[[ReplicaId, str, str, Mapping[str, object]], LaunchSpec],
    ) -> None:
        """Make a link of the connection, and tell its process what to be."""
        found = self._offered.pop(command.connection, None)
        if found is None:
            reason = "its connection ended before it was let in"
            event = on.ReplicaDied(now=self._clock(), replica=command.replica, reason=reason)
            self._dispatcher.post(event)
            return
        connection, offer, challenge = found
        self._strangers.left(connection)
        # Its payload files outlive a lost link, so their owner is the process, not its incarnation.
        owner = f"{command.replica.stage}-joined-{command.nonce}"
        place = place_of(Address(connection.hosts[1], offer.payload_port))
        runtime = {
            "payload_place": place,
            "payload_keys": self._links.kept(owner),
            "payload_port": self._payload_port,
        }
        spec = launch_spec(command.replica, command.nonce, owner, runtime)
        launch = msgspec.msgpack.encode(spec)
        parts = proofs.parts_of(challenge, offer)
        connection.send(link.Accepted(launch, proofs.proof(self._token, "accept", launch, *parts)))
        self._links.adopt(connection, command.replica, command.nonce, owner, place)
        log.info("%s has joined from %s, process %d", command.replica, offer.host, offer.pid)

    def refuse(self, command: do.RefuseReplica) -> None:
        """Tell a process that the router does not want it."""
        found = self._offered.pop(command.connection, None)
        if found is not None:
            self._turn_away(found.connection, command.failure)

    def close(self) -> None:
        """Let nobody in any more."""
        if self._server is not None:
            self._server.close()
        self._strangers.close()
        self._challenges.clear()
        self._offered.clear()

    # ------------------------------------------------------------------ what strangers say

    def _on_frame(
        self, connection: Connection[link.Up], messages: list[link.Up], body: memoryview
    ) -> None:
        del body
        challenge = self._challenges.pop(connection, None)
        offer = messages[0] if len(messages) == 1 else None
        if challenge is None or not isinstance(offer, link.Offer):
            self._forget(connection)
            self._strangers.refuse(connection, "it made no offer, or more than one")
            return
        failure = self._mistake(offer, challenge)
        if failure is not None:
            self._turn_away(connection, failure)
            return
        self._connections += 1
        self._offered[self._connections] = _Offered(connection, offer, challenge)
        event = on.ReplicaOffered(
            now=self._clock(),
            stage=offer.stage,
            nonce=offer.nonce,
            connection=self._connections,
        )
        self._dispatcher.post(event)

    def _mistake(self, offer: link.Offer, challenge: bytes) -> Failure | None:
        """Return what is wrong with an offer before the router is asked."""
        if offer.protocol != PROTOCOL_VERSION:
            return Failure(
                kind=FailureKind.CONFIG_ERROR,
                detail=f"it speaks version {offer.protocol} of the protocol, and this server version "
                f"{PROTOCOL_VERSION}; install the same release on both hosts",
                code="wrong_protocol",
            )
        parts = proofs.parts_of(challenge, offer)
        if not proofs.is_proof(offer.proof, self._token, "offer", *parts):
            return Failure(
                kind=FailureKind.CONFIG_ERROR,
                detail="its join token is not this server's; set the same one on both hosts",
                code="wrong_join_token",
            )
        if not offer.nonce.isalnum() or len(offer.nonce) > MAX_NONCE_CHARS:
            return Failure(kind=FailureKind.CONFIG_ERROR, detail="its nonce is malformed")
        return None

    def _turn_away(self, connection: Connection[link.Up], failure: Failure) -> None:
        self._strangers.left(connection)
        log.warning("a replica that wants to join was refused: %s", failure.detail)
        connection.send(link.Refused(failure))
        connection.close()

    def _on_closed(self, connection: Connection[link.Up], reason: str) -> None:
        del reason
        self._strangers.left(connection)
        self._forget(connection)

    def _forget(self, connection: Connection[link.Up]) -> None:
        self._challenges.pop(connection, None)
        for number, offered in list(self._offered.items()):
            if offered.connection is connection:
                del self._offered[number]
