"""The repository's own files, read once: what the tests of this folder look at."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "stretto"
DOCS = ROOT / "docs"


def pyproject() -> dict[str, Any]:
    """Return `pyproject.toml` as nested dictionaries."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def declared(*extras: str) -> list[Requirement]:
    """Return the dependencies of the package and of some of its extras."""
    project = pyproject()["project"]
    texts = list(project["dependencies"])
    for extra in extras:
        texts += project["optional-dependencies"][extra]
    return [Requirement(text) for text in texts]


def locked(name: str) -> list[Requirement]:
    """Return the pins of a lock file; a package may have one per Python version."""
    lines = (ROOT / name).read_text().splitlines()
    pins = [line.split("#")[0].strip() for line in lines]
    return [Requirement(pin) for pin in pins if pin]


def names(requirements: list[Requirement]) -> set[str]:
    """Return the normalised names of distributions."""
    return {canonicalize_name(requirement.name) for requirement in requirements}
