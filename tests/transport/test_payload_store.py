"""The payload store on real files in shared memory."""

from __future__ import annotations

import gc
import subprocess
import threading
import uuid
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np
import pytest

from stretto.errors import InternalError, PayloadLost
from stretto.transport import (
    PayloadReader,
    PayloadWriter,
    RunDirectory,
    decode,
    encode,
    unannounced,
    unlink,
)
from stretto.types import INLINE, SHARED_MEMORY, PayloadRef
from tests.transport.wire import open_descriptors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stretto.transport import EncodedPayload, PayloadWriterStatistics

KIB = 1024
MIB = 1024 * KIB


@pytest.fixture
def directory() -> Iterator[str]:
    """A run's directory in shared memory; afterwards no descriptor of the test may be open."""
    before = open_descriptors()
    run = RunDirectory.create(f"test-{uuid.uuid4().hex[:12]}")
    yield run.path
    run.close()
    assert open_descriptors() == before
    assert not Path(run.path).exists()


@pytest.fixture
def writer(directory: str) -> Iterator[PayloadWriter]:
    """A producer with a budget of 1 MiB."""
    writer = PayloadWriter(directory, "talker-0-1", MIB)
    yield writer
    writer.close()


@pytest.fixture
def reader(directory: str) -> Iterator[PayloadReader]:
    """A consumer."""
    reader = PayloadReader(directory)
    yield reader
    reader.close()


def payload(size: int, fill: int = 7) -> EncodedPayload:
    """Return a payload with an array of `size` bytes."""
    return encode({"array": np.full(size, fill, "u1")})


def names_in(directory: str | Path) -> list[str]:
    """Return the names of a directory's files."""
    return sorted(path.name for path in Path(directory).iterdir())


def content(reader: PayloadReader, ref: PayloadRef) -> tuple[int, set[int]]:
    """Return length and distinct bytes of a payload's array."""
    mapped = reader.open(ref)
    array = np.asarray(decode(mapped.view)["array"])
    found = (len(array), set(np.unique(array).tolist()))
    del array
    assert mapped.close()
    return found


def test_small_payloads_travel_inline(writer: PayloadWriter, directory: str) -> None:
    """Up to the limit the bytes are handed back and nothing is written."""
    small = encode({"data": bytes(64 * KIB - 100)})
    assert small.size_bytes <= 64 * KIB

    ref, data = writer.put(small)

    assert ref == PayloadRef(INLINE, "", small.size_bytes)
    assert data == small.join()
    assert names_in(directory) == ["owner"]


def test_a_large_payload_is_a_private_file_that_reads_back(
    writer: PayloadWriter, reader: PayloadReader, directory: str
) -> None:
    """Above the limit the payload lies in a file named by its key, readable by this user only."""
    large = payload(200 * KIB)

    ref, data = writer.put(large)

    assert data is None
    assert ref == PayloadRef(SHARED_MEMORY, "talker-0-1.0", large.size_bytes)
    assert content(reader, ref) == (200 * KIB, {7})
    assert Path(directory, ref.key).stat().st_mode & 0o777 == 0o600


def test_a_mapped_view_can_not_be_written(writer: PayloadWriter, reader: PayloadReader) -> None:
    """A consumer can't change what other consumers read."""
    ref, _ = writer.put(payload(100 * KIB))
    mapped = reader.open(ref)

    assert mapped.view.readonly
    assert len(mapped.view) == ref.size_bytes
    assert mapped.close()


def test_without_a_directory_everything_is_inline() -> None:
    """No shared memory is a property of the transport: the same call hands back the same bytes."""
    writer = PayloadWriter(None, "talker-0-1", MIB)
    large = payload(200 * KIB)

    ref, data = writer.put(large)
    writer.close()

    assert ref == PayloadRef(INLINE, "", large.size_bytes)
    assert data == large.join()


