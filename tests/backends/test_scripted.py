"""The scripted backend does what its script says, and its audio shows every fault."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.backends.contract import Input, More, Task
from stretto.backends.scripted import (
    Player,
    Script,
    Scripted,
    ScriptedBreak,
    ScriptedStream,
    check_counter_audio,
    counter_audio,
    tag_of,
)
from stretto.errors import InvalidRequest, StageError
from stretto.testing.backend_suite import check_backend
from stretto.transport import decode
from stretto.types import RequestId, StageId, TaskKey

if TYPE_CHECKING:
    from stretto.backends.contract import Outcome
    from stretto.types import Payload

TEXTS: list[list[Payload]] = [[{"text": "one"}], [{"text": "two"}, {"text": "more"}]]
samples = st.integers(0, 2**18)
counts = st.integers(0, 500)
tags = st.integers(0, 2**16 - 1)


def task(**options: str | int) -> Task:
    """Return a task with these options."""
    key = TaskKey(RequestId("r"), StageId("relay"), 0)
    return Task(key=key, stage=key.stage, options=options)


def play(script: Script, *payloads: Payload, limit: int = 100) -> list[Outcome]:
    """Return the outcomes of a task whose script is played to its end."""
    player = Player(script, task())
    outcomes: list[Outcome] = []
    for payload in payloads or ({"text": "x"},):
        item = Input(name="text", payload=payload)
        while len(outcomes) < limit:
            outcomes.append(player.step(item))
            if not isinstance(outcomes[-1], More):
                break
    return outcomes


def values(outcome: Outcome) -> list[object]:
    """Return the values of an outcome's chunks."""
    assert not isinstance(outcome, Exception)
    chunks = outcome if isinstance(outcome, (list, tuple)) else outcome.chunks  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]
    return [dict(chunk.values) for chunk in chunks]  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType, reportUnknownArgumentType]


@pytest.mark.parametrize("backend", [Scripted, ScriptedStream])
@pytest.mark.parametrize("script", [{}, {"mode": "upper"}, {"mode": "echo"}, {"chunks": 1}])
def test_both_forms_keep_the_contract(
    backend: type[Scripted | ScriptedStream], script: dict[str, object]
) -> None:
    """The public suite finds nothing, whatever the mode."""
    check_backend(backend(script=script), TEXTS)


@pytest.mark.parametrize("backend", [Scripted, ScriptedStream])
def test_both_forms_do_the_same(backend: type[Scripted | ScriptedStream]) -> None:
    """One input's chunks follow each other, and so do the inputs."""
    chunks = check_backend(backend(script={"chunks": 3, "bytes": 100}), TEXTS)
    for made, text, inputs in zip(chunks, ("one", "two"), (1, 2), strict=True):
        audio = b"".join(bytes(decode(chunk.data)["audio"]) for chunk in made)  # pyright: ignore[reportArgumentType]
        assert check_counter_audio(audio, tag_of(text)) == inputs * 3 * 50


@given(tag=tags, start=samples, first=counts, second=counts)
def test_counter_audio_is_one_stream_however_it_is_cut(
    tag: int, start: int, first: int, second: int
) -> None:
    """Two pieces joined are the whole."""
    joined = counter_audio(tag, start, first) + counter_audio(tag, start + first, second)
    assert joined == counter_audio(tag, start, first + second)
    assert check_counter_audio(joined, tag, start) == first + second


@given(tag=tags, start=st.integers(0, 300), count=st.integers(4, 300), shift=st.integers(1, 2**18))
def test_counter_audio_shows_loss_repetition_and_exchange(
    tag: int, start: int, count: int, shift: int
) -> None:
    """A piece from elsewhere in the stream, or of another one, is never taken for the next one."""
    good = counter_audio(tag, 0, start)
    with pytest.raises(AssertionError, match="is wrong: it looks like"):
        check_counter_audio(good + counter_audio(tag, start + shift, count), tag)
    other = (tag + shift) % 2**16
    if other != tag:
        with pytest.raises(AssertionError):
            check_counter_audio(good + counter_audio(other, start, count), tag)


