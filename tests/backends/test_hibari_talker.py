"""The talker with the real model: chunks, segments, options and difficult text."""

from __future__ import annotations

import importlib
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from stretto.backends.contract import Chunk, Input, More
from stretto.backends.hibari_dsp import BINS, FRAME_WIDTH, HOP, PITCH, RATE_HZ, Floats
from stretto.backends.hibari_g2p import split_phonemes
from stretto.backends.hibari_talker import Talker
from stretto.backends.hibari_vocoder import Vocoder
from stretto.errors import ConfigError, InvalidRequest, StageError
from tests.backends.speech import chunks_of, spoken, task

if TYPE_CHECKING:
    from stretto.types import Payload

SENTENCES = [
    "The birch canoe slid on the smooth planks. ",
    "Yes. ",
    "Please call Dr. Stella at 7:30 pm!",
]


@pytest.fixture(scope="module")
def talker() -> Talker:
    """A loaded talker, shared by all tests: loading takes a second."""
    loaded = Talker()
    told: list[tuple[str, float]] = []
    loaded.load(lambda what, fraction: told.append((what, fraction)))
    assert [fraction for _, fraction in told] == sorted(fraction for _, fraction in told)
    assert told[-1][1] == 1.0
    return loaded


@pytest.fixture(scope="module")
def hibari() -> Any:  # noqa: ANN401 - the package has no types
    """The package's own synthesizer."""
    return importlib.import_module("hibari").Hibari()


def say(talker: Talker, *texts: str, **options: str | float | None) -> list[Chunk]:
    """Return all chunks of one request whose sentences arrive one by one."""
    state = talker.open(task(**options))
    chunks: list[Chunk] = []
    for index, text in enumerate(texts):
        item = Input(name="text", payload={"text": text}, last=index == len(texts) - 1)
        while True:
            outcome = talker.step([(state, item)])[0]
            chunks += chunks_of(outcome)
            if not isinstance(outcome, More):
                break
    talker.close(state)
    return chunks


def frames_of(chunk: Chunk) -> Floats:
    """Return a chunk's frames; its facts are checked."""
    view = chunk.values["frames"]
    assert isinstance(view, memoryview)
    assert view.c_contiguous
    assert (view.format, view.shape) == ("f", (chunk.length, FRAME_WIDTH))
    assert chunk.media_s == chunk.length * HOP / RATE_HZ
    return np.asarray(view, np.float32)


def segments_of(chunks: list[Chunk]) -> list[Floats]:
    """Return the frames by segment and check that each segment ends exactly once, in order."""
    segments: list[list[Floats]] = [[]]
    for chunk in chunks:
        assert chunk.values["segment"] == len(segments) - 1
        segments[-1].append(frames_of(chunk))
        if chunk.values["segment_end"]:
            segments.append([])
    assert segments.pop() == []
    return [np.concatenate(parts) for parts in segments]


def test_the_first_chunk_is_small_and_the_ramp_goes_on_over_sentences(talker: Talker) -> None:
    """Sizes are 10, 20, then 40; only a segment's last chunk is shorter; a repetition is equal."""
    chunks = say(talker, *SENTENCES)
    segments = segments_of(chunks)
    assert len(segments) == 3
    allowed = [10, 20] + [40] * len(chunks)
    for chunk, size in zip(chunks, allowed, strict=False):
        assert chunk.length == size or (chunk.values["segment_end"] and chunk.length < size)
    again = say(talker, *SENTENCES)
    assert [chunk.length for chunk in again] == [chunk.length for chunk in chunks]
    assert all(map(np.array_equal, segments, segments_of(again)))


@pytest.mark.slow
def test_frames_are_the_packages_own(talker: Talker, hibari: Any) -> None:  # noqa: ANN401
    """With the package's synthesis behind it, and no noise, both chains make the same audio."""
    frames = segments_of(say(talker, SENTENCES[0]))[0].copy()
    (phonemes,) = hibari.phonemize(SENTENCES[0])
    ids = np.asarray([hibari.ids(phonemes)], np.int64)
    *parts, pitch = hibari.sess.run(None, {"ids": ids, "speed": np.asarray([1.0], np.float32)})
    for number, part in enumerate(parts):
        assert np.array_equal(frames[:, number * BINS : (number + 1) * BINS], part[0].T)
    assert np.array_equal(frames[:, PITCH], pitch[0])
    frames[:, 2 * BINS : 3 * BINS] = -60.0
    parts[2] = np.full_like(parts[2], -60.0)
    dsp: Any = importlib.import_module("hibari.dsp")
    expected = dsp.synth(*(part[0] for part in parts), pitch[0], np.random.default_rng(0))
    vocoder = Vocoder()
    item = Input(name="frames", payload={"frames": frames.data, "segment": 0}, last=True)
    audio = np.frombuffer(spoken(vocoder, vocoder.open(task()), [item]), "<i2")
    assert float(np.abs(audio / 32_767 - expected).max()) <= 0.5 / 32_767 + 1e-6


