"""What users may rely on."""

from __future__ import annotations

from importlib.metadata import version

import stretto

PUBLIC = ["Engine", "OutputChunk", "RpcResult", "StrettoError", "__version__"]


def test_the_public_names_are_pinned() -> None:
    """A public name comes or goes only together with this list."""
    assert sorted(stretto.__all__) == PUBLIC


def test_every_public_name_resolves() -> None:
    """No name of `__all__` leads nowhere, although each is loaded only when it is used."""
    missing = [name for name in stretto.__all__ if not hasattr(stretto, name)]
    assert missing == []


def test_the_version_is_that_of_the_distribution() -> None:
    """The version in the package is the one that is installed."""
    assert stretto.__version__ == version("stretto")
