"""Backends and adapters are found by name, or it is said why not."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from stretto.backends.loading import BUILT_IN, adapter_factory, backend_class
from stretto.backends.scripted import Scripted
from stretto.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


class Outer:
    """A namespace."""

    class Inner:
        """A backend of the least kind."""

        def step(self, items: object) -> object:
            """Do nothing."""
            return items


def factory() -> object:
    """Make an adapter."""
    return factory


def test_built_in_names_stand_for_classes() -> None:
    """The short name and the long one give the same class."""
    assert backend_class("scripted") is Scripted
    assert backend_class(BUILT_IN["scripted"]) is Scripted


def test_a_name_may_lead_into_a_class() -> None:
    """Dots after the colon are followed."""
    assert backend_class(f"{__name__}:Outer.Inner") is Outer.Inner


def test_a_stage_of_your_own_lies_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No package, no installation: a file next to where the server is started."""
    (tmp_path / "my_own_stage.py").write_text("class Echo:\n    def step(self, items): ...\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["/nowhere"])
    assert backend_class("my_own_stage:Echo").__name__ == "Echo"


def test_adapters_are_found_the_same_way() -> None:
    """What is named is a factory."""
    assert adapter_factory(f"{__name__}:factory") is factory


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("scriptet", "backend 'scriptet' is no name: write `module:Class`, or one of scripted, "),
        ("no.such:Thing", "can't be imported: No module named 'no'; put no.py into "),
        (f"{__name__}:Missing", f"module '{__name__}' has no 'Missing'; check the spelling"),
        (f"{__name__}:factory", "is a function: name a class"),
        (f"{__name__}:Outer", "has neither `run` nor `step`"),
    ],
)
def test_what_is_wrong_with_a_backends_name_is_said(name: str, text: str) -> None:
    """The error names the backend, what failed and the next step."""
    with pytest.raises(ConfigError, match=re.escape(text)):
        backend_class(name)


def test_a_missing_library_is_told_from_a_missing_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The advice is to install what the module needs."""
    (tmp_path / "needs_a_library.py").write_text("import no_such_library\n")
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    with pytest.raises(ConfigError, match="it needs 'no_such_library': install that package"):
        backend_class("needs_a_library:Backend")


def test_an_adapter_that_cannot_be_called_is_refused() -> None:
    """A factory is called once per task and edge."""
    with pytest.raises(ConfigError, match="can't be called"):
        adapter_factory(f"{__name__}:__doc__")
