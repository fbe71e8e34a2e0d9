"""Chunks on their way out: checked, trimmed after a retry, encoded, stored.

It must not know which form of backend made them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, Protocol, SupportsFloat, cast

from stretto.backends.contract import Chunk
from stretto.errors import StageError
from stretto.replica.tasks import Output
from stretto.transport import codec
from stretto.types import INLINE, MAX_METRICS, Boundary, PayloadRef

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from stretto.backends.contract import OutputValue
    from stretto.transport.payload_store import PayloadWriter


MAX_REASON = 32
"""The longest name of why a task's output ends."""


class Origin(Protocol):
    """What the outlet asks of a task's input side; `stretto.replica.intake.Intake` is one."""

    def behind(self, token: bytes) -> Boundary:
        """Return the boundary behind what is used up now."""
        ...

    def take_transfer_s(self) -> float:
        """Return how long payloads took to come, in seconds, since this was last asked."""
        ...


def metrics_of(chunks: Iterable[object]) -> dict[str, float]:
    """Return what chunks tell about their replica, the last of each name; only finite numbers count.

    Raises:
        StageError: There are too many names, one is too long, or a value is no number.
    """
    found: dict[str, float] = {}
    for chunk in chunks:
        if isinstance(chunk, Chunk):
            for name, value in cast("Mapping[object, object]", chunk.metrics).items():
                number = _number(name, value)
                if math.isfinite(number):
                    found[str(name)] = number
    if len(found) > MAX_METRICS:
        raise StageError(f"the backend reports {len(found)} metrics: use at most {MAX_METRICS}")
    return found


def _number(name: object, value: object) -> float:
    if not isinstance(name, str) or len(name) > MAX_METRICS or not name.isprintable():
        raise StageError(
            f"the backend reports metric {name!r}: use a name of at most {MAX_METRICS} characters"
        )
    if not isinstance(value, SupportsFloat):
        raise StageError(
            f"the backend reports a {type(value).__name__} as metric {name!r}: use a number"
        )
    return float(value)


class Outlet:
    """Stores the values of chunks; all tasks share it.

    Payloads are put in the thread that makes them, and freed where the orchestrator's message arrives.
    """

    def __init__(self, writer: PayloadWriter) -> None:
        self._writer = writer

    def put_all(self, chunks: Sequence[Chunk], intake: Origin) -> list[Output]:
        """Store chunks, all or none; what is nothing but metrics is no output.

        Args:
            chunks: What one outcome made.
            intake: What it was made of.

        Raises:
            StageError: One has a value that payloads can't carry, or a boundary and is not the last.
        """
        outputs: list[Output] = []
        if any(chunk.boundary is not None for chunk in chunks if chunk.kind == "metrics"):
            raise StageError("the backend put a boundary on a chunk that is no output")
        chunks = [chunk for chunk in chunks if chunk.kind != "metrics"]
        if any(chunk.boundary is not None for chunk in chunks[:-1]):
            raise StageError("the backend put a boundary on a chunk with others behind it")
        try:
            for chunk in chunks:
                outputs.append(self._put(chunk, intake))  # noqa: PERF401 - what is stored must be known if the next one fails
        except BaseException:
            self.discard(output.payload for output in outputs)
            raise
        return outputs

    def free(self, keys: Iterable[str]) -> None:
        """Free stored payloads that nobody needs."""
        for key in keys:
            self._writer.release(key)

    def discard(self, payloads: Iterable[PayloadRef]) -> None:
        """Free the payloads of outputs that will not be sent."""
        self.free(payload.key for payload in payloads if payload.place != INLINE)

    def _put(self, chunk: Chunk, intake: Origin) -> Output:
        boundary = None if chunk.boundary is None else intake.behind(chunk.boundary)
        payload, body = self._writer.put(codec.encode(chunk.values))
        return Output(
            payload=payload,
            body=body,
            length=chunk.length,
            kind=cast("Literal['data', 'preview']", chunk.kind),
            media_s=chunk.media_s,
            boundary=boundary,
            transfer_s=intake.take_transfer_s(),
            finish_reason=chunk.finish_reason,
        )


class Trimmer:
    """Checks a task's chunks and leaves out the units that an earlier attempt has already forwarded."""

    def __init__(self, units: int) -> None:
        self._left = units

    def kept(self, chunks: Iterable[object]) -> list[Chunk]:
        """Return what is to be sent.

        Raises:
            StageError: Something is no chunk, or a chunk that must be cut can't be.
        """
        return [kept for chunk in chunks if (kept := self._kept(chunk)) is not None]

    def _kept(self, chunk: object) -> Chunk | None:
        if not isinstance(chunk, Chunk):
            raise StageError(f"the backend made a {type(chunk).__name__} where a Chunk belongs")
        if chunk.length < 0:
            raise StageError(f"the backend made a chunk of length {chunk.length}; use 0 or more")
        if len(chunk.finish_reason) > MAX_REASON or not chunk.finish_reason.isprintable():
            raise StageError(
                f"the backend gives the reason {chunk.finish_reason!r}: use at most {MAX_REASON} characters"
            )
        if chunk.kind != "data" or not self._left:
            return chunk
        if chunk.length <= self._left:
            self._left -= chunk.length
            return None
        skip, self._left = self._left, 0
        return replace(
            chunk,
            values=_cut(chunk.values, skip, chunk.length),
            length=chunk.length - skip,
            media_s=chunk.media_s * (chunk.length - skip) / chunk.length,
        )


def _cut(values: Mapping[str, OutputValue], skip: int, length: int) -> dict[str, OutputValue]:
    """Cut `skip` units off the front; possible if every array has as many rows, or bytes, per unit."""
    cut: dict[str, OutputValue] = {}
    has_array = False
    for name, value in values.items():
        if value is None or isinstance(value, (str, int, float, bool)):
            cut[name] = value
            continue
        cut[name] = _cut_rows(name, memoryview(value), skip, length)
        has_array = True
    if not has_array:
        raise StageError("a retry starts within a chunk that has no array to cut")
    return cut


def _cut_rows(name: str, view: memoryview, skip: int, length: int) -> memoryview:
    shape = view.shape or ()
    is_bytes = view.ndim == 1 and view.format == "B"
    if not shape or shape[0] % length or (shape[0] != length and not is_bytes):
        raise StageError(
            f"a repeated task goes on within a chunk, and its value {name!r} has shape {shape}, so it "
            f"can't be cut after {skip} of {length} units"
        )
    rest = view.cast("B")[view.nbytes // length * skip :]
    if is_bytes:
        return rest
    # typeshed knows literal formats only
    recast = cast("Callable[[str, list[int]], memoryview]", rest.cast)
    return recast(view.format, [length - skip, *shape[1:]])
