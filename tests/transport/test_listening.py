"""Listening sockets in a private directory."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from stretto.errors import ConfigError
from stretto.transport import RunDirectory, listen_unix, private_directory, socket_base

ACCEPT = """
import socket, sys
listener = socket.socket(fileno=int(sys.argv[1]))
listener.setblocking(True)
connection, _ = listener.accept()
connection.sendall(b"from the child")
"""


def test_a_listening_socket_is_private_from_the_start(socket_path: str) -> None:
    """Its file has mode 0600 whatever the process's mask, and it accepts connections."""
    mask = os.umask(0)
    try:
        listener = listen_unix(socket_path)
    finally:
        os.umask(mask)

    with listener, socket.socket(socket.AF_UNIX) as client:
        client.connect(socket_path)
        assert Path(socket_path).stat().st_mode & 0o777 == 0o600
        assert not listener.getblocking()


def test_a_child_takes_over_the_listening_socket(socket_path: str) -> None:
    """Handed over by descriptor, it serves connections that were made before the child started."""
    with listen_unix(socket_path) as listener, socket.socket(socket.AF_UNIX) as client:
        client.settimeout(10)
        client.connect(socket_path)
        number = listener.fileno()
        subprocess.run(
            [sys.executable, "-c", ACCEPT, str(number)], pass_fds=[number], check=True, timeout=30
        )

        assert client.recv(100) == b"from the child"


def test_a_path_too_long_for_a_socket_is_a_configuration_error(tmp_path: Path) -> None:
    """The error gives the limit and the setting to change; the longest path allowed works."""
    folder = tmp_path / "d"
    folder.mkdir()
    room = 107 - len(os.fsencode(str(folder))) - 1

    with pytest.raises(ConfigError, match=r"108 bytes; Unix sockets allow 107.*XDG_RUNTIME_DIR"):
        listen_unix(str(folder / ("s" * (room + 1))))
    listen_unix(str(folder / ("s" * room))).close()


def test_a_path_in_use_is_refused(socket_path: str) -> None:
    """Two listeners can't share a path, and the refused one leaves no descriptor."""
    with listen_unix(socket_path), pytest.raises(OSError, match="in use"):
        listen_unix(socket_path)


def test_sockets_live_in_the_user_s_runtime_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`XDG_RUNTIME_DIR` is used if it is this user's, and `/tmp` otherwise."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    run = private_directory("run-1")
    inside = Path(run.path).parent
    run.close()
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/nonexistent")
    absent = socket_base()
    monkeypatch.setenv("XDG_RUNTIME_DIR", "relative")
    relative = socket_base()
    monkeypatch.delenv("XDG_RUNTIME_DIR")

    assert inside == tmp_path
    assert (absent, relative, socket_base()) == ("/tmp", "/tmp", "/tmp")


def test_sockets_of_a_dead_run_are_reclaimed(tmp_path: Path) -> None:
    """A run directory with a socket in it is removed like any other."""
    path = tmp_path / f"stretto-{os.getuid()}-run-1"
    path.mkdir()
    listen_unix(str(path / "s")).close()

    assert RunDirectory.reclaim(str(tmp_path)) == (str(path),)
