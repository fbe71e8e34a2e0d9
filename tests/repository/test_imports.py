"""Who may import what, beyond the contracts that import-linter checks."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import packages_distributions

import grimp
import pytest
from packaging.utils import canonicalize_name

from tests.repository.project import PACKAGE, ROOT, declared, names, pyproject

CORE_MAY_IMPORT = {
    "__future__",
    "bisect",
    "collections",
    "enum",
    "heapq",
    "msgspec",
    "stretto.core",
    "stretto.errors",
    "stretto.types",
    "typing",
}
"""All that the router may know of the world; what is not named here needs a reason."""

EXTRAS = {
    "audio": ("server",),
    "backends": ("speech",),
    "cli": ("server",),
    "server": ("server",),
}
"""Folders that may import more than the package's plain dependencies."""

PART_OF = {"pydantic_core": "pydantic"}
"""Distributions that another one pins exactly and hands out types of."""

IMPORT_LIMIT_S = 0.2


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    """Every import in the package, lazy ones and those for types included."""
    return grimp.build_graph("stretto", include_external_packages=True, cache_dir=None)


def imported_by(graph: grimp.ImportGraph, package: str) -> set[str]:
    """Return what the modules of a package import directly."""
    modules = {package, *graph.find_descendants(package)}
    return {name for module in modules for name in graph.find_modules_directly_imported_by(module)}


def test_the_core_imports_only_what_is_allowed(graph: grimp.ImportGraph) -> None:
    """The core stays pure: containers, enums, a heap, structs, and the two layers below it."""
    found = imported_by(graph, "stretto.core")
    strangers = {
        name
        for name in found
        if name not in CORE_MAY_IMPORT and ".".join(name.split(".")[:2]) not in CORE_MAY_IMPORT
    }
    assert strangers == set()


def test_every_folder_is_in_the_table_of_layers() -> None:
    """No part of the package stands outside the layers, and no layer is without its folder."""
    contracts = pyproject()["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    listed = {name for layer in layers for name in layer.split(" | ")}
    here = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    here |= {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__"}
    assert here == listed


def test_every_imported_package_is_a_declared_dependency(graph: grimp.ImportGraph) -> None:
    """Nobody relies on a package that is only there because another one needs it."""
    distributions = packages_distributions()
    undeclared: list[str] = []
    for folder in sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py")):
        allowed = names(declared(*EXTRAS.get(folder, ())))
        for name in sorted(imported_by(graph, f"stretto.{folder}")):
            top = name.split(".")[0]
            if top == "stretto" or top in sys.stdlib_module_names:
                continue
            owners = {
                canonicalize_name(name) for name in distributions.get(PART_OF.get(top, top), [top])
            }
            if not owners & allowed:
                undeclared.append(f"stretto.{folder} imports {top}")
    assert undeclared == []


def run(code: str) -> str:
    """Run code in a fresh interpreter; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True, text=True
    )
    return done.stdout


def test_importing_stretto_loads_nothing_heavy() -> None:
    """`import stretto` is structure only; each public name brings its own modules when it is used."""
    loaded = set(run("import stretto, sys; print(*sys.modules)").split())
    heavy = {"fastapi", "msgspec", "numpy", "onnxruntime", "pydantic", "typer", "uvloop", "yaml"}
    assert loaded & heavy == set()
    assert {name for name in loaded if name.startswith("stretto")} == {"stretto"}


@pytest.mark.slow
def test_importing_stretto_is_quick() -> None:
    """The best of five fresh interpreters imports the package within the limit."""
    code = "import time; t = time.perf_counter(); import stretto; print(time.perf_counter() - t)"
    assert min(float(run(code)) for _ in range(5)) < IMPORT_LIMIT_S
