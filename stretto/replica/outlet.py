"""Chunks on their way out: checked, trimmed after a retry, encoded, stored.

It must not know which form of backend made them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from stretto.backends.contract import Chunk
from stretto.errors import StageError
from stretto.replica.tasks import Output
from stretto.transport import codec
from stretto.types import SHARED_MEMORY, PayloadRef

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from stretto.backends.contract import OutputValue
    from stretto.transport.payload_store import PayloadWriter


class Outlet:
    """Stores the values of chunks; all tasks share it.

    Payloads are put in the thread that makes them, and freed where the orchestrator's message arrives.
    """

    def __init__(self, writer: PayloadWriter) -> None:
        self._writer = writer

    def put_all(self, chunks: Iterable[Chunk]) -> list[Output]:
        """Store chunks, all or none.

        Raises:
            StageError: One has a value that payloads can't carry.
        """
        outputs: list[Output] = []
        try:
            for chunk in chunks:
                outputs.append(self._put(chunk))  # noqa: PERF401 - what is stored must be known if the next one fails
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
        self.free(payload.key for payload in payloads if payload.place == SHARED_MEMORY)

    def _put(self, chunk: Chunk) -> Output:
        payload, body = self._writer.put(codec.encode(chunk.values))
        return Output(
            payload=payload,
            body=body,
            length=chunk.length,
            kind=chunk.kind,
            media_s=chunk.media_s,
            boundary=chunk.boundary,
        )


class Trimmer:
    """Checks a task's chunks and leaves out the units that an earlier attempt has already forwarded."""

    def __init__(self, skip_units: int) -> None:
        self._left = skip_units

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
        if chunk.kind == "preview" or not self._left:
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
    """Cut `skip` units off the front; possible if every array has one item per unit."""
    cut: dict[str, OutputValue] = {}
    has_array = False
    for name, value in values.items():
        if value is None or isinstance(value, (str, int, float, bool)):
            cut[name] = value
            continue
        view = memoryview(value)
        if view.shape != (length,):
            raise StageError(
                f"a retry starts within a chunk, and its value {name!r} has shape {view.shape}, so it "
                f"can't be cut after {skip} of {length} units"
            )
        cut[name] = view[skip:]
        has_array = True
    if not has_array:
        raise StageError("a retry starts within a chunk that has no array to cut")
    return cut
