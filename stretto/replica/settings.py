"""What a replica's runtime is told, apart from the backend's own options."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

import msgspec

from stretto.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stretto.types import LaunchSpec

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)
"""Read by numerical libraries when they are imported."""


class RuntimeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a stage's settings that its replicas obey.

    Attributes:
        slots: How many tasks the replica holds at a time.
        max_batch: How many tasks one step advances at most.
        max_wait_ms: How long a step may wait for more tasks to batch; 0 steps at once.
        threads: Compute threads of the numerical libraries.
        recovery: `fail` overrides a backend whose tasks could be repeated.
        shared_memory_bytes: Budget for payload files; beyond it payloads go inline.
        payload_owner: Name under which payload files are written; the launch's nonce if empty.
    """

    slots: int = 32
    max_batch: int = 8
    max_wait_ms: float = 0.0
    threads: int = 1
    recovery: Literal["retry", "fail"] = "retry"
    shared_memory_bytes: int = 256 * 1024 * 1024
    payload_owner: str = ""

    @classmethod
    def of(cls, runtime: Mapping[str, object]) -> RuntimeSettings:
        """Read the settings; keys that concern others are passed over.

        Raises:
            ConfigError: A value has the wrong type or is out of range.
        """
        try:
            settings = msgspec.convert(runtime, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"runtime settings: {error}") from error
        for name in ("slots", "max_batch", "threads"):
            if getattr(settings, name) < 1:
                raise ConfigError(
                    f"runtime settings: {name} is {getattr(settings, name)}, use 1 or more"
                )
        return settings


def cap_threads(spec: LaunchSpec, settings: RuntimeSettings) -> None:
    """Tell numerical libraries how many threads to use; only works before they are imported.

    What the stage's own environment says goes first.
    """
    for name in THREAD_VARIABLES:
        os.environ[name] = spec.environment.get(name, str(settings.threads))
