"""The reference says what the code does."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import stretto
from scripts import contract, situations
from scripts.reference import TARGET, page
from stretto import errors
from stretto.errors import StrettoError
from stretto.server.app import create_app
from tests.support.fake_engine import FakeEngine

REPOSITORY = Path(__file__).parents[2]
REFERENCE = REPOSITORY / "docs/reference"


def test_the_configuration_page_is_fresh() -> None:
    """`python -m scripts.reference` writes what is committed."""
    assert TARGET.read_text() == page()


def test_every_error_class_is_listed() -> None:
    """The page of errors names each public class."""
    text = (REFERENCE / "errors.md").read_text()
    for name in errors.__all__:
        item = getattr(errors, name)
        if isinstance(item, type) and issubclass(item, StrettoError) and item is not StrettoError:
            assert f"`{name}`" in text, name


def test_every_flag_is_listed() -> None:
    """The page of the command line names each verb and each of its flags."""
    text = (REFERENCE / "cli.md").read_text()
    for verb in (
        *(
            "serve",
            "say",
            "doctor",
            "ps",
            "story",
            "call",
            "replay",
            "simulate",
            "scale",
            "drain",
            "config show",
        ),
        "replica join",
        "version",
    ):
        assert f"stretto {verb}" in text
        shown = subprocess.run(
            [sys.executable, "-m", "stretto", *verb.split(), "--help"],
            capture_output=True,
            text=True,
            check=True,
            env={"COLUMNS": "200", "NO_COLOR": "1", "PATH": "/usr/bin", "TERM": "dumb"},
        ).stdout
        for flag in set(re.findall(r"--[a-z][a-z-]+", shown)) - {"--help"}:
            assert flag in text, f"{verb} {flag}"


def test_every_route_is_listed() -> None:
    """The page of the HTTP interface names each path."""
    text = (REFERENCE / "http.md").read_text()
    for path in create_app(FakeEngine()).openapi()["paths"]:
        assert f"`{path}`" in text, path


def test_the_public_names_are_pinned() -> None:
    """`stretto` exports these names and no others, and each of them resolves."""
    names = ["Engine", "OutputChunk", "RpcResult", "StrettoError", "__version__"]
    assert stretto.__all__ == names
    for name in stretto.__all__:
        assert getattr(stretto, name) is not None


def test_every_link_between_pages_leads_somewhere() -> None:
    """Relative links of README and docs exist."""
    for page_path in [REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page_path.read_text()):
            if "://" not in target:
                assert (page_path.parent / target).exists(), f"{page_path.name} -> {target}"


def test_the_example_prints_what_its_page_says() -> None:
    """The pipeline of one's own runs as it stands in the repository."""
    done = subprocess.run(
        [sys.executable, REPOSITORY / "examples/shout_client.py"],
        capture_output=True,
        text=True,
        check=True,
        timeout=50,
    )
    assert done.stdout == "THE NEXT VOICE ENTERS EARLY!!\n"


def test_dictation_prints_each_word_before_the_next_one_is_sent() -> None:
    """Input that streams, as its page shows it."""
    done = subprocess.run(
        [sys.executable, REPOSITORY / "examples/dictation.py"],
        capture_output=True,
        text=True,
        check=True,
        timeout=50,
    )
    assert done.stdout == "STILL\nBEING\nWRITTEN\n"


def test_the_contract_page_is_fresh_and_no_row_is_without_a_test() -> None:
    """`python -m scripts.contract` writes what is committed."""
    assert contract.unpinned() == []
    assert contract.TARGET.read_text() == contract.page()


def test_the_page_of_situations_is_fresh_and_each_has_a_test_or_a_reason() -> None:
    """`python -m scripts.situations` writes what is committed."""
    assert situations.unexplained() == []
    assert situations.TARGET.read_text() == situations.page()
