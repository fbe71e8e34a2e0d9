"""What is installed is what is declared, exactly pinned."""

from __future__ import annotations

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.repository.project import ROOT, declared, locked, names, pyproject

EVERYTHING, SERVING = "requirements.lock", "requirements-serve.lock"
EXTRAS = {EVERYTHING: ("server", "speech", "dev"), SERVING: ("server", "speech")}


def required(lock: str) -> list[Requirement]:
    """Return what a lock file must cover; the package is built with what is locked too."""
    build = [Requirement(text) for text in pyproject()["build-system"]["requires"]]
    return declared(*EXTRAS[lock]) + build


@pytest.mark.parametrize("lock", EXTRAS)
def test_every_dependency_is_locked(lock: str) -> None:
    """A dependency that was added without `scripts/lock` is named."""
    assert names(required(lock)) - names(locked(lock)) == set()


@pytest.mark.parametrize("lock", EXTRAS)
def test_every_pin_is_within_its_declared_range(lock: str) -> None:
    """A bound that was raised without `scripts/lock` is named."""
    ranges = {canonicalize_name(need.name): need.specifier for need in required(lock)}
    outside = [
        str(pin)
        for pin in locked(lock)
        for version in pin.specifier
        if not ranges.get(canonicalize_name(pin.name), pin.specifier).contains(version.version)
    ]
    assert outside == []


def test_serving_installs_a_part_of_everything() -> None:
    """`make serve` and `make test` never disagree about a version, in whichever order they run."""
    everything = {str(pin) for pin in locked(EVERYTHING)}
    assert {str(pin) for pin in locked(SERVING)} - everything == set()


@pytest.mark.parametrize("lock", EXTRAS)
def test_a_lock_names_no_host(lock: str) -> None:
    """Where packages come from is the user's configuration, not ours."""
    assert "://" not in (ROOT / lock).read_text()
