"""TCP between hosts: addresses, and sockets that notice within seconds that the other host is gone."""

from __future__ import annotations

import asyncio
import re
import socket
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from stretto.errors import ConfigError
from stretto.transport.listening import BACKLOG

if TYPE_CHECKING:
    from collections.abc import Callable

    from stretto.transport.connection import Connection

SILENCE_S = 6.0
"""Default time after which a host that does not answer is taken for gone."""

CONNECT_TIMEOUT_S = 5.0

_ADDRESS = re.compile(r"(?:\[([0-9A-Fa-f:.%\w]+)\]|([^\s:\[\]/]+)):([0-9]{1,5})")
_PROBES = 3
_LAST_PORT = 65_535

InT = TypeVar("InT")


class Address(NamedTuple):
    """A host, by name or number, and a TCP port."""

    host: str
    port: int

    def __str__(self) -> str:
        """Return `host:port`, with brackets around an IPv6 number."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def address_of(text: str) -> Address:
    """Read `host:port`; an IPv6 number stands in brackets.

    Raises:
        ConfigError: It has another form.
    """
    found = _ADDRESS.fullmatch(text)
    if found is None or int(found[3]) > _LAST_PORT:
        raise ConfigError(
            f"{text!r} is no address; write HOST:PORT, for example 10.0.0.1:7070 or [fd00::1]:7070"
        )
    return Address(found[1] or found[2], int(found[3]))


def watch(sock: socket.socket, silence_s: float) -> None:
    """Have the kernel end a connection whose other end is silent for so long.

    Keepalive probes find it while nothing is sent, the user timeout while something waits for its
    acknowledgement. What a listening socket has is inherited by the connections that it accepts.
    """
    probe_s = max(1, round(silence_s / (_PROBES + 1)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, probe_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probe_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(silence_s * 1000))


def listen_tcp(address: Address, silence_s: float) -> socket.socket:
    """Return a non-blocking socket that listens on an address; port 0 takes a free one.

    Raises:
        OSError: It can't be bound.
    """
    family, *_, where = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        watch(listener, silence_s)
        listener.bind(where)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


async def connect_tcp(
    address: Address, factory: Callable[[], Connection[InT]], silence_s: float
) -> Connection[InT]:
    """Connect to an address.

    Raises:
        OSError: Nobody answers there.
    """
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            transport, connection = await loop.create_connection(factory, *address)
    except TimeoutError as error:
        raise OSError(f"no answer within {CONNECT_TIMEOUT_S:g} s") from error
    sock = transport.get_extra_info("socket")
    if sock is not None:
        watch(sock, silence_s)
    return connection