def test_an_exhausted_budget_goes_inline_until_something_is_released(
    writer: PayloadWriter, directory: str
) -> None:
    """The budget is never exceeded, and a release makes room again."""
    large = payload(500 * KIB)
    first, _ = writer.put(large)

    over = [writer.put(payload(600 * KIB)) for _ in range(3)]
    assert [ref.place for ref, _ in over] == [INLINE] * 3
    assert all(data is not None for _, data in over)
    assert writer.statistics().refused_total == 3
    assert sum(path.stat().st_size for path in Path(directory).iterdir()) <= MIB + 100
    writer.release(first.key)
    again, data = writer.put(payload(600 * KIB))

    assert (again.place, data) == (SHARED_MEMORY, None)
    assert writer.statistics().used_bytes <= MIB


def test_releases_are_idempotent_and_unknown_keys_are_counted(writer: PayloadWriter) -> None:
    """A second release and a foreign key change nothing but the count."""
    ref, _ = writer.put(payload(100 * KIB))

    assert writer.release(ref.key)
    assert not writer.release(ref.key)
    assert not writer.release("vocoder-0-1.5")

    assert writer.statistics().unknown_releases_total == 2
    assert writer.statistics().held == 0


def test_all_but_some_can_be_released(writer: PayloadWriter, directory: str) -> None:
    """Of a producer that nobody listened to for a while: the others are forgotten everywhere."""
    kept, gone = (writer.put(payload(100 * KIB))[0] for _ in range(2))
    writer.keep_only((kept.key, "tone-0-1.7"))
    assert writer.statistics().held == 1
    assert not writer.release(gone.key)
    assert Path(directory, kept.key).exists()
    assert writer.release(kept.key)


def test_a_released_file_is_written_again_under_the_next_key(
    writer: PayloadWriter, reader: PayloadReader, directory: str
) -> None:
    """The memory is reused, the key never is, and a shorter payload shows nothing of the one before."""
    first, _ = writer.put(payload(200 * KIB, fill=1))
    inode = Path(directory, first.key).stat().st_ino
    writer.release(first.key)

    second, _ = writer.put(payload(150 * KIB, fill=2))

    assert second.key != first.key
    assert Path(directory, second.key).stat().st_ino == inode
    assert content(reader, second) == (150 * KIB, {2})
    with pytest.raises(PayloadLost):
        reader.open(first)


def test_a_held_file_is_never_written_again(writer: PayloadWriter, reader: PayloadReader) -> None:
    """While a payload is held, later ones take other files."""
    held, _ = writer.put(payload(200 * KIB, fill=1))

    for fill in range(2, 30):
        ref, _ = writer.put(payload(200 * KIB, fill=fill))
        writer.release(ref.key)

    assert content(reader, held) == (200 * KIB, {1})


def test_a_much_larger_spare_file_is_not_wasted_on_a_small_payload(writer: PayloadWriter) -> None:
    """A spare file serves payloads from half its size on."""
    large, _ = writer.put(payload(600 * KIB))
    writer.release(large.key)

    writer.put(payload(100 * KIB))

    statistics = writer.statistics()
    assert (statistics.held, statistics.spare) == (1, 1)


def test_spare_files_stay_within_their_limit_and_give_way_to_held_ones(directory: str) -> None:
    """Released files beyond the limit are removed at once, those within it when the budget needs them."""
    writer = PayloadWriter(directory, "talker-0-1", MIB, spare_bytes=256 * KIB)
    refs = [writer.put(payload(120 * KIB))[0] for _ in range(4)]
    for ref in refs:
        writer.release(ref.key)
    after_release = writer.statistics()
    large, _ = writer.put(payload(900 * KIB))

    assert (after_release.spare, after_release.used_bytes) == (2, 256 * KIB)
    assert large.place == SHARED_MEMORY
    assert writer.statistics().spare == 0
    writer.close()


def test_closing_removes_every_file(writer: PayloadWriter, directory: str) -> None:
    """Held and spare files are gone after `close`, which may be repeated; later payloads go inline."""
    refs = [writer.put(payload(100 * KIB))[0] for _ in range(3)]
    writer.release(refs[0].key)

    writer.close()
    writer.close()

    assert names_in(directory) == ["owner"]
    assert writer.put(payload(100 * KIB))[0].place == INLINE
    assert not writer.release(refs[1].key)
    assert writer.statistics().used_bytes == 0


