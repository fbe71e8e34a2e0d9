"""A replica from elsewhere: it joins over TCP, keeps its model when the link is lost, and joins again.

    connect ─► challenge ─► offer ─► accepted: a launch description ─► a link, until it ends ─► connect …

What the orchestrator says is believed after its own proof: the description names code to run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import secrets
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from stretto.errors import ConfigError, InternalError
from stretto.messages import PROTOCOL_VERSION, link, proofs
from stretto.replica.resident import Resident
from stretto.replica.runtime import DECODER, Replica
from stretto.replica.settings import RuntimeSettings, cap_threads, hide_devices, limit_memory
from stretto.transport.connection import Connection
from stretto.transport.pulling import PayloadServer
from stretto.transport.run_directory import RunDirectory
from stretto.transport.tcp import connect_tcp
from stretto.types import LaunchSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from stretto.transport.tcp import Address
    from stretto.types import StageId

HANDSHAKE_TIMEOUT_S = 10.0
"""How long the orchestrator may take to answer."""

MIN_PAUSE_S = 0.1
MAX_PAUSE_S = 5.0
"""Between attempts to connect; the pause doubles."""

MAX_LAUNCH_BYTES = 1024 * 1024

CLEAR_TIMEOUT_S = 10.0
"""How long generators may take to end when their link is lost; a step takes as long as it takes."""


class _Lost(Exception):
    """There is no link now; another attempt may succeed. The text says why."""


class _Greeting:
    """One connection, from the challenge to the answer."""

    def __init__(self, joiner: Joiner) -> None:
        self._joiner = joiner
        self.launch: asyncio.Future[LaunchSpec] = asyncio.get_running_loop().create_future()
        self.early: list[link.Down] = []
        """What came right behind the answer; it is the link's."""
        self._sent: tuple[object, ...] | None = None
        self.connection: Connection[link.Down] = Connection(
            DECODER, self._on_frame, self._on_closed, max_received_bytes=MAX_LAUNCH_BYTES
        )

    def _on_frame(
        self, connection: Connection[link.Down], messages: list[link.Down], body: memoryview
    ) -> None:
        del body
        for message in messages:
            match message:
                case link.Challenge() if self._sent is None:
                    self._offer(message)
                case link.Refused():
                    self._refused(message)
                case link.Accepted() if self._sent is not None and not self.launch.done():
                    self._accepted(message, self._sent)
                    connection.pause_reading()
                case _ if self.launch.done():
                    self.early.append(message)
                case _:
                    self._end(_Lost(f"it answered with {type(message).__name__}"))

    def _offer(self, challenge: link.Challenge) -> None:
        if challenge.protocol != PROTOCOL_VERSION:
            self._end(
                ConfigError(
                    f"the server speaks version {challenge.protocol} of the protocol, and this process "
                    f"version {PROTOCOL_VERSION}; install the same release on both hosts"
                )
            )
            return
        offer = link.Offer(
            protocol=PROTOCOL_VERSION,
            stage=self._joiner.stage,
            nonce=self._joiner.nonce,
            challenge=proofs.new_challenge(),
            pid=os.getpid(),
            host=platform.node(),
            payload_port=self._joiner.payload_port(self.connection.hosts[0]),
            proof=b"",
        )
        self._sent = proofs.parts_of(challenge.challenge, offer)
        made = proofs.proof(self._joiner.token, "offer", *self._sent)
        self.connection.send(msgspec.structs.replace(offer, proof=made))

    def _accepted(self, answer: link.Accepted, sent: tuple[object, ...]) -> None:
        parts = (answer.launch, *sent)
        if not proofs.is_proof(answer.proof, self._joiner.token, "accept", *parts):
            self._end(ConfigError("the server could not prove that it knows the join token"))
            return
        try:
            self.launch.set_result(msgspec.msgpack.decode(answer.launch, type=LaunchSpec))
        except msgspec.MsgspecError as error:
            self._end(ConfigError(f"the server's description can't be read: {error}"))

    def _refused(self, answer: link.Refused) -> None:
        failure = answer.failure
        if failure.retry_after_s is None:
            self._end(failure.exception())
        else:
            self._end(_Lost(failure.detail))

    def _end(self, error: Exception) -> None:
        if not self.launch.done():
            self.launch.set_exception(error)
        self.connection.abort()

    def _on_closed(self, _: Connection[link.Down], reason: str) -> None:
        if not self.launch.done():
            self.launch.set_exception(_Lost(reason))


