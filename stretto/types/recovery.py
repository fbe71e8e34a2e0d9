"""What may be done with a task whose replica died, and where it can be taken up again."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import msgspec

from stretto.types.ids import EdgeId

Recovery: TypeAlias = Literal["fail", "retry", "replay"]
"""`fail` never repeats a task; `retry` repeats one of which nothing was forwarded; `replay` repeats any,
since its output depends on its inputs and options alone, and leaves out what was forwarded."""

_STRENGTH: Final[tuple[Recovery, ...]] = ("fail", "retry", "replay")


def weakest(*recoveries: Recovery) -> Recovery:
    """Return what all of them allow."""
    return min(recoveries, key=_STRENGTH.index)


class Boundary(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A place in a task's output behind which a later attempt can go on, without the inputs before it.

    Attributes:
        token: What the backend needs to know; opaque to everybody else.
        edges: Per input edge, how many of its chunks are not needed again, and how many inputs the
            backend has used up of what the edge's adapter makes of the chunks after those.
    """

    token: bytes
    edges: dict[EdgeId, tuple[int, int]]
