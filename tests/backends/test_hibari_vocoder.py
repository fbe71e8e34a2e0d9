"""The vocoder on synthetic frames: same bytes however they come, and the package's own samples."""

from __future__ import annotations

import hashlib
import importlib
import subprocess
import sys
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.backends.contract import Input
from stretto.backends.hibari_dsp import (
    BINS,
    BLOCK,
    FRAME_WIDTH,
    HOP,
    LOOK_AHEAD,
    PITCH,
    Floats,
    Segment,
    Workspace,
    silence,
)
from stretto.backends.hibari_vocoder import Vocoder
from stretto.errors import InvalidRequest, StageError
from tests.backends.speech import audio_of, chunks_of, inputs, speech_like, spoken, task

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable

VOCODER = Vocoder()
SEGMENTS = [speech_like(frames, seed=frames) for frames in (37, 3, 24)]
CUTS = st.lists(st.integers(1, 40), max_size=12)


def speak(
    segments: list[Floats], cuts: Iterable[int] = (), *, seed: int = 0, bare_end: bool = False
) -> bytes:
    """Return the audio of one task."""
    state = VOCODER.open(task(seed=seed))
    return spoken(VOCODER, state, inputs(segments, cuts, bare_end=bare_end))


@cache
def whole(seed: int) -> bytes:
    """Return the audio of all segments, each fed at once."""
    return speak(SEGMENTS, seed=seed)


@pytest.mark.slow
@given(cuts=CUTS, bare_end=st.booleans())
@settings(max_examples=40, deadline=None)
def test_bytes_do_not_depend_on_the_chunks(cuts: list[int], bare_end: bool) -> None:  # noqa: FBT001
    """Any split of the frames gives the audio of the unsplit segments."""
    assert speak(SEGMENTS, cuts, bare_end=bare_end) == whole(0)


@pytest.mark.slow
@given(
    plans=st.lists(st.tuples(st.integers(0, 3), CUTS), min_size=2, max_size=5),
    order=st.randoms(use_true_random=False),
)
@settings(max_examples=15, deadline=None)
def test_bytes_do_not_depend_on_the_batch(
    plans: list[tuple[int, list[int]]], order: random.Random
) -> None:
    """Tasks with other seeds and chunks in the same steps change nothing."""
    waiting = [
        (VOCODER.open(task(seed=seed)), inputs(SEGMENTS, cuts)[::-1]) for seed, cuts in plans
    ]
    audio = [b""] * len(plans)
    while active := [number for number, (_, items) in enumerate(waiting) if items]:
        batch = order.sample(active, order.randint(1, len(active)))
        outcomes = VOCODER.step(
            [(waiting[number][0], waiting[number][1].pop()) for number in batch]
        )
        for number, outcome in zip(batch, outcomes, strict=True):
            audio[number] += audio_of(outcome)
    assert audio == [whole(seed) for seed, _ in plans]


@pytest.mark.slow
def test_bytes_do_not_depend_on_the_process() -> None:
    """Another replica makes the same audio."""
    code = (
        "import hashlib, sys, tests.backends.test_hibari_vocoder as t;"
        "sys.stdout.write(hashlib.sha256(t.whole(0)).hexdigest())"
    )
    other = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert other.stdout == hashlib.sha256(whole(0)).hexdigest()


@pytest.mark.parametrize("frames", [1, 2, 3, 7, 8, 9, 10, 11, 16, 17, 18, 19, 100])
def test_without_noise_it_is_the_packages_own_synthesis(frames: int) -> None:
    """Whole-utterance synthesis of `hibari.dsp` and ours differ by rounding only."""
    values = speech_like(frames)
    values[:, 2 * BINS : 3 * BINS] = -60.0
    parts = [
        np.ascontiguousarray(values[:, part * BINS : (part + 1) * BINS].T) for part in range(5)
    ]
    dsp: Any = importlib.import_module("hibari.dsp")
    expected: Floats = dsp.synth(*parts, values[:, PITCH], np.random.default_rng(0))
    samples = Segment(0, 0, Workspace()).feed(values, ends=True)
    assert samples.shape == expected.shape == (frames * HOP,)
    peak = float(np.abs(expected).max())
    assert peak > 1e-3
    assert float(np.abs(samples - expected).max()) <= 1e-6 * max(1.0, peak)


@pytest.mark.parametrize("extra", [-1, 0, 1])
@pytest.mark.parametrize("chunk", [1, BLOCK, BLOCK + LOOK_AHEAD, 20])
def test_totals_around_a_chunks_end_give_each_sample_once(chunk: int, extra: int) -> None:
    """A segment of a whole number of chunks, one frame more or less, has `HOP` samples per frame."""
    for chunks in (1, 2, 3, 5):
        frames = chunks * chunk + extra
        segments = [speech_like(frames), speech_like(chunk)] if frames else [speech_like(chunk)]
        audio = speak(segments, range(0, frames, chunk))
        assert len(audio) == 2 * HOP * sum(map(len, segments))
        assert audio == speak(segments)


