"""Records, glossary and news keep their form."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.repository.project import DOCS, ROOT

if TYPE_CHECKING:
    from pathlib import Path

DECISIONS = sorted((DOCS / "decisions").glob("[0-9]*.md"))
SECTIONS = [
    "Context",
    "Decision",
    "Consequences",
    "Rejected",
    "How we would notice that it was wrong",
]
PAGE_LINES = 60

WORDS = """
    adapter admission attempt backend chunk channel credit deadline drain edge engine epoch event
    command grant hold incarnation late link orchestrator payload pipeline placement replica request
    retention retry router run shell slot stage story supervisor task terminal unit window
""".split()

FRAGMENT = re.compile(r"[0-9]+\.(added|changed|fixed|removed)\.md")


@pytest.mark.parametrize("record", DECISIONS, ids=lambda path: path.stem)
def test_a_decision_record_is_one_page_with_all_its_parts(record: Path) -> None:
    """Whoever reads a record finds the same five parts, on one page."""
    text = record.read_text()
    assert len(text.splitlines()) <= PAGE_LINES
    assert text.startswith(f"# {record.name[:4]}. ")
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == SECTIONS


def test_decision_records_are_numbered_without_gap_and_listed() -> None:
    """A record can be cited by its number, and found from the list."""
    assert [int(record.name[:4]) for record in DECISIONS] == list(range(1, len(DECISIONS) + 1))
    index = (DOCS / "decisions" / "index.md").read_text()
    assert [record.name for record in DECISIONS if f"]({record.name})" not in index] == []


def test_the_glossary_explains_our_words() -> None:
    """Every word that code and documents use in a sense of their own has one row."""
    glossary = (DOCS / "reference" / "glossary.md").read_text()
    explained = re.findall(r"^\| ([^|]+) \|", glossary, re.MULTILINE)
    assert [word for word in WORDS if explained.count(word) != 1] == []


def test_news_fragments_have_a_known_kind_and_say_something() -> None:
    """Each fragment can be put under a heading of the release notes."""
    wrong = [
        path.name
        for path in (ROOT / "changes").glob("*.md")
        if not FRAGMENT.fullmatch(path.name) or not path.read_text().strip()
    ]
    assert wrong == []
