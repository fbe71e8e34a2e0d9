"""How channels are closed when closing one of them goes wrong."""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING

import pytest

from stretto.core.router import Router
from stretto.errors import Failure, FailureKind
from stretto.messages import PROTOCOL_VERSION, channel
from stretto.observe.metrics import Metrics
from stretto.orchestrator.answers import Answers
from stretto.orchestrator.calls import CallValues
from stretto.orchestrator.channels import Channels
from stretto.orchestrator.dispatcher import Dispatcher
from stretto.orchestrator.payloads import PayloadTable
from stretto.transport.local import ChannelEnd, LocalConnection, LocalListener
from stretto.types import ChannelId, RunId
from tests.orchestrator.world import two_stages

if TYPE_CHECKING:
    from collections.abc import Callable

RUN = RunId("run")
FATAL = Failure(kind=FailureKind.ENGINE_DEAD, detail="broken")
WAIT_S = 5.0


class BrittleEnd(LocalConnection[channel.Up]):
    """A connection whose sending or closing fails."""

    breaks_on: type[object] | None = None

    def send(self, message: object, body: bytes | None = None) -> bool:
        """Fail on one kind of message."""
        if self.breaks_on is not None and isinstance(message, self.breaks_on):
            raise OSError("can't send")
        return super().send(message, body)

    def close(self) -> None:
        """Fail after the work is done."""
        super().close()
        if self.breaks_on is not None:
            raise OSError("can't close")


class BrittleChannels(Channels):
    """Channels whose first connection is brittle."""

    def accept_local(self) -> LocalConnection[channel.Up]:
        """Return an end that can be made to fail."""
        return BrittleEnd(self._on_frame, self._on_closed)


class Client:
    """A client's end that keeps what it hears."""

    def __init__(self, listener: LocalListener[channel.Up, channel.Down]) -> None:
        self.heard: list[channel.Down] = []
        self.closed = asyncio.Event()
        self.welcomed = asyncio.Event()
        self.connection: LocalConnection[channel.Down] = LocalConnection(
            self._on_frame, self._on_closed
        )
        listener.connect(self.connection)
        self.connection.send(channel.Hello(PROTOCOL_VERSION, RUN, os.getpid(), "test"))

    def _on_frame(
        self, connection: ChannelEnd, messages: list[channel.Down], body: memoryview
    ) -> None:
        self.heard += messages
        self.welcomed.set()

    def _on_closed(self, connection: ChannelEnd, reason: str) -> None:
        self.closed.set()


def make_channels(crashes: Callable[[BaseException], None]) -> Channels:
    """Return the channels of a router that nobody asks anything."""
    router = Router(two_stages().deployment())
    dispatcher = Dispatcher(router, lambda _: None, lambda: None, crashes, time.monotonic)

    def welcome(name: ChannelId) -> channel.Welcome:
        return channel.Welcome(PROTOCOL_VERSION, 1, name, None, (), (), {})

    answers = Answers(router, Metrics(1), 1)
    return BrittleChannels(
        dispatcher, PayloadTable(None), RUN, 1, time.monotonic, welcome, answers, CallValues()
    )


@pytest.mark.parametrize("breaks_on", [channel.Fatal, channel.Closing])
async def test_row_Q8_and_row_Q10_a_step_of_the_end_that_fails_skips_no_other(
    breaks_on: type[object], caplog: pytest.LogCaptureFixture
) -> None:
    """The channel whose last words can't be sent is closed all the same, and so is the next one."""
    channels = make_channels(lambda _: None)
    listener: LocalListener[channel.Up, channel.Down] = LocalListener()
    ends: list[BrittleEnd] = []

    def accept() -> LocalConnection[channel.Up]:
        end = channels.accept_local()
        assert isinstance(end, BrittleEnd)
        ends.append(end)
        return end

    listener.serve(accept)
    first, second = Client(listener), Client(listener)
    async with asyncio.timeout(WAIT_S):
        for client in (first, second):
            await client.welcomed.wait()
    ends[0].breaks_on = breaks_on
    channels.close(FATAL)
    async with asyncio.timeout(WAIT_S):
        for client in (first, second):
            await client.closed.wait()
    assert second.heard[-2:] == [channel.Fatal(FATAL), channel.Closing()]
    assert first.heard[-1] == (
        channel.Closing() if breaks_on is channel.Fatal else channel.Fatal(FATAL)
    )
    assert len(caplog.records) == 2
    await channels.wait_closed(WAIT_S)
    listener.close()
