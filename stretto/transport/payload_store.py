"""Where payloads lie between the process that makes them and the processes that read them.

Small ones travel in the frame. A large one is a file in the run's shared-memory directory: the producer
writes it and owns it, consumers map it and never remove it, the router counts who still holds it. When
the last holder is done, the producer may overwrite it: fresh pages cost many times what the copy
costs, so released files are kept, still mapped, for the next payloads.

Without a directory, or without room in it, the same bytes go inline; nobody else sees a difference.
This module must not know what is in a payload, nor who holds it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from stretto.errors import InternalError, PayloadLost
from stretto.types import INLINE, SHARED_MEMORY, PayloadRef

if TYPE_CHECKING:
    from collections.abc import Container, Mapping

    from stretto.transport.codec import EncodedPayload

INLINE_LIMIT_BYTES = 64 * 1024
"""Default size up to which a payload travels in the frame."""

SPARE_BYTES = 8 * 1024 * 1024
"""Default amount of released files that a writer keeps for reuse; part of its budget."""

MAX_FILES = 512
"""Files of one writer, spare ones included: a mapping holds a descriptor, and 1,024 is a usual limit."""

_GRANULE = 64 * 1024
_OWNER = re.compile(r"[A-Za-z0-9_-]{1,128}")
_KEY = re.compile(rf"{_OWNER.pattern}\.[0-9]{{1,18}}")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadWriterStatistics:
    """What a writer holds, and has done since it was made.

    Attributes:
        held: Files that somebody may still read.
        spare: Files kept for reuse.
        used_bytes: Shared memory taken by both.
        inline_total: Payloads sent inline because they are small, or because there is no directory.
        shared_total: Payloads put in shared memory.
        refused_total: Large payloads sent inline because the budget was exhausted.
        failed_total: Large payloads sent inline because the system refused the file (no space, …).
        unknown_releases_total: Releases of keys that were not held.
    """

    held: int
    spare: int
    used_bytes: int
    inline_total: int
    shared_total: int
    refused_total: int
    failed_total: int
    unknown_releases_total: int


class _File:
    """A payload file of this writer, mapped for writing."""

    __slots__ = ("key", "mapping", "size_bytes")

    def __init__(self, key: str, mapping: mmap.mmap, size_bytes: int) -> None:
        self.key = key
        self.mapping = mapping
        self.size_bytes = size_bytes


class PayloadWriter:
    """A producer's side of the store.

    `put` may run in one thread while `release` runs in another; `close` when neither runs any more.

    Args:
        directory: The run's shared-memory directory, or `None` to send everything inline.
        owner: Prefix of all keys; must be unique in the run.
        budget_bytes: Shared memory that this writer may take.
        inline_limit: Payloads up to this size travel inline.
        spare_bytes: How much of the budget may stay in released files.
        place: By which the directory's payloads are known in the run.

    Attributes:
        place: As given.
    """

    def __init__(
        self,
        directory: str | None,
        owner: str,
        budget_bytes: int,
        inline_limit: int = INLINE_LIMIT_BYTES,
        spare_bytes: int = SPARE_BYTES,
        place: str = SHARED_MEMORY,
    ) -> None:
        if _OWNER.fullmatch(owner) is None:
            raise InternalError(f"The payload owner {owner!r} is not of the form {_OWNER.pattern}.")
        self.place = place
        self._owner = owner
        self._budget_bytes = budget_bytes
        self._inline_limit = inline_limit
        self._spare_limit_bytes = spare_bytes
        self._directory = None if directory is None else os.open(directory, _DIRECTORY)
        self._lock = threading.Lock()
        self._held: dict[str, _File] = {}
        self._spare: list[_File] = []
        self._spare_bytes = 0
        self._files = 0  # held, spare and being written
        self._used_bytes = 0
        self._next_number = 0
        self._inline = 0
        self._shared = 0
        self._refused = 0
        self._failed = 0
        self._unknown_releases = 0

    def put(self, encoded: EncodedPayload) -> tuple[PayloadRef, bytes | None]:
        """Store a payload; return its reference, and its bytes if they go inline."""
        size = encoded.size_bytes
        if size <= self._inline_limit or self._directory is None:
            self._inline += 1
        elif (key := self._write(encoded, self._directory)) is not None:
            return PayloadRef(self.place, key, size), None
        return PayloadRef(INLINE, "", size), encoded.join()

    def release(self, key: str) -> bool:
        """Take note that no process holds a view of this payload any more; return whether it was held.

        Its bytes may be overwritten from now on.
        """
        with self._lock:
            file = self._held.pop(key, None)
            if file is None:
                self._unknown_releases += 1
                return False
            if self._spare_bytes + file.size_bytes <= self._spare_limit_bytes:
                self._spare.append(file)
                self._spare_bytes += file.size_bytes
            else:
                self._discard(file)
            return True

    def keep_only(self, keys: Container[str]) -> None:
        """Release all payloads but these: nobody else remembers them."""
        with self._lock:
            forgotten = [key for key in self._held if key not in keys]
        for key in forgotten:
            self.release(key)

    def close(self) -> None:
        """Remove every file of this writer, also those still held. May be called twice.

        A process that ends while others may hold its payloads leaves out this call: its files stay
        readable, and the orchestrator removes them with `unlink`.
        """
        with self._lock:
            for file in (*self._held.values(), *self._spare):
                self._discard(file)
            self._held.clear()
            self._spare.clear()
            self._spare_bytes = 0
            if self._directory is not None:
                os.close(self._directory)
                self._directory = None

    def statistics(self) -> PayloadWriterStatistics:
        """Return the counters as they are now."""
        with self._lock:
            return PayloadWriterStatistics(
                held=len(self._held),
                spare=len(self._spare),
                used_bytes=self._used_bytes,
                inline_total=self._inline,
                shared_total=self._shared,
                refused_total=self._refused,
                failed_total=self._failed,
                unknown_releases_total=self._unknown_releases,
            )

    def _write(self, encoded: EncodedPayload, directory: int) -> str | None:
        """Write a payload to a spare or a new file; return its key, or `None` if there is no room."""
        size = -(-encoded.size_bytes // _GRANULE) * _GRANULE
        with self._lock:
            key = f"{self._owner}.{self._next_number}"
            self._next_number += 1
            file = self._take_spare(size)
            if file is None and not self._reserve(size):
                self._refused += 1
                return None
        try:
            if file is None:
                file = _File(key, _create(directory, key, size), size)
            else:
                os.rename(file.key, key, src_dir_fd=directory, dst_dir_fd=directory)
                file.key = key
        except OSError:
            with self._lock:
                self._failed += 1
                if file is None:
                    self._give_back(size)
                else:
                    self._discard(file)
            return None
        encoded.write_into(file.mapping)
        with self._lock:
            self._held[key] = file
            self._shared += 1
        return key

    def _take_spare(self, size: int) -> _File | None:
        """Take the smallest spare file that fits and does not waste more than half of itself."""
        fitting = [file for file in self._spare if size <= file.size_bytes <= 2 * size]
        if not fitting:
            return None
        file = min(fitting, key=lambda file: file.size_bytes)
        self._spare.remove(file)
        self._spare_bytes -= file.size_bytes
        return file

    def _reserve(self, size: int) -> bool:
        """Count a new file against the budget, at the cost of spare ones if need be."""
        while self._spare and not self._has_room(size):
            file = self._spare.pop(0)
            self._spare_bytes -= file.size_bytes
            self._discard(file)
        if not self._has_room(size):
            return False
        self._files += 1
        self._used_bytes += size
        return True

    def _has_room(self, size: int) -> bool:
        return self._used_bytes + size <= self._budget_bytes and self._files < MAX_FILES

    def _discard(self, file: _File) -> None:
        file.mapping.close()
        self._give_back(file.size_bytes)
        if self._directory is not None:
            with contextlib.suppress(OSError):  # the run's directory may be gone already
                os.unlink(file.key, dir_fd=self._directory)

    def _give_back(self, size: int) -> None:
        self._files -= 1
        self._used_bytes -= size


class Mapped:
    """A payload file mapped for reading.

    Attributes:
        view: The payload's bytes, read-only. Everything decoded from it keeps the mapping alive.
    """

    __slots__ = ("_mapping", "view")

    def __init__(self, mapping: mmap.mmap, size_bytes: int) -> None:
        self._mapping = mapping
        self.view = memoryview(mapping)[:size_bytes]

    def close(self) -> bool:
        """Unmap the file; return False, and keep it, as long as views of it are alive.

        `view` itself must not be used any more. May be called again until it returns True.
        """
        try:
            self.view.release()
            self._mapping.close()
        except BufferError:
            return False
        return True


class Pulled(Mapped):
    """A payload that was copied from another host; what is decoded from it keeps the copy alive."""

    __slots__ = ()

    def __init__(self, view: memoryview) -> None:
        self.view = view

    def close(self) -> bool:
        """Return True: the file is not needed any more."""
        return True


class Puller(Protocol):
    """Fetches payloads of other places; `pulling.PayloadPuller` is one."""

    def pull(self, ref: PayloadRef) -> memoryview:
        """Return a payload's bytes, or raise `PayloadLost`."""
        ...