def test_views_outlive_their_producer(writer: PayloadWriter, reader: PayloadReader) -> None:
    """A mapped payload stays readable after its file is removed."""
    ref, _ = writer.put(payload(100 * KIB, fill=9))
    mapped = reader.open(ref)
    writer.close()

    array = np.asarray(decode(mapped.view)["array"])

    assert set(array.tolist()) == {9}
    del array
    assert mapped.close()


def test_closing_a_mapping_waits_for_its_views(
    writer: PayloadWriter, reader: PayloadReader
) -> None:
    """As long as an array decoded from it is alive, `close` returns False and the data stays."""
    ref, _ = writer.put(payload(100 * KIB, fill=3))
    mapped = reader.open(ref)
    array = np.asarray(decode(mapped.view)["array"])

    assert not mapped.close()
    assert not mapped.close()
    assert set(array.tolist()) == {3}
    del array
    assert mapped.close()
    assert mapped.close()


def test_closing_a_mapping_waits_for_users_of_the_view_itself(
    writer: PayloadWriter, reader: PayloadReader
) -> None:
    """An array made straight from `view` keeps the mapping as well."""
    ref, _ = writer.put(payload(100 * KIB))
    mapped = reader.open(ref)
    array = np.frombuffer(mapped.view, "u1")

    assert not mapped.close()
    assert len(array) == ref.size_bytes
    del array
    assert mapped.close()


def test_a_dropped_mapping_leaks_nothing(writer: PayloadWriter, reader: PayloadReader) -> None:
    """Mappings that nobody closes end with their last view."""
    ref, _ = writer.put(payload(100 * KIB))
    before = open_descriptors()

    views = [decode(reader.open(ref).view)["array"] for _ in range(10)]
    del views
    gc.collect()

    assert open_descriptors() == before


def test_a_missing_or_short_file_is_a_lost_payload(
    writer: PayloadWriter, reader: PayloadReader, directory: str
) -> None:
    """Reading fails with a typed error instead of a fault in the process."""
    ref, _ = writer.put(payload(100 * KIB))

    with pytest.raises(PayloadLost, match="200000 were announced"):
        reader.open(ref._replace(size_bytes=200_000))
    assert unlink(directory, ref.key)
    with pytest.raises(PayloadLost, match=r"talker-0-1\.0 can't be read: No such file"):
        reader.open(ref)


BAD_KEYS = [
    "",
    ".",
    "..",
    "owner",
    "../owner",
    "../talker.1",
    "/etc/passwd",
    "talker/1.0",
    "talker.0/../owner",
    "talker",
    "talker.",
    "talker.x",
    "talker.-1",
    "talker.1\n",
    "talker.1\0",
    "talker.0.1",
    ".1",
    "tålker.1",
    "talker.١",  # noqa: RUF001 - a digit, but not an ASCII one
    "t" * 200 + ".1",
]


@pytest.mark.parametrize("key", BAD_KEYS)
def test_a_key_that_is_no_payload_name_is_never_opened(
    reader: PayloadReader, directory: str, key: str
) -> None:
    """No key from a frame reaches a path outside the directory, nor the owner file in it."""
    with pytest.raises(PayloadLost, match="does not name a payload file"):
        reader.open(PayloadRef(SHARED_MEMORY, key, 1))
    assert not unlink(directory, key)
    assert names_in(directory) == ["owner"]


def test_an_inline_reference_is_not_opened(reader: PayloadReader) -> None:
    """Only references to shared memory name files."""
    with pytest.raises(PayloadLost):
        reader.open(PayloadRef(INLINE, "talker-0-1.0", 1))


def test_a_link_in_place_of_a_payload_is_not_followed(
    reader: PayloadReader, directory: str
) -> None:
    """A symbolic link with a payload's name is a lost payload."""
    Path(directory, "talker.0").symlink_to("/etc/passwd")

    with pytest.raises(PayloadLost):
        reader.open(PayloadRef(SHARED_MEMORY, "talker.0", 1))


def test_a_closed_reader_opens_nothing(directory: str) -> None:
    """Closing may be repeated; afterwards every payload is lost to this reader."""
    reader = PayloadReader(directory)
    reader.close()
    reader.close()

    with pytest.raises(PayloadLost):
        reader.open(PayloadRef(SHARED_MEMORY, "talker.0", 1))


