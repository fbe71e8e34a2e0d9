"""The shell of a replica: its link, its start, and which driver gets which message.

    hello ─► welcome ─► load (compute thread, progress) ─► ready ─► tasks … ─► drained, or the link ends

It must not compute, and it decides nothing about tasks; that is `tasks`.
"""

from __future__ import annotations

import asyncio
import os
import platform
import sys
import traceback
from typing import TYPE_CHECKING, Any, Protocol, assert_never, cast

import msgspec

from stretto.backends.contract import Backend, Capabilities, StepBackend, StreamBackend
from stretto.backends.loading import backend_class
from stretto.errors import ConfigError, InternalError, StartFailed, StrettoError, sendable
from stretto.messages import PROTOCOL_VERSION, link
from stretto.replica.calls import Calls, checked_methods
from stretto.replica.outlet import Outlet
from stretto.replica.parts import Parts
from stretto.replica.resident import Resident
from stretto.replica.settings import RuntimeSettings
from stretto.replica.stepping import StepDriver
from stretto.replica.streaming import StreamDriver
from stretto.replica.tasks import HeldTask, TaskTable
from stretto.transport.connection import Connection, connect_unix
from stretto.types import weakest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stretto.types import LaunchSpec, TaskKey

DECODER = msgspec.msgpack.Decoder(list[link.Down])

FAREWELL_S = 1.0
"""How long the last messages, and generators that clean up, hold up the end."""


class Driver(Protocol):
    """Runs a backend of one form.

    Attributes:
        steps: How often the backend was asked to go on.
    """

    @property
    def steps(self) -> int:
        """Return the count."""
        ...

    async def run(self) -> None:
        """Work until cancelled."""
        ...

    def opened(self, task: HeldTask) -> None:
        """Take a task that is now in the table."""
        ...

    def changed(self) -> None:
        """Look again: messages have been entered in the table."""
        ...

    async def clear(self) -> None:
        """Close the state of all tasks; `run` has been cancelled."""
        ...

    def cancel(self, key: TaskKey) -> None:
        """End a task; unknown and ended ones are ignored."""
        ...


