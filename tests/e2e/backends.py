"""Backends for end-to-end tests, run in replicas of their own."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from stretto.backends.scripted import Player, Scripted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.backends.contract import Capabilities, Input, LoadProgress, Outcome


class Patient(Scripted):
    """A step may take as long as usual."""


class Impatient(Scripted):
    """A step of more than half a second has hung."""

    capabilities: ClassVar[Capabilities] = replace(Scripted.capabilities, max_step_s=0.5)


class Fragile(Scripted):
    """One that has no memory for a text with `big` in it, and gives up altogether at `quit`, once."""

    def step(self, items: Sequence[tuple[Player, Input]]) -> Sequence[Outcome]:
        """Play, unless a text says otherwise."""
        for player, item in items:
            if "quit" in str(item.payload.get("text")) and not player.attempt:
                raise SystemExit(3)
        outcomes = super().step(items)
        return [
            MemoryError("no memory for this") if "big" in str(item.payload.get("text")) else outcome
            for (_, item), outcome in zip(items, outcomes, strict=True)
        ]


STUBBORN = """
import signal, sys
for line in sys.stdin:
    print(end=line, flush=True)
signal.pause()
"""
"""Answers each line with the same line, and does not end by itself."""


class Paired(Scripted):
    """One that is two processes, which meet at every step; without the other one it gives up."""

    def load(self, progress: LoadProgress) -> None:
        """Start the other process."""
        super().load(progress)
        self._other = subprocess.Popen(
            [sys.executable, "-c", STUBBORN], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def step(self, items: Sequence[tuple[Player, Input]]) -> Sequence[Outcome]:
        """Play once the other process has come, too."""
        there, back = self._other.stdin, self._other.stdout
        assert there is not None
        assert back is not None
        try:
            there.write(b"\n")
            there.flush()
        except BrokenPipeError:
            raise SystemExit(3) from None
        if not back.readline():
            raise SystemExit(3)
        return super().step(items)
