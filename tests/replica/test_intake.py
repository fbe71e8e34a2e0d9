"""Payloads on their way in: adapters, ends of edges, and when a view is gone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from stretto.core.commands import UNLIMITED
from stretto.errors import ConfigError, PayloadLost
from stretto.messages.link import Open
from stretto.replica.intake import AdapterShop, Intake
from stretto.replica.tasks import Arrival
from stretto.transport import PayloadReader, PayloadWriter, encode
from stretto.types import INLINE, SHARED_MEMORY, EdgeId, Payload, PayloadRef, PipelineName
from tests.replica.rig import TEXT, edge, task_key

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from stretto.backends.contract import Input
    from stretto.core.graph import EdgeSpec


class Pairs:
    """An adapter that joins two texts into one input and gives the rest at the end."""

    def __init__(self) -> None:
        self._kept: list[str] = []

    def __call__(self, payload: Payload, final: bool) -> Sequence[Payload]:  # noqa: FBT001 - the shape of an Adapter
        """Join."""
        if payload:
            self._kept.append(str(payload["text"]))
        if len(self._kept) == 2 or (final and self._kept):
            joined, self._kept = "+".join(self._kept), []
            return ({"text": joined},)
        return ()


def split(payload: Payload, final: bool) -> Sequence[Payload]:  # noqa: FBT001 - the shape of an Adapter
    """Give one input per word."""
    return [{"text": word} for word in str(payload.get("text", "")).split() if not final]


def make_split() -> object:
    """Return an adapter without state."""
    return split


def intake(*edges: EdgeSpec, reader: PayloadReader | None = None) -> Intake:
    """Return the input side of a task with these edges."""
    message = Open(task_key(), PipelineName("test"), edges, None, 0, UNLIMITED, UNLIMITED)
    return Intake(message, reader, AdapterShop())


def chunk(text: str, seq: int = 0, on: EdgeSpec = TEXT) -> Arrival:
    """Return a small chunk."""
    body = encode({"text": text}).join()
    return Arrival(on, PayloadRef(INLINE, "", len(body)), seq, body)


def end(on: EdgeSpec = TEXT) -> Arrival:
    """Return the end of an edge."""
    return Arrival(on, None)


def seen(item: Input) -> tuple[str, object, bool, bool]:
    """Return what matters of an input."""
    return item.name, item.payload.get("text"), item.final, item.last


def drain(side: Intake, cursors: dict[EdgeId, int] | None = None) -> list[Input]:
    """Take every input that can be made."""
    items: list[Input] = []
    side.absorb({} if cursors is None else cursors)
    while side.pending:
        items.append(side.take())
        side.absorb({} if cursors is None else cursors)
    return items


def test_without_an_adapter_chunks_are_inputs_and_the_end_is_one() -> None:
    """The last item of a task is its own, so that timing never decides which items there are."""
    side = intake(TEXT)
    side.add([chunk("a"), chunk("b", 1), end()])
    assert [seen(item) for item in drain(side)] == [
        ("text", "a", False, False),
        ("text", "b", False, False),
        ("text", None, True, True),
    ]


def test_a_chunk_is_absorbed_only_when_an_input_is_needed() -> None:
    """Chunks that nobody needs yet stay unconsumed, so their window closes."""
    side = intake(TEXT)
    side.add([chunk("a"), chunk("b", 1)])
    cursors: dict[EdgeId, int] = {}
    side.absorb(cursors)
    side.absorb(cursors)
    assert cursors == {TEXT.id: 1}
    assert side.has_backlog


def test_an_adapter_that_makes_nothing_gets_the_next_chunk_at_once() -> None:
    """Credit for a chunk does not wait until the adapter makes something of it."""
    on = edge(adapter=f"{__name__}:Pairs")
    side = intake(on)
    cursors: dict[EdgeId, int] = {}
    side.add([chunk("a", 0, on)])
    side.absorb(cursors)
    assert cursors == {on.id: 1}
    assert not side.pending
    side.add([chunk("b", 1, on), chunk("c", 2, on), end(on)])
    assert [seen(item) for item in drain(side)] == [
        ("text", "a+b", False, False),
        ("text", "c", True, True),
    ]


def test_an_adapter_may_make_several_inputs_of_a_chunk() -> None:
    """The chunk after it is not absorbed before all of them are used up."""
    on = edge(adapter=f"{__name__}:make_split")
    side = intake(on)
    side.add([chunk("a b c", 0, on), chunk("d", 1, on)])
    cursors: dict[EdgeId, int] = {}
    side.absorb(cursors)
    assert [made.input.payload["text"] for made in side.pending] == ["a", "b", "c"]
    side.take()
    side.absorb(cursors)
    assert cursors == {on.id: 1}


def test_every_task_and_edge_has_an_adapter_of_its_own() -> None:
    """What one adapter keeps never reaches another one."""
    on = edge(adapter=f"{__name__}:Pairs")
    first, second = intake(on), intake(on)
    for side, text in ((first, "a"), (second, "b")):
        side.add([chunk(text, 0, on), end(on)])
    assert [drain(side)[0].payload["text"] for side in (first, second)] == ["a", "b"]


def test_the_task_ends_with_the_end_of_its_last_edge() -> None:
    """Each edge's end is final, only the last one's is last."""
    one, other = edge("one"), edge("other")
    side = intake(one, other)
    side.add([chunk("a", 0, one), end(one), chunk("b", 0, other), end(other)])
    assert [seen(item)[0::1] for item in drain(side)] == [
        ("one", "a", False, False),
        ("one", None, True, False),
        ("other", "b", False, False),
        ("other", None, True, True),
    ]


def test_a_missing_adapter_says_which_and_what_to_do() -> None:
    """The text names the adapter and the module that lacks it."""
    side = intake(edge(adapter=f"{__name__}:missing"))
    side.add([chunk("a", 0, edge(adapter=f"{__name__}:missing"))])
    with pytest.raises(ConfigError, match=r"has no 'missing'; check the spelling"):
        side.absorb({})


@pytest.fixture
def shared(tmp_path: Path) -> tuple[PayloadWriter, PayloadReader]:
    """Return a store that puts everything into files."""
    writer = PayloadWriter(str(tmp_path), "w", 1 << 20, inline_limit=0)
    return writer, PayloadReader(str(tmp_path))


def shared_chunk(writer: PayloadWriter, data: bytes) -> Arrival:
    """Return a chunk in shared memory."""
    payload, body = writer.put(encode({"data": memoryview(data)}))
    assert payload.place == SHARED_MEMORY
    return Arrival(TEXT, payload, 0, body)


def test_a_payload_is_viewed_when_no_view_remains(
    shared: tuple[PayloadWriter, PayloadReader],
) -> None:
    """A view that is still alive holds the payload; the next look finds it gone."""
    writer, reader = shared
    side = intake(TEXT, reader=reader)
    arrival = shared_chunk(writer, b"0123")
    side.add([arrival])
    side.absorb({})
    view = side.pending[0].input.payload["data"]
    assert isinstance(view, memoryview)
    assert bytes(view) == b"0123"
    side.take()
    assert side.viewed() == []
    del view
    assert side.viewed() == [arrival.payload]
    assert side.viewed() == []


def test_closing_reports_payloads_that_were_never_opened(
    shared: tuple[PayloadWriter, PayloadReader],
) -> None:
    """Whoever holds them must hear that this task does not."""
    writer, reader = shared
    side = intake(TEXT, reader=reader)
    arrivals = [shared_chunk(writer, b"a"), shared_chunk(writer, b"b"), chunk("inline")]
    side.add(arrivals)
    side.absorb({})
    assert side.close() == [arrivals[0].payload, arrivals[1].payload]


def test_a_payload_whose_file_is_gone_is_lost(
    shared: tuple[PayloadWriter, PayloadReader],
) -> None:
    """The error says so; the task fails with it."""
    writer, reader = shared
    side = intake(TEXT, reader=reader)
    side.add([shared_chunk(writer, b"a")])
    writer.close()
    with pytest.raises(PayloadLost):
        side.absorb({})


def test_shared_memory_needs_a_directory() -> None:
    """A replica that was told of none can't read such a payload."""
    side = intake(TEXT)
    side.add([Arrival(TEXT, PayloadRef(SHARED_MEMORY, "w.0", 10))])
    with pytest.raises(PayloadLost, match="not told of"):
        side.absorb({})
