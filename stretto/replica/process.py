"""A replica as a whole process: from its specification to its exit."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import traceback
from typing import TYPE_CHECKING, NoReturn

import msgspec
import uvloop

from stretto.errors import ConfigError, StrettoError
from stretto.replica.joining import Joiner
from stretto.replica.runtime import Replica
from stretto.replica.settings import RuntimeSettings, cap_threads, hide_devices, limit_memory
from stretto.types import LaunchSpec

if TYPE_CHECKING:
    from stretto.transport.tcp import Address
    from stretto.types import StageId

SIGNALLED = 128
"""Exit code of a process that a signal ended, less the signal's number."""


def run(spec_line: bytes) -> NoReturn:
    """Live as the specification says, then exit."""
    try:
        spec = msgspec.json.decode(spec_line, type=LaunchSpec)
        settings = RuntimeSettings.of(spec.runtime)
        cap_threads(spec, settings)
        hide_devices(spec, settings)
        limit_memory(settings)
    except (msgspec.MsgspecError, ConfigError) as error:
        sys.exit(f"the specification is wrong: {error}")
    uvloop.run(_live(spec))
    sys.exit("the loop ended before the process")


def join(stage: StageId, address: Address, token: str, silence_s: float) -> NoReturn:
    """Serve a stage from here until told to leave, then exit.

    The first signal lets it finish what it has, the second one ends it.

    Raises:
        StrettoError: It can't join, and would not be able to later.
    """
    code = uvloop.run(_live_joined(stage, address, token, silence_s))
    os._exit(code)  # what still loads or computes does not delay it


async def _live_joined(stage: StageId, address: Address, token: str, silence_s: float) -> int:
    joiner = Joiner(stage, address, token, silence_s, _tell)
    signals: list[int] = []

    def on_signal(number: int) -> None:
        signals.append(number)
        if len(signals) > 1:
            os._exit(SIGNALLED + number)
        _tell("leaving: finishing what runs; a second signal ends it at once")
        joiner.leave()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    return await joiner.live()


def _tell(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


async def _live(spec: LaunchSpec) -> NoReturn:
    """Exit from within the loop: neither a computation that hangs nor a library's end delays it."""
    code = 1
    try:
        code = await Replica(spec).live()
    except StrettoError as error:
        sys.stderr.write(f"{error.detail}\n")
    except BaseException:  # noqa: BLE001 - the top of the process: report, then exit
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
