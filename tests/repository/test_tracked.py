"""What is in the repository is what people wrote."""

from __future__ import annotations

import subprocess

import pytest

from tests.repository.project import ROOT


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
def test_nothing_that_is_ignored_is_tracked() -> None:
    """What the Makefile makes is not committed by mistake."""
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--ignored", "--exclude-standard"],  # noqa: S607
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    )
    assert tracked.stdout.splitlines()[:5] == []
