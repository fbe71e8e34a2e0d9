"""A run's private directory, which the next start can tell from garbage.

The directory `stretto-<uid>-<run id>` holds plain files only. Its file `owner` is locked for as long
as the owner lives; the kernel releases the lock however the owner dies. It is made under another
name and gets its own with the lock already held, so whoever finds one without a held lock has found
a dead run.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from pathlib import Path
from typing import NamedTuple

from stretto.errors import InternalError

SHARED_MEMORY_BASE = "/dev/shm"  # noqa: S108 - the name is unguessable, the mode private, an existing one refused

_OWNER = "owner"
_RUN_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NAME = re.compile(rf"stretto-([0-9]+)-({_RUN_ID.pattern})")
_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class LivingRun(NamedTuple):
    """A run whose owner lives: its id, its directory, and the owner's process id."""

    run: str
    path: str
    pid: int


class RunDirectory:
    """A directory of mode 0700 owned by this process.

    Attributes:
        path: Where it is.
    """

    def __init__(self, path: str, lock_fd: int) -> None:
        self.path = path
        self._lock_fd: int | None = lock_fd

    @classmethod
    def create(cls, run_id: str, base: str = SHARED_MEMORY_BASE) -> RunDirectory:
        """Create and own `<base>/stretto-<uid>-<run id>`.

        Raises:
            OSError: `base` is missing, full or not writable, or the directory exists.
        """
        if _RUN_ID.fullmatch(run_id) is None:
            raise InternalError(f"The run id {run_id!r} is not of the form {_RUN_ID.pattern}.")
        path = str(Path(base) / f"stretto-{os.getuid()}-{run_id}")
        unfinished = f"{path}.new"
        Path(unfinished).mkdir(mode=0o700)
        lock_fd: int | None = None
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            lock_fd = os.open(f"{unfinished}/{_OWNER}", flags, 0o600)
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(lock_fd, b"%d\n" % os.getpid())
            Path(unfinished).rename(path)
        except OSError:
            if lock_fd is not None:
                os.close(lock_fd)
            _remove(unfinished)
            raise
        return cls(path, lock_fd)

    def close(self) -> None:
        """Remove the directory with all that is in it, and give up the lock. May be called twice."""
        if self._lock_fd is None:
            return
        _remove(self.path)
        os.close(self._lock_fd)
        self._lock_fd = None

    @staticmethod
    def living(base: str = SHARED_MEMORY_BASE) -> tuple[LivingRun, ...]:
        """Return this user's runs in `base` whose owners live, by name."""
        found: list[LivingRun] = []
        uid = os.getuid()
        for path in sorted(Path(base).iterdir()):
            match = _NAME.fullmatch(path.name)
            if match is None or match[1] != str(uid):
                continue
            pid = _owner_if_living(path, uid)
            if pid is not None:
                found.append(LivingRun(match[2], str(path), pid))
        return tuple(found)

    @staticmethod
    def reclaim(base: str = SHARED_MEMORY_BASE) -> tuple[str, ...]:
        """Remove what dead runs of this user left in `base`; return the paths removed.

        Directories of living runs, of other users, and whatever has another name are not touched.
        """
        removed: list[str] = []
        uid = os.getuid()
        for path in sorted(Path(base).iterdir()):
            match = _NAME.fullmatch(path.name)
            if match is not None and match[1] == str(uid) and _remove_if_dead(str(path), uid):
                removed.append(str(path))
        return tuple(removed)


def _owner_if_living(path: Path, uid: int) -> int | None:
    """Return the process that owns a run directory; `None` if nobody does, or it is another user's."""
    try:
        if path.lstat().st_uid != uid:
            return None
        with (path / _OWNER).open("rb") as owner:
            try:
                fcntl.flock(owner, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return int(owner.read(20) or b"0")
    except (OSError, ValueError):
        pass
    return None


def _remove_if_dead(path: str, uid: int) -> bool:
    """Remove a run directory unless it is another user's or its owner lives; return whether it is gone."""
    with contextlib.ExitStack() as cleanup:
        try:
            directory = os.open(path, _OPEN_DIRECTORY)
            cleanup.callback(os.close, directory)
            if os.fstat(directory).st_uid != uid:
                return False
            flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            lock_fd = os.open(_OWNER, flags, dir_fd=directory)
            cleanup.callback(os.close, lock_fd)
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            pass  # the owner file goes last: an earlier removal did not get to its end
        except OSError:
            return False
        return _remove(path)


def _remove(path: str) -> bool:
    """Remove a flat directory, its owner file last; return whether it is gone."""
    try:
        directory = os.open(path, _OPEN_DIRECTORY)
    except OSError:
        return False
    try:
        for name in sorted(os.listdir(directory), key=_OWNER.__eq__):  # noqa: PTH208 - by descriptor
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=directory)
    finally:
        os.close(directory)
    try:
        Path(path).rmdir()
    except (
        OSError
    ):  # a process of the run is still writing; the next reclaim finds it without an owner
        return False
    return True