def test_first_audio_comes_with_the_first_block_and_its_look_ahead() -> None:
    """One frame less gives nothing yet."""
    frames = speech_like(40)
    state = VOCODER.open(task())
    early, rest, *_ = inputs([frames], [BLOCK + LOOK_AHEAD - 1, BLOCK + LOOK_AHEAD])
    assert not chunks_of(VOCODER.step([(state, early)])[0])
    (chunk,) = chunks_of(VOCODER.step([(state, rest)])[0])
    assert chunk.length == (BLOCK - 2) * HOP


def test_the_seed_and_the_segment_decide_the_noise() -> None:
    """Same seed, same bytes; another seed, other bytes; equal segments are not spoken alike."""
    segment = speech_like(20)
    first = speak([segment, segment], seed=5)
    assert first == speak([segment, segment], seed=5)
    assert first != speak([segment, segment], seed=6)
    assert first[: len(first) // 2] != first[len(first) // 2 :]
    assert speak([segment], seed=-1) != speak([segment], seed=2**70 + 1) == speak([segment], seed=1)


def test_noise_is_drawn_anew_for_each_block() -> None:
    """Equal frames of nothing but noise sound unlike in all blocks."""
    hiss = silence(5 * BLOCK)
    hiss[:, 2 * BINS : 3 * BINS] = -4.0
    audio = speak([hiss])
    size = 2 * BLOCK * HOP
    assert len({audio[at : at + size] for at in range(0, len(audio), size)}) == 5


def test_an_end_without_anything_left_gives_no_chunk() -> None:
    """The last input may be empty, and a task may end without a frame."""
    state = VOCODER.open(task())
    *items, end = inputs([speech_like(10)], bare_end=True)
    assert len(spoken(VOCODER, state, items)) == 2 * 10 * HOP
    assert not chunks_of(VOCODER.step([(state, end)])[0])
    assert speak([]) == b""


def test_the_tasks_end_flushes_an_open_segment() -> None:
    """Frames that were never marked as the segment's last are spoken all the same."""
    frames = speech_like(12)
    state = VOCODER.open(task())
    payload = {"frames": frames.data, "segment": 0, "segment_end": False}
    assert (
        len(spoken(VOCODER, state, [Input(name="frames", payload=payload, last=True)]))
        == 2 * 12 * HOP
    )


def test_frames_may_lie_at_any_address() -> None:
    """Inline payloads are not aligned to the size of a float."""
    frames = SEGMENTS[0]
    shifted = memoryview(b"\0" + frames.tobytes())[1:].cast("f", frames.shape)
    payload: dict[str, Any] = {"frames": shifted, "segment": 0}
    item = Input(name="frames", payload=payload, last=True)
    assert spoken(VOCODER, VOCODER.open(task()), [item]) == speak([frames])


def test_what_is_taken_is_copied() -> None:
    """The payload's memory may be reused as soon as the step returns."""
    state = VOCODER.open(task())
    audio = b""
    for item in inputs([SEGMENTS[0]], [5, 9, 14, 30]):
        frames = np.array(item.payload["frames"])
        payload = {**item.payload, "frames": frames.data}
        audio += spoken(VOCODER, state, [Input(name="frames", payload=payload, last=item.last)])
        frames[:] = 0.0
    assert audio == speak([SEGMENTS[0]])


@pytest.mark.parametrize("seed", ["1", "", 1.5, True, False])
def test_a_seed_that_is_no_integer_is_refused(seed: str | float) -> None:
    """The error names the parameter."""
    with pytest.raises(InvalidRequest) as caught:
        VOCODER.open(task(seed=seed))
    assert caught.value.param == "seed"


@pytest.mark.parametrize(
    "frames",
    [np.zeros((3, 5), np.float32), np.zeros(FRAME_WIDTH, np.float32), np.zeros((1, FRAME_WIDTH))],
)
def test_frames_of_another_shape_fail_only_their_task(frames: Floats) -> None:
    """The error names the field; the other task of the step goes on."""
    wrong = Input(name="frames", payload={"frames": frames.data, "segment": 0})
    right = inputs([speech_like(20)])[0]
    failed, fine = VOCODER.step([(VOCODER.open(task()), wrong), (VOCODER.open(task()), right)])
    with pytest.raises(StageError, match="frames"):
        chunks_of(failed)
    assert chunks_of(fine)


def test_a_segment_out_of_turn_is_refused() -> None:
    """Frames of a segment that has ended, or of the next before this one's end, fail the task."""
    for numbers, ends in ((0, 0), True), ((0, 1), False):
        state = VOCODER.open(task())
        first, second = (
            Input(
                name="frames",
                payload={"frames": speech_like(4).data, "segment": number, "segment_end": ends},
            )
            for number in numbers
        )
        chunks_of(VOCODER.step([(state, first)])[0])
        with pytest.raises(StageError, match="segment"):
            chunks_of(VOCODER.step([(state, second)])[0])


@pytest.mark.slow
def test_it_imports_neither_the_runtime_nor_scipy() -> None:
    """A vocoder process holds numpy and no other heavy library."""
    code = (
        "import sys, stretto.backends.hibari_vocoder as v; v.Vocoder().load(lambda *_: None);"
        "sys.exit(str({'scipy', 'onnxruntime', 'hibari'} & set(sys.modules) or ''))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True
    )
    assert result.stderr.strip() == ""
