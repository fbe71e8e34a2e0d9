"""Payload files between hosts: each host serves its own, and whoever needs one pulls it.

    server                                  client
    challenge ────────────────────────────►
           ◄──────────── challenge, proof           both know the run's payload token
    proof ────────────────────────────────►
           ◄──────────── key, size                  any number of times
    found or not, then the bytes ─────────►

Everything here blocks and runs in threads: a server's are its own, a client calls from where it computes.
All fields have a fixed or bounded size. This module must not know what is in a payload.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING

from stretto.errors import ConfigError, PayloadLost
from stretto.messages import proofs
from stretto.transport.payload_store import is_key
from stretto.transport.tcp import Address, address_of, listen_tcp

if TYPE_CHECKING:
    from stretto.types import PayloadRef

PULL_TIMEOUT_S = 10.0
"""How long a pull may take as a whole."""

IDLE_TIMEOUT_S = 60.0
"""How long a server keeps a connection on which nobody asks."""

MAX_READERS = 64
"""Connections of one server; beyond them it hangs up at once."""

MAX_IDLE = 4
"""Connections to one store that a client keeps."""

MAX_PULLED_BYTES = 1024**3

_PLACE = "tcp:"
_PROOF_BYTES = 32
_REQUEST = struct.Struct("<QB")
_FOUND, _MISSING = b"\x01", b"\x00"
_PIECE_BYTES = 1024 * 1024


def payload_token(join_token: str, run: str) -> str:
    """Return what gives access to a run's payload files; it says nothing about the join token."""
    return proofs.proof(join_token, "payloads", run).hex()


def place_of(address: Address) -> str:
    """Return the place of payloads that are served at an address."""
    return f"{_PLACE}{address}"


def is_far(place: str) -> bool:
    """Say whether payloads of this place are pulled from a server."""
    return place.startswith(_PLACE)


class PayloadServer:
    """Serves a directory's payload files, read-only, to who knows the token.

    Args:
        host: The address to bind; the port is a free one.
        silence_s: After how much silence a reader's host is taken for gone.

    Attributes:
        address: Where it listens.

    Raises:
        OSError: The address can't be bound.
    """

    def __init__(self, host: str, silence_s: float) -> None:
        self._listener = listen_tcp(Address(host, 0), silence_s)
        self._listener.setblocking(True)  # noqa: FBT003 - the standard library's name
        self.address = Address(*self._listener.getsockname()[:2])
        self._token = ""
        self._directory: int | None = None
        self._lock = threading.Lock()
        self._readers: dict[socket.socket, threading.Thread] = {}
        self._is_closed = False
        self._acceptor = threading.Thread(
            target=self._accept, name="stretto-payload-server", daemon=True
        )
        self._acceptor.start()

    def serve(self, directory: str | None, token: str) -> None:
        """Serve another directory, under another token, from now on."""
        opened = None if directory is None else os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        with self._lock:
            former, self._directory, self._token = self._directory, opened, token
        if former is not None:
            os.close(former)

    def close(self) -> None:
        """Hang up on everybody and end the threads. May be called twice."""
        with self._lock:
            self._is_closed = True
            readers = dict(self._readers)
        for sock in (self._listener, *readers):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in (self._acceptor, *readers.values()):
            thread.join()
        self.serve(None, "")

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._is_closed:
                    return
                time.sleep(0.1)  # too many open files, for example: others must end first
                continue
            with self._lock:
                is_welcome = not self._is_closed and len(self._readers) < MAX_READERS
                if is_welcome:
                    thread = threading.Thread(target=self._hold, args=(sock,), daemon=True)
                    self._readers[sock] = thread
                    thread.start()
            if not is_welcome:
                sock.close()

    def _hold(self, sock: socket.socket) -> None:
        try:
            sock.settimeout(PULL_TIMEOUT_S)
            if self._greet(sock):
                while self._answer(sock):
                    pass
        except OSError:
            pass  # the reader is gone or too slow; it has noticed
        finally:
            with self._lock:
                del self._readers[sock]
            sock.close()

    def _greet(self, sock: socket.socket) -> bool:
        """Exchange proofs; return whether the reader's was right."""
        ours = proofs.new_challenge()
        sock.sendall(ours)
        deadline = time.monotonic() + PULL_TIMEOUT_S
        said = _received(sock, proofs.CHALLENGE_BYTES + _PROOF_BYTES, deadline)
        sock.settimeout(PULL_TIMEOUT_S)
        theirs, given = bytes(said[: proofs.CHALLENGE_BYTES]), bytes(said[-_PROOF_BYTES:])
        token = self._token
        if not token or not proofs.is_proof(given, token, "pull", ours, theirs):
            return False
        sock.sendall(proofs.proof(token, "serve", ours, theirs))
        return True

    def _answer(self, sock: socket.socket) -> bool:
        """Answer one request; return whether another may follow."""
        sock.settimeout(IDLE_TIMEOUT_S)
        size, length = _REQUEST.unpack(_received(sock, _REQUEST.size))
        sock.settimeout(PULL_TIMEOUT_S)
        key = _received(sock, length).decode("ascii", "replace")
        fd = self._opened(key, size)
        if fd is None:
            sock.sendall(_MISSING)
            return True
        with os.fdopen(fd, "rb") as file:
            sock.sendall(_FOUND)
            return sock.sendfile(file, 0, size) == size

    def _opened(self, key: str, size: int) -> int | None:
        """Return a payload file of at least this size; `None` if there is none."""
        if not is_key(key) or size <= 0:
            return None
        with self._lock:
            if self._directory is None:
                return None
            try:
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
                fd = os.open(key, flags, dir_fd=self._directory)
            except OSError:
                return None
        if os.fstat(fd).st_size < size:
            os.close(fd)
            return None
        return fd


