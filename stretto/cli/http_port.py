"""The server's TCP port: bound before anything is loaded, so that a mistake costs no waiting."""

from __future__ import annotations

import errno
import socket
from pathlib import Path

from stretto.errors import ConfigError


def bind(host: str, port: int, number: int = 1) -> list[socket.socket]:
    """Return listening sockets on one port; the kernel spreads connections over them.

    Only the first is bound as the only one of its port, so that a second server is refused; it allows
    the others afterwards, and nobody but this user.

    Raises:
        ConfigError: The address is in use or can't be bound; the text names the next step.
    """
    bound: list[socket.socket] = []
    try:
        bound.append(_bind(host, port, shared=False))
        if number > 1:
            bound[0].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        port = bound[0].getsockname()[1]
        while len(bound) < number:
            bound.append(_bind(host, port, shared=True))
        for listener in bound:
            listener.listen(2048)
    except OSError as error:
        _close(bound)
        raise ConfigError(_explain(error, host, port)) from error
    except OverflowError as error:
        _close(bound)
        raise ConfigError(f"server.port: {port} is not a TCP port; use 0 to 65535") from error
    return bound


def url_of(listener: socket.socket) -> str:
    """Return the address under which this machine reaches a listening socket."""
    host, port = listener.getsockname()[:2]
    shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host  # noqa: S104 - compared, not bound
    return f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"


def _bind(host: str, port: int, *, shared: bool) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
    except (OSError, OverflowError):
        listener.close()
        raise
    return listener


def _close(bound: list[socket.socket]) -> None:
    for listener in bound:
        listener.close()


def _explain(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        holder = _holder(port)
        who = f" by {holder}" if holder else ""
        return f"port {port} on {host} is in use{who}; stop it or choose another one: --port {port + 1}"
    if error.errno == errno.EACCES:
        return f"port {port} may not be bound by this user; choose one above 1023: --port 8000"
    return f"can't listen on {host} port {port}: {error.strerror or error}; try --host 127.0.0.1"


def _holder(port: int) -> str:
    """Return the process that listens on a TCP port, as `name (pid n)`; empty if it can't be seen."""
    inodes = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    if not inodes:
        return ""
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            if any(str(fd.readlink()) in inodes for fd in (process / "fd").iterdir()):
                return f"{(process / 'comm').read_text().strip()} (pid {process.name})"
        except OSError:
            continue  # it has ended, or belongs to somebody else
    return ""


def _listening_inodes(port: int) -> list[str]:
    found: list[str] = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            is_listening = fields[3] == "0A"
            if is_listening and int(fields[1].rpartition(":")[2], 16) == port:
                found.append(fields[9])
    return found