class Joiner:
    """A process that serves one stage of a deployment on another host, or on this one.

    Args:
        stage: Which stage.
        address: Where its orchestrator lets replicas join.
        token: What both must know.
        silence_s: After how much silence of the other host the link counts as lost.
        tell: Shows one line to whoever runs this.
        patience_s: How long the orchestrator may take to answer.
    """

    def __init__(
        self,
        stage: StageId,
        address: Address,
        token: str,
        silence_s: float,
        tell: Callable[[str], None],
        patience_s: float = HANDSHAKE_TIMEOUT_S,
    ) -> None:
        self.stage = stage
        self.token = token
        self.nonce = secrets.token_hex(16)
        self._address = address
        self._silence_s = silence_s
        self._tell = tell
        self._patience_s = patience_s
        self._attempt: asyncio.Timeout | None = None
        self._directory: RunDirectory | None = None
        self._payload_server: PayloadServer | None = None
        self._resident: Resident | None = None
        self._replica: Replica | None = None
        self._leaving = asyncio.Event()

    async def live(self) -> int:
        """Serve one link after the other until told to leave; return the exit code.

        Raises:
            ConfigError: The token or the release is not the server's, or the settings are wrong here.
            InvalidRequest: The server has no such stage.
            Exception: A bug of the runtime.
        """
        self._directory = _own_directory(self.nonce)
        try:
            return await self._live()
        finally:
            if self._resident is not None:
                self._resident.close()
            if self._payload_server is not None:
                self._payload_server.close()
            if self._directory is not None:
                self._directory.close()

    async def _live(self) -> int:
        pause_s = MIN_PAUSE_S
        said = ""
        while not self._leaving.is_set():
            try:
                spec, greeting = await self._join()
            except _Lost as lost:
                if str(lost) != said:
                    said = str(lost)
                    self._tell(f"no link to {self._address}: {said}; trying again")
                await self._wait(pause_s)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
                continue
            pause_s, said = MIN_PAUSE_S, ""
            code = await self._serve(spec, greeting)
            if code is not None:
                return code
            await self._wait(pause_s)
        return 0

    def payload_port(self, host: str) -> int:
        """Return where this process's payload files can be pulled, on the address of its link."""
        server = self._payload_server
        if server is not None and server.address.host != host:
            server.close()
            server = None
        if server is None:
            server = self._payload_server = PayloadServer(host, self._silence_s)
        return server.address.port

    def leave(self) -> None:
        """Finish what there is, then end; without a link, end now."""
        self._leaving.set()
        if self._attempt is not None:
            self._attempt.reschedule(0.0)
        if self._replica is not None:
            self._replica.leave()

    async def _wait(self, pause_s: float) -> None:
        try:
            async with asyncio.timeout(pause_s):
                await self._leaving.wait()
        except TimeoutError:
            pass

    async def _join(self) -> tuple[LaunchSpec, _Greeting]:
        """Return a connection on which this process was let in, and what it is to be.

        Raises:
            _Lost: It did not come to that, but may the next time.
        """
        greeting = _Greeting(self)
        try:
            async with asyncio.timeout(self._patience_s) as self._attempt:
                await connect_tcp(self._address, lambda: greeting.connection, self._silence_s)
                return await greeting.launch, greeting
        except TimeoutError as error:
            raise _Lost(f"no answer within {self._patience_s:g} s") from error
        except OSError as error:
            raise _Lost(error.strerror or str(error)) from error
        finally:
            self._attempt = None
            launch = greeting.launch
            if not launch.done() or launch.cancelled() or launch.exception() is not None:
                greeting.connection.abort()

    async def _serve(self, spec: LaunchSpec, greeting: _Greeting) -> int | None:
        """Be a replica until the link ends; return an exit code if there shall be no other link."""
        settings = RuntimeSettings.of(spec.runtime)
        directory = None if self._directory is None else self._directory.path
        spec = replace(spec, shared_memory_dir=directory)
        if self._resident is None:
            self._resident = _settled(spec, settings)
        self._resident.settle(settings, self._address.host)
        if self._payload_server is not None:
            self._payload_server.serve(directory, settings.payload_token)
        replica = self._replica = Replica(spec, self._resident, greeting.connection)
        self._tell(f"joined {self._address} as {spec.replica}")
        if self._leaving.is_set():
            replica.leave()
        replica.take(greeting.early)
        greeting.connection.resume_reading()
        code = await replica.serve(CLEAR_TIMEOUT_S)
        self._replica = None
        if code or replica.has_drained:
            return code
        if not replica.has_ended:
            raise InternalError("a task of the lost link did not end")
        await replica.clear()
        self._tell(f"lost the link as {spec.replica}")
        return None


def _own_directory(nonce: str) -> RunDirectory | None:
    """Return a directory for payload files; where there is no shared memory all go inline."""
    with contextlib.suppress(OSError):
        RunDirectory.reclaim()
        return RunDirectory.create(f"joined-{nonce[:16]}")
    return None


def _settled(spec: LaunchSpec, settings: RuntimeSettings) -> Resident:
    """Prepare this process for the stage's backend, as its launcher would have."""
    os.environ.update(spec.environment)
    cap_threads(spec, settings)
    hide_devices(spec, settings)
    limit_memory(settings)
    return Resident(spec, settings)
