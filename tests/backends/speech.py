"""What the tests of the two speech stages share: tasks, inputs and synthetic frames."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from stretto.backends.contract import Chunk, Finished, Input, More, Outcome, Task
from stretto.backends.hibari_dsp import BINS, FRAME_WIDTH, PITCH, Floats
from stretto.types import Payload, RequestId, StageId, TaskKey

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from stretto.backends.hibari_vocoder import Vocoder, VocoderTask

STAGE = StageId("speech")


def task(**options: str | float | None) -> Task:
    """Return a task with these options."""
    return Task(key=TaskKey(RequestId("r"), STAGE, 0), stage=STAGE, options=options)


def speech_like(frames: int, seed: int = 1) -> Floats:
    """Return frames as a talker might make them: quiet, partly voiced, no two alike."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((frames, FRAME_WIDTH), np.float32)
    for part in (0, 2, 3):  # the log magnitudes
        values[:, part * BINS : (part + 1) * BINS] -= 4.0
    values[:, PITCH] = np.where(rng.random(frames) < 0.3, 0.0, 100.0 + 150.0 * rng.random(frames))
    return values


def inputs(
    segments: Sequence[Floats], cuts: Iterable[int] = (), *, bare_end: bool = False
) -> list[Input]:
    """Return the vocoder's inputs for segments that are cut at these frames each.

    Args:
        segments: Frames of each segment.
        cuts: Where pieces end, in frames.
        bare_end: The end comes as an empty input.
    """
    cuts = list(cuts)
    payloads: list[Payload] = []
    for number, frames in enumerate(segments):
        bounds = [0, *sorted({cut for cut in cuts if 0 < cut < len(frames)}), len(frames)]
        for start, end in pairwise(bounds):
            view = frames[start:end].data
            payloads.append({"frames": view, "segment": number, "segment_end": end == len(frames)})
    if bare_end or not payloads:
        payloads.append({})
    final = len(payloads) - 1
    return [
        Input(name="frames", payload=payload, final=index == final, last=index == final)
        for index, payload in enumerate(payloads)
    ]


def chunks_of(outcome: Outcome) -> list[Chunk]:
    """Return the chunks of an outcome; a failure is raised."""
    if isinstance(outcome, Exception):
        raise outcome
    return list(outcome.chunks if isinstance(outcome, Finished | More) else outcome)


def audio_of(outcome: Outcome) -> bytes:
    """Return the audio of a vocoder's outcome; the chunks' facts are checked."""
    audio = b""
    for chunk in chunks_of(outcome):
        pcm = chunk.values["audio"]
        assert isinstance(pcm, bytes)
        assert len(pcm) == 2 * chunk.length > 0
        assert chunk.media_s == chunk.length / 24_000
        audio += pcm
    return audio


def spoken(vocoder: Vocoder, state: VocoderTask, items: Iterable[Input]) -> bytes:
    """Return the audio of a task's inputs, stepped one by one."""
    return b"".join(audio_of(vocoder.step([(state, item)])[0]) for item in items)
