"""Where processes of one host find each other: Unix sockets in a private directory."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from stretto.errors import ConfigError
from stretto.transport.run_directory import RunDirectory

BACKLOG = 128

_MAX_PATH_BYTES = 107
"""`sun_path` has 108 bytes on Linux, of which the last is zero."""


def socket_base() -> str:
    """Return the folder for sockets' run directories: `$XDG_RUNTIME_DIR` if it is ours, or `/tmp`."""
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    is_ours = (
        base.startswith("/") and Path(base).is_dir() and Path(base).stat().st_uid == os.getuid()
    )
    return base if is_ours and os.access(base, os.W_OK | os.X_OK) else "/tmp"  # noqa: S108 - see RunDirectory


def private_directory(run_id: str) -> RunDirectory:
    """Create the run's directory for sockets; `RunDirectory.reclaim(socket_base())` finds dead ones."""
    return RunDirectory.create(run_id, socket_base())


def longest_socket_path(base: str) -> int:
    """Return how many bytes a run's socket paths leave unused under a folder; negative if too long."""
    longest = f"{base}/stretto-{os.getuid()}-{'0' * 12}/replicas-1000.sock"
    return _MAX_PATH_BYTES - len(os.fsencode(longest))


def listen_unix(path: str) -> socket.socket:
    """Return a non-blocking socket that listens on `path`, which only this user may connect to.

    A child process takes it over by descriptor: `pass_fds=[listener.fileno()]` when starting it, and
    `socket.socket(fileno=...)` in the child. Connections made meanwhile wait in the backlog.

    Raises:
        OSError: The path can't be bound, for example because it exists.
        ConfigError: The path is too long for a Unix socket.
    """
    length = len(os.fsencode(path))
    if length > _MAX_PATH_BYTES:
        raise ConfigError(
            f"The socket path {path!r} has {length} bytes; Unix sockets allow {_MAX_PATH_BYTES}. "
            f"Set XDG_RUNTIME_DIR to a folder with a shorter path."
        )
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        os.fchmod(listener.fileno(), 0o600)  # before bind: the path never exists with a wider mode
        listener.bind(path)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
