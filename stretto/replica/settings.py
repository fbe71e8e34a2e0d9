"""What a replica's runtime is told, apart from the backend's own options."""

from __future__ import annotations

import os
import resource
from typing import TYPE_CHECKING

import msgspec

from stretto.errors import ConfigError
from stretto.types import SHARED_MEMORY, Recovery

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
        device: `cpu`, `cuda` or `cuda:N`.
        memory_bytes: Most memory that the process may allocate.
        module_folders: Where modules are found besides the usual places.
        recovery: The most that may be done with tasks after a death, whatever the backend allows.
        alive_every_s: How often to tell that this process goes on, while it holds tasks; 0 is never.
        shared_memory_bytes: Budget for payload files; beyond it payloads go inline.
        payload_owner: Name under which payload files are written; the launch's nonce if empty.
        payload_token: With which payloads of other hosts are pulled; empty if there are none.
        payload_place: By which the run knows the files of this host, if it is not the orchestrator's.
        payload_port: Where, on the orchestrator's host, its files are pulled.
        payload_keys: The files of a former link that somebody may still read.
    """

    slots: int = 32
    max_batch: int = 8
    max_wait_ms: float = 0.0
    threads: int = 1
    device: str = "cpu"
    memory_bytes: int | None = None
    module_folders: tuple[str, ...] = ()
    recovery: Recovery = "replay"
    alive_every_s: float = 0.0
    shared_memory_bytes: int = 256 * 1024 * 1024
    payload_owner: str = ""
    payload_token: str = ""
    payload_place: str = SHARED_MEMORY
    payload_port: int = 0
    payload_keys: tuple[str, ...] = ()

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


VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"


def hide_devices(spec: LaunchSpec, settings: RuntimeSettings) -> None:
    """Let libraries see only the GPU that this replica is meant for; only works before they are imported.

    `cuda:N` counts those that this process may see. What the stage's own environment says goes first.

    Raises:
        ConfigError: There is no such GPU among those that may be seen.
    """
    if VISIBLE_GPUS in spec.environment:
        return
    kind, _, number = settings.device.partition(":")
    if kind == "cpu":
        os.environ[VISIBLE_GPUS] = ""
    elif number:
        os.environ[VISIBLE_GPUS] = _nth_gpu(int(number), settings.device)


def _nth_gpu(number: int, device: str) -> str:
    seen = os.environ.get(VISIBLE_GPUS)
    if seen is None:
        return str(number)
    names = [name.strip() for name in seen.split(",") if name.strip()]
    if number >= len(names):
        raise ConfigError(f"device {device}: {VISIBLE_GPUS}={seen!r} shows only {len(names)} GPUs")
    return names[number]


def limit_memory(settings: RuntimeSettings) -> None:
    """Make allocations beyond the limit fail in this process, before they hurt others.

    Raises:
        ConfigError: The process may not have so much.
    """
    if settings.memory_bytes is None:
        return
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (settings.memory_bytes, hard))
    except ValueError as error:
        raise ConfigError(
            f"memory_bytes: {settings.memory_bytes} is above this process's own limit, {hard}"
        ) from error
