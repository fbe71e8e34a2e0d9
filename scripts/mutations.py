"""Mutations of router and shell, each with the tests that must see it.

    scripts/mutate            # all, in a copy of the tree
    scripts/mutate credit     # those whose name has this part

Prints one line per mutation: the test that turned red, or SURVIVED. Exit code 1 says that one survived.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
CORE = ("tests/core", "tests/machine")
SHELL = ("tests/orchestrator",)
REPLICA = ("tests/replica",)


@dataclass(frozen=True)
class Mutation:
    """One way to be wrong.

    Attributes:
        name: What is wrong then.
        path: The file, under `stretto/`.
        old: What stands there, exactly once.
        new: What stands there instead.
        tests: What to run.
    """

    name: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTATIONS = (
    Mutation(
        "drop the incarnation check",
        "core/slots.py",
        "return place if place.id == replica and place.phase in LIVE else None",
        "return place if place.phase in LIVE else None",
        CORE,
    ),
    Mutation(
        "skip the attempt check",
        "core/router.py",
        "if request is None or task is None or task.key != event.task:",
        "if request is None or task is None:",
        CORE,
    ),
    Mutation(
        "accept any order of chunks",
        "core/router.py",
        "(event.seq == task.produced and task.has_credit)",
        "task.has_credit",
        CORE,
    ),
    Mutation(
        "free the slot when the request fails",
        "core/router.py",
        "            if task.state is TaskState.BOUND:\n                self._cancel_task(request, task)\n"
        "            elif task.state is not TaskState.FINISHED:\n",
        "            if task.state is TaskState.BOUND:\n                self._unbind(task)\n"
        "            elif task.state is not TaskState.FINISHED:\n",
        CORE,
    ),
    Mutation(
        "repeat a task that can't be",
        "core/router.py",
        "        elif task.may_repeat:\n            self._repeat",
        "        elif task.keeps_inputs or True:\n            self._repeat",
        CORE,
    ),
    Mutation(
        "forget what was forwarded when replaying",
        "core/router.py",
        "                skip_units=task.units,\n",
        "                skip_units=0,\n",
        CORE,
    ),
    Mutation(
        "drop inputs before their boundary was fed",
        "core/router.py",
        "            while edge.base < chunks:\n",
        "            while edge.base < chunks + 1 and edge.chunks:\n",
        CORE,
    ),
    Mutation(
        "never call a request poison",
        "core/router.py",
        "if task.deaths >= self._limits.poison_deaths:",
        "if task.deaths > 1000:",
        CORE,
    ),
    Mutation(
        "count deaths across new chunks",
        "core/requests.py",
        "        self.media_s += media_s\n        self.deaths = 0\n",
        "        self.media_s += media_s\n",
        CORE,
    ),
    Mutation(
        "evict a slow replica",
        "core/supervision.py",
        "if has_work and now >= silent_since + timeout_s:",
        "if now >= place.alive_at + timeout_s / 3:",
        CORE,
    ),
    Mutation(
        "give a suspect new work",
        "core/supervision.py",
        "leave_ready(place, ReplicaPhase.SUSPECT, now)",
        "leave_ready(place, ReplicaPhase.READY, now)",
        CORE,
    ),
    Mutation(
        "restart a drained replica",
        "core/supervision.py",
        "if place.phase is ReplicaPhase.DRAINING or place.is_joined:",
        "if place.is_joined:",
        CORE,
    ),
    Mutation(
        "keep a crash loop going",
        "core/slots.py",
        "if for_good or len(self.deaths) >= limits.breaker_deaths:",
        "if for_good:",
        CORE,
    ),
    Mutation(
        "grant beyond the window",
        "core/requests.py",
        "chunks = min(chunks, sink.consumed + sink.window_chunks)",
        "chunks = min(chunks, sink.consumed + sink.window_chunks + 1)",
        CORE,
    ),
    Mutation(
        "start one companion without the other",
        "core/router.py",
        "if request.state is _QUEUED and not (request.is_leader and request.is_complete):",
        "if request.state is _QUEUED and not request.is_leader:",
        CORE,
    ),
    Mutation(
        "let a leader finish before its companions",
        "core/router.py",
        "if request.is_leader and any(each.state is _RUNNING for each in request.party[1:]):",
        "if False:",
        CORE,
    ),
    Mutation(
        "feed past the end of an input",
        "core/router.py",
        "            edge.has_ended = True\n        return edges",
        "            edge.has_ended = False\n        return edges",
        CORE,
    ),
    Mutation(
        "let a leader wait for a refused companion",
        "core/router.py",
        "            if leader is not None:\n                self._fail(leader",
        "            if False:\n                self._fail(leader",
        CORE,
    ),
    Mutation(
        "let a party that can't fit hold up the line",
        "core/admission.py",
        "if self._needs.get(request, 1) <= most:",
        "if most:",
        CORE,
    ),
    Mutation(
        "charge the client for a stage's time",
        "core/router.py",
        "if edge.spec.source is None and event.up_to > edge.consumed:",
        "if False:",
        CORE,
    ),
    Mutation(
        "wait for ever for the end of a full input",
        "core/requests.py",
        "is_used = edge.consumed == edge.produced or not _streams(edge)",
        "is_used = edge.consumed == edge.produced",
        CORE,
    ),
    Mutation(
        "keep any number of small pieces",
        "core/router.py",
        "or request.kept_chunks > MAX_KEPT_CHUNKS",
        "or False",
        CORE,
    ),
    Mutation(
        "say that a replica at work rests",
        "replica/tasks.py",
        "if self._told and not self._tasks:",
        "if self._told:",
        REPLICA,
    ),
    Mutation(
        "tell a channel's death to nobody",
        "core/router.py",
        'self._cancel(self._requests[request_id], "its API process is gone")',
        "pass",
        CORE,
    ),
    Mutation(
        "release a payload that a replica views",
        "core/router.py",
        "                task.held[payload] = task.held.get(payload, 0) + 1\n"
        "                self._holds.hold(payload)\n",
        "                pass\n",
        CORE,
    ),
    Mutation(
        "handle an event inside another one",
        "orchestrator/dispatcher.py",
        "        box.events.append(event)\n",
        "        box.events.appendleft(event)\n",
        SHELL,
    ),
    Mutation(
        "take a whole flood in one turn",
        "orchestrator/dispatcher.py",
        "min(EVENTS_PER_TURN, len(events))",
        "len(events)",
        SHELL,
    ),
    Mutation(
        "let a broken link end the engine",
        "orchestrator/links.py",
        "            except Exception as error:\n                log.exception",
        "            except ZeroDivisionError as error:\n                log.exception",
        SHELL,
    ),
    Mutation(
        "report a death twice",
        "orchestrator/links.py",
        "        found = self._links.pop(replica, None)\n",
        "        found = self._links.get(replica)\n",
        SHELL,
    ),
    Mutation(
        "accept a stranger",
        "orchestrator/links.py",
        "or not hmac.compare_digest(found.nonce.encode(), message.nonce.encode())",
        "or not hmac",
        SHELL,
    ),
    Mutation(
        "fail every request for one refused event",
        "orchestrator/dispatcher.py",
        "        if request is None:\n            raise error\n",
        "        raise error\n",
        SHELL,
    ),
    Mutation(
        "count credit at the adapter's output",
        "replica/intake.py",
        "            else:\n                cursors[edge.id] = arrival.seq + 1\n",
        "            elif inputs:\n                cursors[edge.id] = arrival.seq + 1\n",
        REPLICA,
    ),
    Mutation(
        "send what was forwarded again",
        "replica/outlet.py",
        "        if chunk.length <= self._left:\n",
        "        if chunk.length < self._left:\n",
        REPLICA,
    ),
    Mutation(
        "use up inputs that come again",
        "replica/intake.py",
        "            if not self._left_out[edge]:\n",
        "            if True:\n",
        (*REPLICA, "tests/e2e/test_recovery.py"),
    ),
)


def main(wanted: str) -> int:
    """Apply each mutation in a copy of the tree and run its tests."""
    survivors = 0
    with tempfile.TemporaryDirectory(prefix="stretto-mutate-") as name:
        copy = Path(name) / "tree"
        shutil.copytree(
            REPOSITORY, copy, symlinks=True, ignore=shutil.ignore_patterns(".git", ".venv", "site")
        )
        chosen = [mutation for mutation in MUTATIONS if wanted in mutation.name]
        for number, mutation in enumerate(chosen, 1):
            began = time.monotonic()
            red = first_red(copy, mutation)
            survivors += red is None
            took_s = time.monotonic() - began
            print(
                f"{number:2}/{len(chosen)} {mutation.name}: {red or 'SURVIVED'} ({took_s:.0f} s)",
                flush=True,
            )
    print(f"{len(chosen) - survivors} of {len(chosen)} mutations were seen")
    return bool(survivors)


def first_red(copy: Path, mutation: Mutation) -> str | None:
    """Return the first test that fails under a mutation; `None` if all pass."""
    path = copy / "stretto" / mutation.path
    text = path.read_text()
    path.write_text(mutated(text, mutation))
    try:
        done = subprocess.run(  # noqa: S603 - our own tests
            [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *mutation.tests],
            cwd=copy,
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        path.write_text(text)
    if not done.returncode:
        return None
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return found.group(1) if found else f"exit code {done.returncode}"


def mutated(text: str, mutation: Mutation) -> str:
    """Return a file's text with a mutation.

    Raises:
        LookupError: What is to be replaced is not there exactly once: the list is stale.
    """
    if text.count(mutation.old) != 1:
        raise LookupError(
            f"{mutation.name}: {mutation.path} has it {text.count(mutation.old)} times"
        )
    return text.replace(mutation.old, mutation.new)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else ""))