def test_the_error_says_what_the_wrong_samples_look_like() -> None:
    """Cross-talk names the other stream, so that a test's failure tells where it came from."""
    audio = counter_audio(7, 0, 10) + counter_audio(9, 40, 10)
    with pytest.raises(AssertionError, match=r"sample 10 of tag 7 .* like sample 40 of tag 9"):
        check_counter_audio(audio, 7)
    with pytest.raises(AssertionError, match="no whole number"):
        check_counter_audio(counter_audio(7, 0, 10)[:-1], 7)


def test_count_makes_so_many_chunks_of_each_input() -> None:
    """All but the input's last one say that more follows."""
    outcomes = play(Script(chunks=3, bytes=8), {"text": "x"}, {"text": "y"})
    assert [isinstance(outcome, More) for outcome in outcomes] == [True, True, False] * 2


def test_echo_and_upper_pass_inputs_on() -> None:
    """Other values than text stay as they are."""
    (echoed,) = play(Script(mode="echo"), {"text": "a", "n": 1})
    assert values(echoed) == [{"text": "a", "n": 1}]
    (upper,) = play(Script(mode="upper"), {"text": "a", "n": 1})
    assert values(upper) == [{"text": "A", "n": 1}]


def test_delays_are_pauses_before_chunks() -> None:
    """The first chunk's is its own; nothing sleeps here."""
    outcomes = play(Script(chunks=2, first_delay_s=0.5, delay_s=0.25))
    pauses = [o.after_s for o in outcomes if isinstance(o, More)]
    assert pauses == [0.5, 0.0, 0.25]


def test_silence_has_no_end() -> None:
    """After so many chunks the task only waits."""
    outcomes = play(Script(silent_after=2), limit=5)
    assert [len(values(outcome)) for outcome in outcomes] == [1, 1, 0, 0, 0]
    assert [o.after_s for o in outcomes if isinstance(o, More)] == [0, 0] + [math.inf] * 3


def test_failures_come_at_their_chunk() -> None:
    """`fail_at` is the task's, `break_at` the step's."""
    *before, failure = play(Script(fail_at=2))
    assert len(before) == 2
    assert isinstance(failure, StageError)
    with pytest.raises(ScriptedBreak):
        play(Script(break_at=1))


def test_chunks_may_be_empty_or_missing() -> None:
    """An empty chunk is a chunk without samples; a bare terminal is no chunk at all."""
    outcomes = play(Script(chunks=2, empty_chunks=True))
    assert [values(outcome) for outcome in outcomes] == [[{"audio": b""}]] * 2
    assert play(Script(bare_terminal=True)) == [()]


def test_a_request_changes_single_fields_of_the_stages_script() -> None:
    """For all stages, or by stage id with `*` for the others."""
    backend = Scripted(script={"chunks": 2, "bytes": 8})
    item = Input(name="text", payload={"text": "x"})
    flat = backend.open(task(script='{"chunks": 1, "tag": 5}'))
    assert values(flat.step(item)) == [{"audio": counter_audio(5, 0, 4)}]
    nested = '{"*": {"chunks": 1, "tag": 5}, "relay": {"tag": 6}, "other": {"tag": 7}}'
    player = backend.open(task(script=nested))
    outcome = player.step(item)
    assert values(outcome) == [{"audio": counter_audio(6, 0, 4)}]
    assert not isinstance(outcome, More)


@pytest.mark.parametrize(
    ("script", "text"),
    [("{", "option `script`"), ('{"chunk": 1}', "fields are mode, chunks"), (7, "is JSON text")],
)
def test_a_wrong_script_is_the_clients_fault(script: str | int, text: str) -> None:
    """The error names the field, and the fields there are."""
    with pytest.raises(InvalidRequest, match=text) as raised:
        Scripted().open(task(script=script))
    assert raised.value.param == "script"


def test_a_stages_wrong_script_stops_the_start() -> None:
    """It is read when the backend is made, not at the first request."""
    with pytest.raises(InvalidRequest, match="chunk_s"):
        Scripted(script={"chunk_s": 1})
