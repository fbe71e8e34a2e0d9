"""Stretto: a serving engine for multi-stage generative models.

Importing this package does no work; each public name is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stretto.engine import Engine as Engine
    from stretto.engine import OutputChunk as OutputChunk
    from stretto.engine import RpcResult as RpcResult
    from stretto.errors import StrettoError as StrettoError

__version__ = "0.1.0"

__all__ = ["Engine", "OutputChunk", "RpcResult", "StrettoError", "__version__"]

_HOMES = {
    "Engine": "stretto.engine",
    "OutputChunk": "stretto.engine",
    "RpcResult": "stretto.engine",
    "StrettoError": "stretto.errors",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'stretto' has no attribute {name!r}")
    return getattr(import_module(home), name)
