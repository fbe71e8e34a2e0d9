"""Finds a backend's class, or an adapter's factory, by name.

It must not know what a backend computes.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from stretto.errors import ConfigError

BUILT_IN = {
    "scripted": "stretto.backends.scripted:Scripted",
    "scripted-stream": "stretto.backends.scripted:ScriptedStream",
    "hibari-talker": "stretto.backends.hibari_talker:Talker",
    "hibari-vocoder": "stretto.backends.hibari_vocoder:Vocoder",
}
"""Short names of the backends that come with Stretto."""


def backend_class(name: str) -> type[object]:
    """Return the class behind `module:Class` or a built-in name; the current folder is searched too.

    Raises:
        ConfigError: It can't be found or imported, or it has neither `run` nor `step`.
    """
    found = _find("backend", name, BUILT_IN.get(name, name))
    if not isinstance(found, type):
        raise ConfigError(f"backend {name!r} is a {type(found).__name__}: name a class")
    if not (hasattr(found, "run") or hasattr(found, "step")):
        raise ConfigError(
            f"backend {name!r} has neither `run` nor `step`: see stretto.backends.contract for the two forms"
        )
    return found


def adapter_factory(name: str) -> object:
    """Return what `module:name` of an edge's adapter names; calling it makes one adapter.

    Raises:
        ConfigError: It can't be found or imported, or it can't be called.
    """
    found = _find("adapter", name, name)
    if not callable(found):
        raise ConfigError(
            f"adapter {name!r} can't be called: name a function or class that returns an adapter"
        )
    return found


def _find(what: str, name: str, path: str) -> object:
    module_name, separator, attribute = path.partition(":")
    if not (separator and module_name and attribute):
        raise ConfigError(f"{what} {name!r} is no name: write `module:Class`{_built_in_hint(what)}")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        found: object = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(_import_advice(what, name, module_name, error)) from error
    for part in attribute.split("."):
        found = getattr(found, part, None)
        if found is None:
            raise ConfigError(
                f"{what} {name!r}: module {module_name!r} has no {attribute!r}; check the spelling"
            )
    return found


def _built_in_hint(what: str) -> str:
    return f", or one of {', '.join(BUILT_IN)}" if what == "backend" else ""


def _import_advice(what: str, name: str, module: str, error: ImportError) -> str:
    missing = error.name or ""
    if missing and (module == missing or module.startswith(f"{missing}.")):
        step = f"put {missing}.py into {Path.cwd()} or install the package that contains it"
    elif missing and isinstance(error, ModuleNotFoundError):
        step = f"it needs {missing!r}: install that package"
    else:
        step = "fix the import"
    return f"{what} {name!r} can't be imported: {error}; {step}"
