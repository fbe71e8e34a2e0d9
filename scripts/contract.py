"""Writes `docs/reference/contract.md`: what the orchestrator promises, row by row, and which tests pin it.

    .venv/bin/python -m scripts.contract

A test that pins row `F2` is named `test_row_F2_…`. A test fails if the page is stale or a row has no test.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
TARGET = REPOSITORY / "docs/reference/contract.md"

INTRODUCTION = """\
# The contract

<!-- Written by `python -m scripts.contract`; do not edit. -->

What the orchestrator promises, and the tests that pin each promise. Run those of one row with
`scripts/test -k test_row_F2_`, all of them with `scripts/test -k test_row_`.
"""

SECTIONS: dict[str, tuple[str, dict[str, str]]] = {
    "E": (
        "Orchestration",
        {
            "E5": "A draining replica is still heard and gets nothing new; an evicted one is neither heard "
            "nor written to.",
            "E6": "Events are handled one after the other, in order per replica, at most 64 per link "
            "and turn, round robin.",
            "E7": "The same seed gives the same bytes.",
            "E8": "A batch without outputs, statistics and finished tasks is dropped; any other is handled.",
            "E9": "What a transfer cost is counted before its request is looked up.",
            "E11": "A failure that names no replica evicts nobody; one that names a place that never existed "
            "is refused.",
            "E12": "A death is one eviction and one outcome per task, however many report it.",
            "E13": "What a former incarnation says is counted and dropped.",
            "E14": "A successor starts when the death was handled; nothing of the old one is delivered.",
            "E15": "What goes wrong with one link evicts that replica; a refused event fails one request; "
            "anything else from the router ends the engine.",
            "E17": "A stage works with the first replica that appears, and again with the next one.",
            "E18": "Nothing is left of replicas that went: no task, no descriptor, no warning.",
            "E19": "Cancellation is no failure of a replica; any other exception on its link is.",
            "E20": "Shutting down wakes a sleeping engine at once.",
            "E21": "Outputs that carry only metrics are absorbed, never routed.",
            "E22": "A task that ends without output gives one empty terminal, after the data.",
            "E23": "A request finishes once, after all its stages, with its timings.",
            "E25": "An idle pipeline sleeps.",
        },
    ),
    "F": (
        "Faults and recovery",
        {
            "F1": "A death concerns the tasks that were bound to it, and no others.",
            "F2": "Tasks that can be repeated are; the others fail with one retryable error.",
            "F3": "Requests wait for a stage without replicas, for a bounded time.",
            "F4": "A failed send and a death are one outcome.",
            "F5": "Work for requests that have ended is cancelled; one function cleans up.",
            "F6": "After any storm every table is empty.",
            "F7": "A crash loop parks the place; other deaths are followed by a back-off.",
            "F8": "Deaths in a row without a new chunk make a request poison.",
            "F9": "A replica that has work and does not go on is evicted; a slow or idle one is not.",
            "F10": "A stage's exception fails its own request only.",
            "F11": "Each wait has a deadline, whose end fails one request and names what it waited for.",
        },
    ),
    "M": (
        "Membership, calls, aborts, sessions",
        {
            "M1": "Joining twice is ignored; a new incarnation replaces; a failed join changes nothing.",
            "M2": "A replica that was cut off serves again under a new incarnation.",
            "M3": "A draining replica finishes what it has, for a bounded time, and leaves.",
            "M4": "Late joiners are seen; leavers are seen no more.",
            "M5": "Calls are answered by number, beside traffic, in time, and end with the engine.",
            "M6": "An abort is honoured at any moment, with one terminal and one acknowledgement.",
            "M7": "Companion requests run together or not at all.",
            "M8": "Input that streams reaches its task in order, also after a death; it is closed once.",
            "M9": "Notices about replicas reach clients in order, a loss once.",
        },
    ),
    "Q": (
        "The channel to API processes",
        {
            "Q1": "The reader awaits; the pushing side never waits and works from any thread.",
            "Q2": "A hand-off is read on one loop; another one gets a typed error.",
            "Q3": "A parked read returns a message or raises.",
            "Q4": "A crash is heard as: what was sent, one fatal message, closed.",
            "Q5": "So is the end by anything that is no `Exception`, and by SIGKILL.",
            "Q6": "A clean end has no fatal message.",
            "Q7": "What was queued stays readable after closing.",
            "Q8": "Closing happens even if the fatal message can't be put.",
            "Q9": "Closed is one exception type everywhere.",
            "Q10": "Each channel closes under its own guard.",
            "Q11": "Death is latched per epoch; the next one starts, or the server ends.",
            "Q12": "A fatal message with a request ends that one only.",
            "Q13": "If the drain ends for any reason, every waiter gets a typed error.",
            "Q14": "A put after closing is counted, not raised.",
            "Q15": "A stopped reader costs bounded memory.",
            "Q16": "Closing wakes every waiter, in order, as often as it is called.",
            "Q17": "Submitting never blocks.",
            "Q18": "The death of one API process aborts its requests only.",
        },
    ),
}
"""Each section with its title and rows."""

_NAME = re.compile(r"test_row_([A-Z]+[0-9]+)_")


def tests_by_row() -> dict[str, list[str]]:
    """Return for each row the tests named after it, as `path::name`, sorted."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted((REPOSITORY / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and (
                match := _NAME.match(node.name)
            ):
                found[match.group(1)].append(f"{path.relative_to(REPOSITORY)}::{node.name}")
    suite = REPOSITORY / "stretto/testing"
    for path in sorted(suite.rglob("*.py")):
        for match in re.finditer(r"def (test_row_([A-Z]+[0-9]+)_\w+)", path.read_text()):
            found[match.group(2)].append(f"{path.relative_to(REPOSITORY)}::{match.group(1)}")
    return found


def unpinned() -> list[str]:
    """Return the rows that no test is named after."""
    found = tests_by_row()
    return [row for _, rows in SECTIONS.values() for row in rows if row not in found]


def page() -> str:
    """Return the page's text."""
    found = tests_by_row()
    parts = [INTRODUCTION]
    for letter, (title, rows) in SECTIONS.items():
        parts += [
            f"## {letter}. {title}",
            "",
            "| row | promise | pinned by |",
            "| --- | --- | --- |",
        ]
        for row, promise in rows.items():
            tests = "<br>".join(f"`{name}`" for name in found.get(row, ["nothing yet"]))
            parts.append(f"| {row} | {promise} | {tests} |")
        parts.append("")
    return "\n".join(parts)


if __name__ == "__main__":
    TARGET.write_text(page())