@pytest.mark.parametrize("owner", ["", "a.b", "a/b", "..", "é"])
def test_an_owner_that_would_break_keys_is_refused(owner: str) -> None:
    """A producer's name has no dot and no separator."""
    with pytest.raises(InternalError, match="payload owner"):
        PayloadWriter(None, owner, MIB)


def test_what_a_dead_producer_left_unannounced_is_found(directory: str) -> None:
    """Announced files and those of other producers are not listed; unlinking the rest removes just them."""
    dead = PayloadWriter(directory, "talker-0-1", MIB)
    other = PayloadWriter(directory, "talker-0-10", MIB)
    keys = [dead.put(payload(100 * KIB))[0].key for _ in range(3)]
    other_key = other.put(payload(100 * KIB))[0].key

    lost = unannounced(directory, "talker-0-1", {keys[1]})

    assert lost == (keys[0], keys[2])
    assert all(unlink(directory, key) for key in lost)
    assert not unlink(directory, keys[0])
    assert names_in(directory) == sorted(["owner", keys[1], other_key])
    dead.close()
    other.close()


def test_a_vanished_directory_sends_payloads_inline(tmp_path: Path) -> None:
    """When the run's directory is removed under a producer, it goes on inline, spare files included."""
    folder = tmp_path / "run"
    folder.mkdir()
    writer = PayloadWriter(str(folder), "talker-0-1", MIB)
    spare, _ = writer.put(payload(100 * KIB))
    writer.release(spare.key)
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()

    places = [writer.put(payload(100 * KIB))[0].place for _ in range(2)]
    statistics = writer.statistics()
    writer.close()

    assert places == [INLINE, INLINE]
    assert (statistics.failed_total, statistics.used_bytes, statistics.spare) == (2, 0, 0)


def test_a_full_file_system_sends_payloads_inline(tmp_path: Path) -> None:
    """Without space left the bytes go inline, no file stays behind, and small room is used again."""
    mounted = subprocess.run(
        ["/usr/bin/env", "mount", "-t", "tmpfs", "-o", "size=160k", "tmpfs", str(tmp_path)],
        check=False,
        capture_output=True,
    )
    if mounted.returncode != 0:
        pytest.skip(f"can't mount a small tmpfs: {mounted.stderr.decode().strip()}")
    try:
        writer = PayloadWriter(str(tmp_path), "talker-0-1", 10 * MIB, spare_bytes=0)
        large = payload(300 * KIB)
        ref, data = writer.put(large)
        left = names_in(tmp_path)
        fits, _ = writer.put(payload(100 * KIB))
        full, _ = writer.put(payload(100 * KIB))
        statistics = writer.statistics()
        writer.close()
    finally:
        subprocess.run(["/usr/bin/env", "umount", str(tmp_path)], check=True)

    assert ref == PayloadRef(INLINE, "", large.size_bytes)
    assert data == large.join()
    assert left == []
    assert (fits.place, full.place) == (SHARED_MEMORY, INLINE)
    assert expected_of(statistics) == (1, 2, 128 * KIB)


def expected_of(statistics: PayloadWriterStatistics) -> tuple[int, int, int]:
    """Return what the full file system leaves countable."""
    return statistics.held, statistics.failed_total, statistics.used_bytes


def test_puts_and_releases_may_come_from_two_threads(
    writer: PayloadWriter, reader: PayloadReader, directory: str
) -> None:
    """With one thread producing and another consuming and releasing, every payload arrives intact."""
    refs: SimpleQueue[tuple[int, PayloadRef] | None] = SimpleQueue()

    def produce() -> None:
        for number in range(300):
            ref, data = writer.put(payload(70 * KIB + number, fill=number % 251))
            if data is None:
                refs.put((number, ref))
        refs.put(None)

    thread = threading.Thread(target=produce)
    thread.start()
    seen = 0
    while (item := refs.get(timeout=10)) is not None:
        number, ref = item
        assert content(reader, ref) == (70 * KIB + number, {number % 251})
        assert writer.release(ref.key)
        seen += 1
    thread.join()

    statistics = writer.statistics()
    assert statistics.shared_total == seen
    assert seen + statistics.refused_total == 300
    assert statistics.held == 0
    assert len(names_in(directory)) == 1 + statistics.spare
