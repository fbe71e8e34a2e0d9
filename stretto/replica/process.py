"""A replica as a whole process: from its specification to its exit."""

from __future__ import annotations

import os
import sys
import traceback
from typing import NoReturn

import msgspec
import uvloop

from stretto.errors import ConfigError, StrettoError
from stretto.replica.runtime import Replica
from stretto.replica.settings import RuntimeSettings, cap_threads, hide_devices, limit_memory
from stretto.types import LaunchSpec


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