class Replica:
    """One replica's life, from its hello to its exit code.

    Args:
        spec: What it is told.
        resident: What a former life in this process has left, if there was one.
        connection: A link on which this process was let in already.

    Raises:
        ConfigError: The runtime settings are wrong.
    """

    def __init__(
        self,
        spec: LaunchSpec,
        resident: Resident | None = None,
        connection: Connection[link.Down] | None = None,
    ) -> None:
        self._spec = spec
        self._is_joined = connection is not None
        self._settings = RuntimeSettings.of(spec.runtime)
        self._table = TaskTable()
        self._driver: Driver | None = None
        self._calls: Calls | None = None
        self._group = asyncio.TaskGroup()
        self._is_draining = False
        self._alive_timer: asyncio.TimerHandle | None = None
        loop = asyncio.get_running_loop()
        self._welcomed: asyncio.Future[None] = loop.create_future()
        self._drained: asyncio.Future[None] = loop.create_future()
        self._link_closed: asyncio.Future[None] = loop.create_future()
        self._resident = resident or Resident(spec, self._settings)
        self._reader = self._resident.reader
        self._outlet = Outlet(self._resident.writer)
        self._compute = self._resident.compute
        self._connection: Connection[link.Down] = connection or Connection(
            DECODER, self._on_frame, self._on_closed
        )
        self._serving: asyncio.Task[int] | None = None
        if connection is not None:
            connection.hand_over(self._on_frame, self._on_closed)
            if not connection.is_open:
                self._link_closed.set_result(None)

    async def live(self) -> int:
        """Serve until drained or until the link ends; return the exit code.

        Raises:
            StartFailed: The orchestrator can't be reached.
            Exception: A bug of the runtime.
        """
        address = self._spec.address
        try:
            await connect_unix(address.removeprefix("unix:"), lambda: self._connection)
        except OSError as error:
            raise StartFailed(f"the orchestrator at {address} can't be reached: {error}") from error
        code = await self.serve(FAREWELL_S)
        self._resident.close()
        return code

    async def serve(self, farewell_s: float) -> int:
        """Serve until drained or until the link ends; return the exit code.

        Args:
            farewell_s: How long the last messages, and generators that clean up, hold up the end.

        Raises:
            Exception: A bug of the runtime.
        """
        serving = self._serving = asyncio.create_task(self._serve())
        ends = {serving, self._drained, self._link_closed}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        has_ended_itself = serving.done()
        serving.cancel()
        self._connection.close()
        await asyncio.wait({serving, self._link_closed}, timeout=farewell_s)
        if self._alive_timer is not None:
            self._alive_timer.cancel()
        return serving.result() if has_ended_itself else 0

    @property
    def has_drained(self) -> bool:
        """Say whether it was told to leave and has finished what it had."""
        return self._is_draining

    @property
    def has_ended(self) -> bool:
        """Say whether nothing of it runs any more but what the compute thread has."""
        return self._serving is not None and self._serving.done()

    def take(self, messages: Iterable[link.Down]) -> None:
        """Take messages that came before the link was handed over."""
        for message in messages:
            self._receive(message, None)
        self._send()

    async def clear(self) -> None:
        """Close the state of all tasks that the link has left behind; the backend can serve another one."""
        if self._driver is not None:
            await self._driver.clear()
        if self._calls is not None and self._calls.is_asleep:
            await self._calls.wake()

    def leave(self) -> None:
        """Ask to be drained."""
        self._connection.send(link.Leaving())

    async def _serve(self) -> int:
        """Start, then work until cancelled; return only if starting fails."""
        spec = self._spec
        if not self._is_joined:
            hello = link.Hello(
                PROTOCOL_VERSION, spec.run, spec.replica, spec.nonce, os.getpid(), platform.node()
            )
            self._connection.send(hello)
            await self._welcomed
        self._resident.on_progress = self._progressed
        backend = await self._resident.backend(self._load)
        if isinstance(backend, StartFailed):
            self._connection.send(link.StartFailed(backend.detail))
            return 1
        self._driver = self._driver_of(backend)
        self._calls = Calls(
            backend,
            checked_methods(spec.backend, type(backend)),
            self._compute,
            self._counts,
            self._connection.send,
            str(spec.replica),
        )
        async with self._group as group:
            group.create_task(self._driver.run())
            self._connection.send(
                link.Ready(
                    self._settings.slots, self._facts(backend.capabilities), self._calls.classes
                )
            )
        return 0

    def _load(self) -> Backend | StartFailed:
        """Make the backend ready; this runs in the compute thread."""
        try:
            sys.path += [f for f in self._settings.module_folders if f not in sys.path]
            cls = backend_class(self._spec.backend)
            capabilities = _checked_capabilities(
                self._spec.backend, getattr(cls, "capabilities", None)
            )
            checked_methods(self._spec.backend, cls)
            options = {**self._device(capabilities), **self._spec.options}
            backend = cast("Backend", cls(**options))
            backend.load(self._report)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a model may fail to load in any way
            if isinstance(error, StrettoError):
                sys.stderr.write(f"{type(error).__name__}: {error.detail}\n")
                return StartFailed(sendable(error.detail))
            traceback.print_exception(error)
            return StartFailed(sendable(f"{type(error).__name__}: {error}"))
        return backend

    def _device(self, capabilities: Capabilities) -> dict[str, str]:
        """Return the keyword argument of a backend that can choose where it computes.

        Raises:
            ConfigError: It can't compute on the device that the stage is given.
        """
        kind = self._settings.device.partition(":")[0]
        if kind not in capabilities.devices:
            allowed = " or ".join(capabilities.devices)
            raise ConfigError(
                f"stage {self._spec.replica.stage!r} is given device {self._settings.device!r}, but backend "
                f"{self._spec.backend!r} computes on {allowed} only: set `device: {capabilities.devices[0]}`"
            )
        return {"device": kind} if len(capabilities.devices) > 1 else {}

    def _driver_of(self, backend: Backend) -> Driver:
        parts = Parts(
            table=self._table,
            compute=self._compute,
            outlet=self._outlet,
            reader=self._reader,
            send=self._send,
            where=str(self._spec.replica),
        )
        if not hasattr(backend, "step"):
            return StreamDriver(cast("StreamBackend", backend), parts)
        return StepDriver(
            cast("StepBackend[Any]", backend),
            parts,
            max_batch=self._settings.max_batch,
            max_wait_s=self._settings.max_wait_ms / 1000,
        )

    def _facts(self, capabilities: Capabilities) -> link.StageFacts:
        return link.StageFacts(
            kind=capabilities.kind,
            unit=capabilities.unit,
            media=dict(capabilities.media),
            voices=capabilities.voices,
            recovery=weakest(capabilities.recovery, self._settings.recovery),
            max_step_s=capabilities.max_step_s,
        )

    def _counts(self) -> dict[str, int]:
        assert self._driver is not None
        return {
            "slots": self._settings.slots,
            "tasks": len(self._table),
            "steps": self._driver.steps,
        }

    def _report(self, what: str, fraction: float) -> None:
        """Tell how far loading is; the backend calls it in the compute thread."""
        self._compute.report(self._resident.progressed, sendable(str(what)), float(fraction))

    def _progressed(self, what: str, fraction: float) -> None:
        self._connection.send(link.LoadProgress(what, fraction))

    def _send(self) -> None:
        """Send what the table has to say; it leaves in one frame at the end of this turn."""
        table = self._table
        for message, body in table.outbox:
            self._connection.send(message, body)
        table.outbox.clear()
        self._outlet.discard(table.unsent)
        table.unsent.clear()
        if table:
            return
        if self._alive_timer is not None:
            self._alive_timer.cancel()
            self._alive_timer = None
        if self._is_draining and not self._drained.done():
            self._drained.set_result(None)

    def _on_frame(
        self, _: Connection[link.Down], messages: list[link.Down], body: memoryview
    ) -> None:
        at = 0
        for message in messages:
            data: bytes | None = None
            if (payload := link.inline_payload(message)) is not None:
                data = bytes(body[at : at + payload.size_bytes])
                at += payload.size_bytes
            self._receive(message, data)
        if self._driver is not None:
            self._driver.changed()
        self._send()

    def _receive(  # noqa: C901 - one arm per message
        self, message: link.Down, data: bytes | None
    ) -> None:
        table = self._table
        match message:
            case link.Feed(task=task, edge=edge, seq=seq, payload=payload):
                table.feed(task, edge, seq, payload, data)
            case link.Grant(task=task, chunks=chunks, bytes=nbytes):
                table.grant(task, chunks, nbytes)
            case link.Open():
                assert self._driver is not None, "a task was opened before the replica was ready"
                self._driver.opened(table.open(message, data))
                self._tell_alive_later()
            case link.CloseInput(task=task, edge=edge):
                table.close_input(task, edge)
            case link.Cancel(task=task):
                assert self._driver is not None, "a task was cancelled before the replica was ready"
                self._driver.cancel(task)
            case link.Call():
                assert self._calls is not None, "it was called before it was ready"
                self._calls.take(message, self._group)
            case link.Release(keys=keys):
                self._outlet.free(keys)
            case link.Drain():
                self._is_draining = True
            case link.Welcome():
                self._welcomed.set_result(None)
            case link.Challenge() | link.Accepted() | link.Refused():
                raise InternalError(f"{type(message).__name__} on a link that is open")
            case _:
                assert_never(message)

    def _tell_alive_later(self) -> None:
        if self._alive_timer is None and self._settings.alive_every_s:
            loop = asyncio.get_running_loop()
            self._alive_timer = loop.call_later(self._settings.alive_every_s, self._tell_alive)

    def _tell_alive(self) -> None:
        """Tell that this process goes on; one without tasks has no such timer."""
        self._alive_timer = None
        self._connection.send(link.Alive(self._compute.step_age_s))
        self._tell_alive_later()

    def _on_closed(self, _: Connection[link.Down], reason: str) -> None:
        del reason
        if not self._link_closed.done():
            self._link_closed.set_result(None)


def _checked_capabilities(backend: str, capabilities: object) -> Capabilities:
    """Return what a backend declares; refuse one that the runtime could not serve correctly.

    Raises:
        ConfigError: It says why, and what to change.
    """
    if not isinstance(capabilities, Capabilities):
        raise ConfigError(
            f"backend {backend!r} declares no `capabilities`: add a `Capabilities(...)`"
        )
    if capabilities.cumulative:
        raise ConfigError(
            f"backend {backend!r} declares cumulative chunks, which would be delivered again and again: "
            "make each chunk carry only what is new, and drop `cumulative=True`"
        )
    if not capabilities.pausable:
        raise ConfigError(
            f"backend {backend!r} declares that its tasks can't be held back one by one, but the runtime "
            "does that in both forms, `run` and `step`: drop `pausable=False`"
        )
    return capabilities