@pytest.mark.parametrize(
    "text",
    [
        *SENTENCES,
        "I live to read; she read it live on 10/12/2019 for $3.20, i.e. 5km away.",
        "The record was set in the US: use the used object to object, Zibblewock!",
        "“No,” said A. B. Smith-Jones—twice (or 1,250 times).",
    ],
)
def test_packed_weights_read_like_the_packages(talker: Talker, hibari: Any, text: str) -> None:  # noqa: ANN401
    """The phonemes are those of the package's own reader, heteronyms and unknown words included."""
    ours: Any = talker
    assert ours._phonemize(text) == hibari.g2p(" ".join(text.split()))  # noqa: SLF001


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "9" * 60,
        "1," * 40,
        "\u0130stanbul",
        "W" * 60,
        "½" * 30,
        "漢字 🎉",
        "\ud800 \x00 hello",
        "a%B&" * 20,
    ],
)
def test_difficult_text_is_spoken_or_skipped(talker: Talker, text: str) -> None:
    """Nothing fails, and no utterance is longer than the bound."""
    for frames in segments_of(say(talker, text)):
        assert len(frames) < 1200
        assert np.isfinite(frames).all()


def test_what_the_package_can_not_read_is_spelled(talker: Talker) -> None:
    """A dotted capital I is an I, and a number without a name is read digit by digit."""
    ours: Any = talker
    phonemize = ours._phonemize  # noqa: SLF001
    assert phonemize("\u0130stanbul, hello.") == phonemize("Istanbul, hello.")
    assert phonemize("See " + "9" * 60).count(phonemize("9")) == 60


@pytest.mark.parametrize("payload", [{}, {"text": ""}, {"text": " \n"}, {"text": "🎉"}])
def test_text_without_anything_to_speak_gives_no_chunk(talker: Talker, payload: Payload) -> None:
    """An empty last input, white space, symbols without a name."""
    state = talker.open(task())
    outcome = talker.step([(state, Input(name="text", payload=payload, last=True))])[0]
    assert not isinstance(outcome, More)
    assert chunks_of(outcome) == []


@pytest.mark.slow
def test_a_long_input_takes_several_steps(talker: Talker) -> None:
    """Each step is one utterance, so that other tasks get their turn."""
    state = talker.open(task())
    item = Input(name="text", payload={"text": "one hundred and twenty-three, " * 20})
    outcomes = [talker.step([(state, item)])[0]]
    while isinstance(outcomes[-1], More):
        outcomes.append(talker.step([(state, item)])[0])
    assert len(outcomes) > 2
    for number, outcome in enumerate(outcomes):
        assert {chunk.values["segment"] for chunk in chunks_of(outcome)} == {number}


def test_speed_changes_the_pace(talker: Talker) -> None:
    """Half the speed takes twice the frames; integers are numbers, too."""
    normal, slow, fast = (
        sum(chunk.length for chunk in say(talker, SENTENCES[0], speed=speed))
        for speed in (None, 0.5, 2)
    )
    assert 1.9 < slow / normal < 2.1
    assert 0.45 < fast / normal < 0.6


@pytest.mark.parametrize(
    "speed", [0.25, 0.49, 2.01, 4.0, 0, -1, float("nan"), float("inf"), "fast", True]
)
def test_a_speed_out_of_range_is_refused(talker: Talker, speed: str | float) -> None:
    """The error names the parameter and the range."""
    with pytest.raises(InvalidRequest, match=r"0\.5 to 2\.0") as caught:
        talker.open(task(speed=speed))
    assert caught.value.param == "speed"


def test_an_unknown_voice_is_refused(talker: Talker) -> None:
    """The error names the parameter and the voice there is."""
    talker.open(task(voice="heart"))
    with pytest.raises(InvalidRequest, match="heart") as caught:
        talker.open(task(voice="emma"))
    assert (caught.value.param, caught.value.code) == ("voice", "voice_not_found")


def test_text_that_is_no_string_fails_only_its_task(talker: Talker) -> None:
    """The other task of the step is spoken."""
    wrong, right = (Input(name="text", payload={"text": text}) for text in (5, "Yes."))
    failed, fine = talker.step([(talker.open(task()), wrong), (talker.open(task()), right)])
    with pytest.raises(StageError, match="text"):
        chunks_of(failed)
    assert chunks_of(fine)


@pytest.mark.parametrize(
    "options",
    [{"threads": 0}, {"first_chunk_frames": 0}, {"first_chunk_frames": 41}, {"chunk_frames": 9}],
)
def test_stage_options_are_checked_before_anything_is_loaded(options: dict[str, int]) -> None:
    """The error names the option."""
    with pytest.raises(ConfigError, match=next(iter(options))):
        Talker(**options)


@pytest.mark.parametrize("limit", [1, 7, 20, 200])
@pytest.mark.parametrize(
    "phonemes", ["", "aaaa" * 30, "a bb ccc, dddd " * 9, "one. two three: four"]
)
def test_phonemes_are_split_within_the_bound_and_none_is_lost(phonemes: str, limit: int) -> None:
    """Only the blanks at the cuts go."""
    parts = split_phonemes(phonemes, limit)
    assert all(0 < len(part) <= limit for part in parts)
    assert "".join(parts).replace(" ", "") == phonemes.replace(" ", "")


def test_phonemes_are_split_at_a_clause_if_there_is_one() -> None:
    """The clause end nearest the middle wins over nearer blanks."""
    assert split_phonemes("a, bb cc dd ee, ff gg", 15) == ["a, bb cc dd ee,", "ff gg"]


def test_no_thread_of_the_library_sends_telemetry() -> None:
    """Loading leaves the process with its own threads only; a background sender would be one more."""
    program = (
        "from stretto.backends.hibari_talker import Talker\n"
        "from pathlib import Path\n"
        "Talker().load(lambda what, fraction: None)\n"
        "print(len(list(Path('/proc/self/task').iterdir())))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )
    assert done.stdout == "1\n"
