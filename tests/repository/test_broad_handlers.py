"""Where any exception may be caught: at the few places where foreign code or a process ends."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

import pytest

from tests.repository.project import PACKAGE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ALLOWED = {
    "engine/channel.py:Channel._die": "one waiter that can't be told must not keep another waiting",
    "engine/loop_thread.py:LoopThread._run": "the top of the thread: its end is told at home",
    "errors/__init__.py:text_of": "an exception's own text is foreign code",
    "orchestrator/channels.py:_guarded": "a step of the end that fails must not skip the others",
    "orchestrator/dispatcher.py:Dispatcher._turn": "the router's state is unknown: the engine ends",
    "orchestrator/links.py:Links._on_frame": "whatever one link brings up evicts that replica only",
    "replica/calls.py:Calls._hold": "whatever a called method raises fails its call only",
    "replica/compute.py:ComputeThread.submit.run": "the loop must learn of whatever ended the call",
    "replica/compute.py:attempt": "whatever a backend raises fails its task only",
    "replica/process.py:_live": "the top of the process: report, then exit",
    "replica/runtime.py:Replica._load": "a model may fail to load in any way",
    "replica/streaming.py:StreamDriver._play": "whatever a backend raises fails its task only",
    "sim/storm.py:storms": "a world may break in any way; its seed is told",
    "testing/backend_suite.py:_Check._play_stream": "as in the replica, whose part it plays",
    "testing/backend_suite.py:_step": "as in the replica, whose part it plays",
}
"""Place and reason. A handler that ends by raising swallows nothing, and is not counted."""

BROAD = {"Exception", "BaseException"}


def broad_handlers(path: Path) -> Iterator[str]:
    """Yield `file:function` for each handler that swallows any exception."""
    place = path.relative_to(PACKAGE).as_posix()
    stack: list[tuple[str, ast.AST]] = [("", ast.parse(path.read_text()))]
    while stack:
        scope, node = stack.pop()
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            scope = f"{scope}.{node.name}" if scope else node.name
        if isinstance(node, ast.ExceptHandler) and is_broad(node) and not raises(node):
            yield f"{place}:{scope}"
        stack.extend((scope, child) for child in ast.iter_child_nodes(node))


def is_broad(handler: ast.ExceptHandler) -> bool:
    """Say whether a handler takes any exception."""
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(kind is None or (isinstance(kind, ast.Name) and kind.id in BROAD) for kind in kinds)


def raises(handler: ast.ExceptHandler) -> bool:
    """Say whether a handler's last statement raises: what it caught, or an error of ours."""
    return isinstance(handler.body[-1], ast.Raise)


@pytest.mark.slow
def test_any_exception_is_caught_at_the_listed_places_only() -> None:
    """A new place where everything is caught needs a reason in the list; a gone one leaves it."""
    found = {place for path in PACKAGE.rglob("*.py") for place in broad_handlers(path)}
    assert found == set(ALLOWED)