class PayloadReader:
    """A consumer's side of the store.

    Args:
        directory: The directory of this host's payload files.
        place: By which they are known in the run.
        puller: Fetches those of other places, if there are any.
        elsewhere: What other places are called there, where that differs.

    Attributes:
        place: As given.
        puller: As given.
        elsewhere: As given.
    """

    def __init__(
        self,
        directory: str,
        place: str = SHARED_MEMORY,
        puller: Puller | None = None,
        elsewhere: Mapping[str, str] | None = None,
    ) -> None:
        self._directory: int | None = os.open(directory, _DIRECTORY)
        self.place = place
        self.puller = puller
        self.elsewhere: Mapping[str, str] = elsewhere or {}

    def open(self, ref: PayloadRef) -> Mapped:
        """Map a payload of this host, or pull one from another host; that may block for seconds.

        Raises:
            PayloadLost: There is no such payload any more, or it is shorter than announced.
        """
        if ref.place != self.place and self.puller is not None:
            there = self.elsewhere.get(ref.place, ref.place)
            return Pulled(self.puller.pull(ref._replace(place=there)))
        if self._directory is None or ref.place != self.place or not is_key(ref.key):
            raise PayloadLost(f"{ref} does not name a payload file that this process can read.")
        try:
            fd = os.open(
                ref.key, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._directory
            )
        except OSError as error:
            raise PayloadLost(f"The payload {ref.key} can't be read: {error.strerror}.") from error
        try:
            size = os.fstat(fd).st_size
            if not 0 < ref.size_bytes <= size:
                raise PayloadLost(
                    f"The payload {ref.key} has {size} bytes, {ref.size_bytes} were announced."
                )
            mapping = mmap.mmap(fd, ref.size_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        except OSError as error:
            raise PayloadLost(
                f"The payload {ref.key} can't be mapped: {error.strerror}."
            ) from error
        finally:
            os.close(fd)
        return Mapped(mapping, ref.size_bytes)

    def close(self) -> None:
        """Give up the directory; mappings stay. May be called twice."""
        if self._directory is not None:
            os.close(self._directory)
            self._directory = None


def unlink(directory: str, key: str) -> bool:
    """Remove a payload file whose producer is dead; return whether it was there."""
    if not is_key(key):
        return False
    try:
        os.unlink(os.path.join(directory, key))  # noqa: PTH108, PTH118 - `key` has no separator
    except FileNotFoundError:
        return False
    return True


def unannounced(directory: str, owner: str, announced: Container[str]) -> tuple[str, ...]:
    """Return the keys of a dead producer's files that nobody was told of; `unlink` each."""
    prefix = f"{owner}."
    names = sorted(os.listdir(directory))  # noqa: PTH208 - only names are needed
    return tuple(
        name for name in names if name.startswith(prefix) and is_key(name) and name not in announced
    )


def is_key(name: str) -> bool:
    """Say whether a name is one that a payload file may have; it holds no separator."""
    return _KEY.fullmatch(name) is not None


def _create(directory: int, key: str, size: int) -> mmap.mmap:
    """Create a file with all its pages and map it.

    Allocated first: writing to a mapping for which there is no page left would kill the process.
    """
    fd = os.open(key, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=directory)
    try:
        os.posix_fallocate(fd, 0, size)
        return mmap.mmap(fd, size)
    except OSError:
        os.unlink(key, dir_fd=directory)
        raise
    finally:
        os.close(fd)
