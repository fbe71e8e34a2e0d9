"""Run directories: a dead run's is removed, everything else is left alone."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from stretto.errors import InternalError
from stretto.transport import RunDirectory
from tests.transport.wire import open_descriptors

if TYPE_CHECKING:
    from collections.abc import Generator

OWN = """
import sys
from stretto.transport import RunDirectory
run = RunDirectory.create(sys.argv[1], sys.argv[2])
open(run.path + "/talker-0-1.0", "w").write("payload")
print(run.path, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def owned_by_a_child(run_id: str, base: Path) -> Generator[tuple[subprocess.Popen[str], Path]]:
    """Let another process own a run directory with a payload in it until the end of the block."""
    child = subprocess.Popen(
        [sys.executable, "-c", OWN, run_id, str(base)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        assert child.stdout is not None
        path = Path(child.stdout.readline().strip())
        try:
            yield child, path
        finally:
            child.kill()


def test_a_run_directory_is_private_and_named_after_user_and_run(tmp_path: Path) -> None:
    """Only this user may enter it; closing removes it with its content and may be repeated."""
    before = open_descriptors()
    run = RunDirectory.create("run-1", str(tmp_path))
    path = Path(run.path)
    (path / "talker.0").write_bytes(b"payload")

    assert path == tmp_path / f"stretto-{os.getuid()}-run-1"
    assert path.stat().st_mode & 0o777 == 0o700
    assert (path / "owner").read_text() == f"{os.getpid()}\n"
    run.close()
    run.close()

    assert list(tmp_path.iterdir()) == []
    assert open_descriptors() == before


def test_an_existing_directory_is_never_taken_over(tmp_path: Path) -> None:
    """A second run of the same name is refused and leaves the first as it is."""
    run = RunDirectory.create("run-1", str(tmp_path))

    with pytest.raises(OSError, match="not empty"):
        RunDirectory.create("run-1", str(tmp_path))

    assert [path.name for path in tmp_path.iterdir()] == [Path(run.path).name]
    assert RunDirectory.reclaim(str(tmp_path)) == ()
    run.close()


@pytest.mark.parametrize("run_id", ["", "a/b", "..", "a.new", "a" * 65, "a\n"])
def test_a_run_id_that_is_no_file_name_is_refused(tmp_path: Path, run_id: str) -> None:
    """Run ids have neither dots nor separators."""
    with pytest.raises(InternalError, match="run id"):
        RunDirectory.create(run_id, str(tmp_path))


def test_a_missing_base_is_the_caller_s_to_handle(tmp_path: Path) -> None:
    """Without the base there is an `OSError`, upon which payloads go inline."""
    with pytest.raises(FileNotFoundError):
        RunDirectory.create("run-1", str(tmp_path / "absent"))


def test_a_living_run_is_kept_and_a_dead_one_removed(tmp_path: Path) -> None:
    """The kernel's lock tells them apart, however the owner died."""
    with owned_by_a_child("run-1", tmp_path) as (child, path):
        assert RunDirectory.reclaim(str(tmp_path)) == ()
        assert (path / "talker-0-1.0").exists()
        child.kill()
        child.wait()

        assert RunDirectory.reclaim(str(tmp_path)) == (str(path),)
        assert RunDirectory.reclaim(str(tmp_path)) == ()
    assert list(tmp_path.iterdir()) == []


def test_own_living_runs_are_kept_too(tmp_path: Path) -> None:
    """Reclaiming in the owner's own process neither removes the directory nor loses the lock."""
    run = RunDirectory.create("run-1", str(tmp_path))

    assert RunDirectory.reclaim(str(tmp_path)) == ()
    assert RunDirectory.reclaim(str(tmp_path)) == ()

    assert Path(run.path, "owner").exists()
    run.close()


def test_an_interrupted_removal_is_completed(tmp_path: Path) -> None:
    """A directory whose owner file is gone already is a dead run's, also with files in it."""
    path = tmp_path / f"stretto-{os.getuid()}-run-1"
    path.mkdir(mode=0o700)
    (path / "talker.0").write_bytes(b"late")

    assert RunDirectory.reclaim(str(tmp_path)) == (str(path),)


def test_foreign_names_are_not_touched(tmp_path: Path) -> None:
    """Other users' directories, other programs' names, links and files stay."""
    uid = os.getuid()
    names = [
        f"stretto-{uid + 1}-run-1",
        f"stretto-{uid}-run-1.new",
        f"stretto-{uid}-run.1",
        f"other-{uid}-run-1",
        "stretto",
        f"xstretto-{uid}-run-1",
    ]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(b"x")
    (tmp_path / f"stretto-{uid}-file").write_bytes(b"x")
    (tmp_path / f"stretto-{uid}-link").symlink_to(tmp_path / "stretto")
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))

    assert RunDirectory.reclaim(str(tmp_path)) == ()

    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make files of another user")
def test_a_directory_of_another_user_under_our_name_is_not_touched(tmp_path: Path) -> None:
    """The name alone does not make a directory ours."""
    path = tmp_path / f"stretto-{os.getuid()}-run-1"
    path.mkdir()
    (path / "file").write_bytes(b"x")
    os.chown(path, 12345, 12345)

    assert RunDirectory.reclaim(str(tmp_path)) == ()

    assert (path / "file").exists()


def test_an_owner_file_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    """Whatever the link leads to, the directory is left alone."""
    path = tmp_path / f"stretto-{os.getuid()}-run-1"
    path.mkdir()
    (path / "owner").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").write_bytes(b"x")

    assert RunDirectory.reclaim(str(tmp_path)) == ()
    assert (tmp_path / "elsewhere").exists()
