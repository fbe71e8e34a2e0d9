"""Writes `docs/reference/situations.md`: what goes wrong in the field, and the tests for it.

    .venv/bin/python -m scripts.situations

A test that shows situation `B14` is named `test_situation_B14_…`. A test fails if the page is stale, if a
situation has neither a test nor a reason why it does not apply, and if it has both.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
TARGET = REPOSITORY / "docs/reference/situations.md"

INTRODUCTION = """\
# Situations

<!-- Written by `python -m scripts.situations`; do not edit. -->

What operators of multi-stage servers run into, what happens here instead, and the tests that show
it. Run those of one with `scripts/test -k test_situation_B14_`.
"""

SITUATIONS: dict[str, tuple[str, dict[str, str]]] = {
    "A": (
        "Waits that never end",
        {
            "A1": "A chunk from an earlier stage never comes: its request fails in time and names the "
            "stage; the neighbours do not notice.",
            "A2": "Without room in shared memory a chunk goes another way; one that is lost fails its "
            "request at once.",
            "A4": "The last stage ends without a payload: the stream still ends, once, after its data.",
            "A5": "A request without any output costs its own slot only.",
            "A6": "A stage that needs the whole result is given work when all of it is there.",
            "A7": "After a crash the next request fails at once too, until the next epoch serves.",
            "A8": "A reader that waits hears of every way in which the engine can end.",
            "A9": "Closing wakes producers that wait for room, and whoever waits for the queue to be empty.",
            "A10": "SIGTERM under load ends everything within its bound.",
            "A12": "Open streams do not hold up the end.",
            "A13": "Work in hand is finished within the drain time; new work is refused with a hint.",
            "A14": "All processes of a replica go together.",
            "A15": "Many long requests do not hold up the API.",
            "A16": "Keep-alive of WebSockets under load.",
        },
    ),
    "B": (
        "Clients that leave",
        {
            "B1": "A client that leaves stops its request in every stage, and the next one gets the slot.",
            "B4": "It may leave before its response has begun.",
            "B5": "Aborts at any progress leave nothing behind.",
            "B8": "A parent with several children is aborted with all of them.",
            "B9": "A realtime connection that closes ends its own session only.",
            "B11": "A resumed session whose delivery fails is free again.",
            "B12": "Deleting an asynchronous job stops its work first.",
            "B13": "A client that gives up and tries again leaves one live copy at most.",
            "B14": "Aborts of unknown, ended and repeated ids harm nobody.",
            "B15": "A producer that never waits can be stopped.",
        },
    ),
    "C": (
        "Replicas that die",
        {
            "C1": "The death of any replica leaves the server up.",
            "C2": "Requests that it held take the common way out.",
            "C3": "Of a batch only those fail that were bound there.",
            "C6": "An exit without an error is a death too.",
            "C7": "A replacement gets work, again and again.",
            "C8": "A failure that names nobody evicts nobody; a death evicts once.",
            "C9": "A death at submit time is one retry or one failure.",
            "C10": "Unreachable for a while is not dead.",
            "C11": "What fails while one request is handled fails that request alone.",
            "C12": "Pressure beyond the slots waits or is refused; want of memory fails one request.",
            "C13": "Restarts have growing pauses and a bound; meanwhile clients are told when to come back.",
            "C14": "A thread inside a replica that gives up costs that replica only.",
        },
    ),
    "D": (
        "Things that pile up",
        {
            "D1": "A stream's memory does not grow with its length.",
            "D2": "Nothing is left of requests, however they ended.",
            "D4": "A submission that fails leaves nothing, and its successor works.",
            "D5": "The number of descriptors is flat.",
            "D7": "A cache of voices has bounds.",
            "D8": "What is cached is not changed by a request.",
            "D9": "Jobs that nobody fetches are bounded.",
            "D10": "Input audio of a session is bounded.",
        },
    ),
    "N": (
        "Membership that changes",
        {
            "N1": "A replica that joins under load gets work.",
            "N2": "A stage may begin without any replica.",
            "N3": "Messages that are lost, late or repeated do not confuse membership.",
            "N5": "A planned leave costs no request.",
            "N6": "Two processes can't be the same replica.",
            "N7": "Replicas on other hosts outlive the orchestrator.",
            "N8": "Nobody gets work before it is ready; what is missing shows.",
        },
    ),
}
"""Each group with its title and situations."""

REASONS = {
    "A16": "There are no WebSockets yet.",
    "B8": "There are no batches yet; companions, which go together, are row M7 of the contract.",
    "B9": "There are no realtime sessions yet.",
    "B11": "There are no sessions that could be resumed yet.",
    "B12": "There are no asynchronous jobs yet.",
    "D7": "Voices can't be uploaded yet; there is no such cache.",
    "D8": "No stage keeps anything between requests but its weights; row E7 of the contract compares bytes.",
    "D9": "There are no asynchronous jobs yet.",
    "D10": "There are no realtime sessions yet; input that streams is bounded, row M8 of the contract.",
}
"""Why a situation has no test of its own."""

_NAME = re.compile(r"test_situations?_((?:[A-Z]+[0-9]+_)+)")


def tests_by_situation() -> dict[str, list[str]]:
    """Return for each situation the tests named after it, as `path::name`, sorted."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for folder in ("tests", "stretto/testing"):
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    continue
                if match := _NAME.match(node.name):
                    for name in match.group(1).strip("_").split("_"):
                        found[name].append(f"{path.relative_to(REPOSITORY)}::{node.name}")
    return found


def unexplained() -> list[str]:
    """Return what does not fit together.

    That is: situations with neither a test nor a reason, those with both, and names of these sections in
    tests and reasons that no row has.
    """
    found = tests_by_situation()
    names = [name for _, rows in SITUATIONS.values() for name in rows]
    strays = [name for name in (*found, *REASONS) if name[0] in SITUATIONS and name not in names]
    return [name for name in names if (name in found) == (name in REASONS)] + strays


def page() -> str:
    """Return the page's text."""
    found = tests_by_situation()
    parts = [INTRODUCTION]
    for letter, (title, rows) in SITUATIONS.items():
        parts += [f"## {letter}. {title}", "", "| | situation | shown by |", "| --- | --- | --- |"]
        for name, text in rows.items():
            tests = "<br>".join(f"`{test}`" for test in found.get(name, ()))
            parts.append(f"| {name} | {text} | {tests or REASONS.get(name, 'nothing yet')} |")
        parts.append("")
    return "\n".join(parts)


if __name__ == "__main__":
    TARGET.write_text(page())
