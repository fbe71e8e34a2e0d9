"""Every verb helps, and helping is cheap."""

from __future__ import annotations

import subprocess
import sys

import pytest

VERBS = [
    [],
    ["serve"],
    ["say"],
    ["doctor"],
    ["replay"],
    ["simulate"],
    ["call"],
    ["config"],
    ["config", "show"],
    ["config", "check"],
    ["config", "schema"],
    ["config", "explain"],
    ["version"],
]
HEAVY = ("fastapi", "numpy", "onnxruntime", "uvicorn", "prometheus_client", "lameenc")

CODE = """
import sys
from stretto.cli.app import run
code = run()
heavy = [name for name in {heavy!r} if name in sys.modules]
assert not heavy, heavy
sys.exit(code)
"""


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: " ".join(verb) or "stretto")
def test_help_loads_nothing_heavy(verb: list[str]) -> None:
    """`--help` of every verb."""
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(heavy=HEAVY), *verb, "--help"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [["config", "show", "--resolved"], ["config", "explain"], ["doctor", "--no-self-test"]],
    ids=" ".join,
)
def test_looking_loads_nothing_heavy(arguments: list[str]) -> None:
    """What only reads the configuration and the machine."""
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(heavy=HEAVY), *arguments],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
