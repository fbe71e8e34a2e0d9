"""What the processes of a server are told when they start: one line of JSON on standard input.

Replicas are told a `stretto.types.LaunchSpec`.
"""

from __future__ import annotations

import msgspec

from stretto.config.settings import Settings
from stretto.types import RunId


class OrchestratorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The line that an orchestrator process reads.

    Attributes:
        run: The run that it serves.
        epoch: Which life of the orchestrator this is, from 1.
        channel_fd: The inherited socket that listens for API processes, shared by all epochs.
        run_directory: Where it makes the socket for its replicas.
        shared_memory_dir: Where payload files of this epoch lie; `None` sends all payloads inline.
        settings: The deployment.
        join_fd: The inherited socket at which replicas from other hosts join; `None` lets none join.
        payload_port: Where they pull payload files of this host.
    """

    run: RunId
    epoch: int
    channel_fd: int
    run_directory: str
    shared_memory_dir: str | None
    settings: Settings
    join_fd: int | None = None
    payload_port: int = 0


class ApiSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The line that an API process reads.

    Attributes:
        run: The run that it serves.
        name: Which of the API processes it is, for logs.
        channel_path: Where the orchestrator listens.
        http_fd: The inherited socket that listens for HTTP clients.
        ready_fd: An inherited pipe; one byte on it says that requests are served.
        settings: The deployment.
    """

    run: RunId
    channel_path: str
    http_fd: int
    ready_fd: int
    settings: Settings
    name: str = "api"
