"""A backend that tells what was there when its module was imported."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from stretto.backends.contract import Chunk, Input, Outcome, Task
from tests.replica.backends import Copycat

if TYPE_CHECKING:
    from collections.abc import Sequence

SEEN = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"), "numpy": "numpy" in sys.modules}


class Environment(Copycat):
    """Answers each input with what it saw."""

    def step(self, items: Sequence[tuple[Task, Input]]) -> Sequence[Outcome]:
        """Tell it."""
        return [(Chunk(values=SEEN),) if item.payload else () for _, item in items]
