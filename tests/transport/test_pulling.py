"""Payload files between hosts: who may read what, and how a pull fails."""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from stretto.errors import PayloadLost
from stretto.messages import proofs
from stretto.transport import PayloadReader, PayloadWriter, decode, encode
from stretto.transport.pulling import (
    MAX_READERS,
    PayloadPuller,
    PayloadServer,
    payload_token,
    place_of,
)
from stretto.transport.tcp import Address
from stretto.types import SHARED_MEMORY, PayloadRef

if TYPE_CHECKING:
    from collections.abc import Generator

TOKEN = payload_token("a token for tests only", "run")
VALUES = {"audio": b"\x01\x02" * 100_000}


class Store:
    """A host with one payload and a server."""

    def __init__(self, directory: Path) -> None:
        self.directory = str(directory)
        self.server = PayloadServer("127.0.0.1", 5.0)
        self.server.serve(self.directory, TOKEN)
        self.place = place_of(self.server.address)
        self.writer = PayloadWriter(self.directory, "far", 1 << 24, place=self.place)
        self.ref = self.writer.put(encode(VALUES))[0]


@pytest.fixture
def store(tmp_path: Path) -> Generator[Store]:
    """Provide a host that serves one payload."""
    found = Store(tmp_path)
    yield found
    found.writer.close()
    found.server.close()
    found.server.close()


@contextmanager
def pulling(token: str = TOKEN, timeout_s: float = 5.0) -> Generator[PayloadPuller]:
    """Provide a puller."""
    puller = PayloadPuller(token, timeout_s)
    try:
        yield puller
    finally:
        puller.close()
        puller.close()


def test_a_reader_pulls_what_is_elsewhere_and_maps_what_is_here(
    store: Store, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """By the place in the reference; what was decoded stays valid when the file is gone."""
    here = str(tmp_path_factory.mktemp("here"))
    writer = PayloadWriter(here, "near", 1 << 24)
    near = writer.put(encode({"x": b"y" * 100_000}))[0]
    with pulling() as puller:
        reader = PayloadReader(here, puller=puller)
        mapped = reader.open(store.ref)
        values = decode(mapped.view)
        assert mapped.close()
        store.writer.release(store.ref.key)
        store.writer.close()
        assert values == VALUES
        assert decode(reader.open(near).view) == {"x": b"y" * 100_000}
        reader.close()
    writer.close()


def test_another_hosts_name_for_a_place_leads_there(store: Store, tmp_path: Path) -> None:
    """The orchestrator's own store has a short name on its host, and an address elsewhere."""
    with pulling() as puller:
        reader = PayloadReader(
            str(tmp_path), "tcp:here:1", puller, elsewhere={SHARED_MEMORY: store.place}
        )
        assert decode(reader.open(store.ref._replace(place=SHARED_MEMORY)).view) == VALUES
        reader.close()


def test_a_connection_serves_many_pulls_and_is_replaced_when_it_has_ended(store: Store) -> None:
    """A server that has hung up meanwhile costs nothing but a new connection."""
    with pulling() as puller:
        for _ in range(3):
            assert decode(puller.pull(store.ref)) == VALUES
        port = store.server.address.port
        store.server.close()
        with pytest.raises(PayloadLost, match="Connection refused"):
            puller.pull(store.ref)
        assert port == store.server.address.port


def test_several_threads_pull_at_once(store: Store) -> None:
    """Each has a connection of its own."""
    with pulling() as puller:
        got: list[bool] = []
        threads = [
            threading.Thread(target=lambda: got.append(decode(puller.pull(store.ref)) == VALUES))
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert got == [True] * 8


@pytest.mark.parametrize(
    "key",
    ["owner", "../far.0", "/etc/passwd", "far.0/..", ".", "far", "x" * 200, "far.0\0", "far.9"],
)
def test_nothing_but_payload_files_is_served(store: Store, key: str) -> None:
    """Neither the owner file, nor what lies elsewhere, nor a link; the client asks for none of it either."""
    owner = Path(store.directory, "owner")
    owner.write_text("secret")
    Path(store.directory, "far.9").symlink_to(owner)
    assert ask(store, key) == b"\x00"
    with pulling() as puller, pytest.raises(PayloadLost):
        puller.pull(PayloadRef(store.place, key, 1))


def test_a_payload_that_is_shorter_than_announced_is_lost(store: Store) -> None:
    """Nothing of it is delivered."""
    with pulling() as puller, pytest.raises(PayloadLost, match="not at"):
        puller.pull(store.ref._replace(size_bytes=1 << 28))


def ask(store: Store, key: str) -> bytes:
    """Return the first byte of the answer to a request that no client of ours would make."""
    with socket.create_connection(store.server.address) as sock:
        theirs, ours = sock.recv(32), proofs.new_challenge()
        sock.sendall(ours + proofs.proof(TOKEN, "pull", theirs, ours))
        assert proofs.is_proof(sock.recv(32), TOKEN, "serve", theirs, ours)
        sock.sendall(struct.pack("<QB", 1, len(key)) + key.encode())
        return sock.recv(1)


def test_who_does_not_know_the_token_gets_nothing(store: Store) -> None:
    """The server hangs up without an answer."""
    with (
        pulling(payload_token("another token", "run")) as puller,
        pytest.raises(PayloadLost, match="hung up"),
    ):
        puller.pull(store.ref)


def test_a_server_that_does_not_know_the_token_is_not_believed() -> None:
    """Whoever listens there now is not who the reference meant."""
    with socket.create_server(("127.0.0.1", 0)) as impostor:

        def answer() -> None:
            sock, _ = impostor.accept()
            with sock:
                sock.sendall(b"c" * 32)
                sock.recv(64)
                sock.sendall(b"p" * 32 + b"\x01" + b"x" * 100)

        thread = threading.Thread(target=answer)
        thread.start()
        place = place_of(Address(*impostor.getsockname()[:2]))
        with pulling() as puller, pytest.raises(PayloadLost, match="does not know"):
            puller.pull(PayloadRef(place, "far.0", 100))
        thread.join()


def test_a_silent_server_costs_no_more_than_the_deadline() -> None:
    """A pull has one deadline, however little comes."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = place_of(Address(*silent.getsockname()[:2]))
        with pulling(timeout_s=0.1) as puller, pytest.raises(PayloadLost, match="timed out"):
            puller.pull(PayloadRef(place, "far.0", 100))


def test_a_server_has_room_for_so_many_readers(store: Store) -> None:
    """The next one is sent away at once; the others go on."""
    with pulling() as puller:
        assert decode(puller.pull(store.ref)) == VALUES
        others = [socket.create_connection(store.server.address) for _ in range(MAX_READERS - 1)]
        for each in others:
            assert len(each.recv(32)) == 32
        with socket.create_connection(store.server.address) as late:
            assert late.recv(1) == b""
        assert decode(puller.pull(store.ref)) == VALUES
        for each in others:
            each.close()


def test_a_former_epochs_token_opens_nothing(store: Store, tmp_path: Path) -> None:
    """A directory that was replaced is not served any more."""
    new = tmp_path / "new"
    new.mkdir()
    store.server.serve(str(new), payload_token("a token for tests only", "next"))
    with pulling() as puller, pytest.raises(PayloadLost):
        puller.pull(store.ref)
