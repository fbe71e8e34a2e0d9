"""Chunks on their way out: checks, trimming and storing."""

from __future__ import annotations

import math
from array import array
from fractions import Fraction
from typing import TYPE_CHECKING, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.backends.contract import Chunk
from stretto.errors import StageError
from stretto.replica.outlet import Outlet, Trimmer, metrics_of
from stretto.transport import PayloadWriter
from stretto.types import Boundary

if TYPE_CHECKING:
    from pathlib import Path


class _Origin:
    """An input side without edges, to which payloads came at once."""

    def behind(self, token: bytes) -> Boundary:
        """Return a boundary without edges."""
        return Boundary(token, {})

    def take_transfer_s(self) -> float:
        """Return nothing."""
        return 0.0


ORIGIN = _Origin()


def audio(start: int, count: int) -> Chunk:
    """Return a chunk of numbered samples."""
    values = {"audio": array("h", range(start, start + count)), "rate_hz": 24_000}
    return Chunk(values=values, length=count, media_s=float(count))


def samples(chunks: list[Chunk]) -> list[int]:
    """Return the samples of all chunks."""
    whole = array("h")
    for chunk in chunks:
        piece = chunk.values["audio"]
        assert isinstance(piece, (array, memoryview))
        whole.frombytes(piece.tobytes())
    return whole.tolist()


@given(sizes=st.lists(st.integers(0, 5), max_size=8), skip=st.integers(0, 30))
def test_a_retry_delivers_exactly_the_units_after_the_skipped_ones(
    sizes: list[int], skip: int
) -> None:
    """Whole chunks are left out and the straddling one is cut."""
    chunks: list[Chunk] = []
    for size in sizes:
        chunks.append(audio(sum(sizes[: len(chunks)]), size))
    kept = Trimmer(skip).kept(chunks)
    assert samples(kept) == list(range(min(skip, sum(sizes)), sum(sizes)))
    assert sum(chunk.length for chunk in kept) == max(0, sum(sizes) - skip)
    assert sum(chunk.media_s for chunk in kept) == pytest.approx(max(0, sum(sizes) - skip))


def test_what_is_no_array_of_units_is_not_cut() -> None:
    """Cutting it would be a guess; the error says which value and where."""
    chunk = Chunk(values={"frames": array("f", range(12))}, length=4)
    with pytest.raises(StageError, match=r"'frames' has shape \(12,\).*after 2 of 4"):
        Trimmer(2).kept([chunk])
    with pytest.raises(StageError, match="no array to cut"):
        Trimmer(2).kept([Chunk(values={"text": "four"}, length=4)])


def test_rows_and_bytes_are_cut_by_units() -> None:
    """An array of rows keeps its shape; bytes may be several per unit, as 16-bit samples are."""
    rows = memoryview(array("f", range(12))).cast("B").cast("f", (4, 3))
    (kept,) = Trimmer(3).kept([Chunk(values={"rows": rows, "pcm": bytes(range(8))}, length=4)])
    assert memoryview(cast("memoryview", kept.values["rows"])).tolist() == [[9.0, 10.0, 11.0]]
    assert bytes(cast("memoryview", kept.values["pcm"])) == bytes([6, 7])


def test_a_boundary_is_on_the_last_chunk_only(tmp_path: Path) -> None:
    """What would come behind it could not be made again."""
    outlet = Outlet(PayloadWriter(str(tmp_path), "w", 1 << 20))
    marked = Chunk(values={"data": b"x"}, boundary=b"7")
    (output,) = outlet.put_all([marked], ORIGIN)
    assert output.boundary == ORIGIN.behind(b"7")
    with pytest.raises(StageError, match="boundary"):
        outlet.put_all([marked, marked], ORIGIN)
    alone = Chunk(values={}, length=0, kind="metrics", metrics={"x": 1.0})
    (output,) = outlet.put_all([marked, alone], ORIGIN)
    assert output.boundary is not None, "what is no output is not behind it"
    with pytest.raises(StageError, match="no output"):
        outlet.put_all([Chunk(values={}, kind="metrics", boundary=b"7")], ORIGIN)


def test_previews_are_not_counted_as_forwarded() -> None:
    """Only data has a place in the stream."""
    preview = Chunk(values={}, length=0, kind="preview")
    assert Trimmer(3).kept([preview, audio(0, 3)]) == [preview]


@pytest.mark.parametrize(
    ("made", "text"),
    [(None, "made a NoneType"), (Chunk(values={}, length=-1), "length -1")],
)
def test_what_is_no_chunk_is_refused(made: object, text: str) -> None:
    """The error says what the backend made instead."""
    with pytest.raises(StageError, match=text):
        Trimmer(0).kept([made])


def test_chunks_are_stored_all_or_none(tmp_path: Path) -> None:
    """A value that can't be carried takes the chunks before it back."""
    writer = PayloadWriter(str(tmp_path), "w", 1 << 20, inline_limit=0)
    outlet = Outlet(writer)
    good = Chunk(values={"data": b"x"})
    with pytest.raises(StageError, match="'bad'"):
        outlet.put_all([good, good, Chunk(values={"bad": cast("str", object())})], ORIGIN)
    assert writer.statistics().held == 0
    outputs = outlet.put_all([good], ORIGIN)
    assert writer.statistics().held == 1
    outlet.discard([output.payload for output in outputs])
    assert writer.statistics().held == 0
    writer.close()


def test_row_E21_of_the_metrics_the_last_finite_number_of_each_name_counts() -> None:
    """Whatever can be a number is one; what is no chunk has none."""
    told: list[dict[str, object]] = [
        {"a": 1, "b": math.nan},
        {"a": Fraction(1, 2), "c": True},
        {"a": math.inf},
    ]
    chunks = [Chunk(values={}, metrics=cast("dict[str, float]", each)) for each in told]
    assert metrics_of([*chunks, None]) == {"a": 0.5, "c": 1.0}


@pytest.mark.parametrize(
    ("metrics", "text"),
    [
        ({"a": "1.0"}, "a str as metric 'a': use a number"),
        ({"x" * 33: 1.0}, "at most 32 characters"),
        ({"\ud800": 1.0}, "at most 32 characters"),
        ({3: 1.0}, "metric 3"),
        ({str(n): 1.0 for n in range(33)}, "33 metrics: use at most 32"),
    ],
)
def test_what_is_no_metric_is_the_backends_mistake(metrics: dict[str, float], text: str) -> None:
    """It fails the task, and not the link."""
    with pytest.raises(StageError, match=text):
        metrics_of([Chunk(values={}, metrics=metrics)])


@pytest.mark.parametrize("reason", ["x" * 33, "\ud800"])
def test_a_reason_is_a_short_name(reason: str) -> None:
    """It is kept with every request."""
    with pytest.raises(StageError, match="at most 32 characters"):
        Trimmer(0).kept([Chunk(values={}, finish_reason=reason)])