class PayloadPuller:
    """Pulls payloads from the stores of other hosts. May be used from several threads.

    Args:
        token: See `payload_token`.
        timeout_s: How long a pull may take.
    """

    def __init__(self, token: str, timeout_s: float = PULL_TIMEOUT_S) -> None:
        self._token = token
        self._timeout_s = timeout_s
        self._idle: dict[str, list[socket.socket]] = {}
        self._is_closed = False

    def pull(self, ref: PayloadRef) -> memoryview:
        """Return a payload's bytes.

        Raises:
            PayloadLost: They can't be had in time.
        """
        if not 0 < ref.size_bytes <= MAX_PULLED_BYTES or not is_key(ref.key):
            raise PayloadLost(f"{ref} does not name a payload that can be pulled.")
        deadline = time.monotonic() + self._timeout_s
        try:
            while (sock := self._taken(ref.place)) is not None:
                with contextlib.suppress(OSError):  # it was idle for too long: take another one
                    return self._pulled(sock, ref, deadline)
            return self._pulled(self._connected(ref.place, deadline), ref, deadline)
        except OSError as error:
            reason = error.strerror or str(error) or type(error).__name__
            raise PayloadLost(
                f"The payload {ref.key} can't be pulled from {ref.place}: {reason}."
            ) from error

    def close(self) -> None:
        """Close the connections. May be called twice."""
        self._is_closed = True
        for place in list(self._idle):
            while (sock := self._taken(place)) is not None:
                sock.close()

    def _taken(self, place: str) -> socket.socket | None:
        try:
            return self._idle[place].pop()
        except (KeyError, IndexError):
            return None

    def _pulled(self, sock: socket.socket, ref: PayloadRef, deadline: float) -> memoryview:
        is_sound = False
        try:
            key = ref.key.encode()
            _give_until(sock, deadline)
            sock.sendall(_REQUEST.pack(ref.size_bytes, len(key)) + key)
            if bytes(_received(sock, 1, deadline)) != _FOUND:
                is_sound = True
                raise PayloadLost(f"The payload {ref.key} is not at {ref.place} any more.")
            data = _received(sock, ref.size_bytes, deadline)
            is_sound = True
            return memoryview(data).toreadonly()
        finally:
            idle = self._idle.setdefault(ref.place, [])
            if is_sound and not self._is_closed and len(idle) < MAX_IDLE:
                idle.append(sock)
            else:
                sock.close()

    def _connected(self, place: str, deadline: float) -> socket.socket:
        try:
            address = address_of(place.removeprefix(_PLACE))
        except ConfigError as error:
            raise OSError(error.detail) from error
        sock = socket.create_connection(address, _left(deadline))
        try:
            self._greet(sock, deadline)
        except BaseException:
            sock.close()
            raise
        return sock

    def _greet(self, sock: socket.socket, deadline: float) -> None:
        """Exchange proofs.

        Raises:
            OSError: The server's is wrong, or it is too slow.
        """
        theirs = bytes(_received(sock, proofs.CHALLENGE_BYTES, deadline))
        ours = proofs.new_challenge()
        sock.sendall(ours + proofs.proof(self._token, "pull", theirs, ours))
        given = bytes(_received(sock, _PROOF_BYTES, deadline))
        if not proofs.is_proof(given, self._token, "serve", theirs, ours):
            raise OSError("it does not know this run's token")


def _left(deadline: float) -> float:
    """Return how many seconds are left.

    Raises:
        TimeoutError: None.
    """
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("it took too long")
    return left


def _give_until(sock: socket.socket, deadline: float) -> None:
    sock.settimeout(_left(deadline))


def _received(sock: socket.socket, size: int, deadline: float | None = None) -> bytearray:
    """Receive exactly so many bytes.

    Raises:
        OSError: The other end is gone or too slow.
    """
    data = bytearray(size)
    view = memoryview(data)
    at = 0
    while at < size:
        if deadline is not None:
            _give_until(sock, deadline)
        got = sock.recv_into(view[at : at + _PIECE_BYTES])
        if not got:
            raise ConnectionResetError("the other end has hung up")
        at += got
    view.release()
    return data
