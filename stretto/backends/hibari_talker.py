"""The talker stage of the `speech` pipeline: sentences to spectral frames.

The model computes an utterance at once (it can be neither batched nor cut exactly), so a step is
one utterance of each task: at most `_SEGMENT_PHONEMES` phonemes, which bounds time and memory. Its
frames leave in chunks: a small first one, so that the vocoder starts at once, then doubling up to a
steady size. Where the chunks end depends on the request's text and options alone. Behind a sentence
another replica can go on.
"""

from __future__ import annotations

import gc
import importlib
import json
import math
import os
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from stretto.backends.contract import Capabilities, Chunk, Input, LoadProgress, More, Outcome, Task
from stretto.backends.hibari_dsp import (
    BINS,
    BLOCK,
    FRAME_WIDTH,
    HOP,
    LOOK_AHEAD,
    PITCH,
    RATE_HZ,
    Floats,
)
from stretto.backends.hibari_g2p import Phonemizer, split_phonemes
from stretto.errors import ConfigError, InvalidRequest, StageError
from stretto.transport.allocator import give_back

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from stretto.types import Payload

VOICE = "heart"
"""The one voice that lies in the package; the others would be downloaded."""

SLOWEST, FASTEST = 0.5, 2.0
"""The range of option `speed`; above it the model can't shorten phonemes any more."""

_SEGMENT_PHONEMES = 144  # about 720 frames or 9 s; each frame takes 40 kB of the model's memory
_PAD = 0
_LARGE_BLOCK_BYTES = 1 << 20
_WARM_UP = "The quick brown fox jumps over the lazy dog, zibblewock."


class Model(Protocol):
    """What the talker asks of an inference session."""

    def run(self, outputs: None, inputs: dict[str, NDArray[Any]]) -> list[Floats]:
        """Return all outputs of the model."""
        ...


class TalkerTask:
    """One task's state.

    Attributes:
        speed: The client's.
        utterances: Phoneme ids of the current input that are still to be spoken.
        segments: Utterances spoken so far.
        chunk_frames: Size of the next chunk.
    """

    __slots__ = ("chunk_frames", "segments", "speed", "utterances")

    def __init__(self, speed: float, chunk_frames: int) -> None:
        self.speed = speed
        self.utterances: deque[list[int]] = deque()
        self.segments = 0
        self.chunk_frames = chunk_frames


class Talker:
    """Step backend: inputs `{"text"}` to chunks `{"frames", "segment", "segment_end"}`.

    Request options: `speed` from 0.5 to 2.0, `voice` (`heart`).

    Args:
        threads: Of the model's session. One is enough: it runs a hundred times faster than speech.
        first_chunk_frames: Size of a request's first chunk; the default is what the vocoder needs to
            give its first audio.
        chunk_frames: Size of the chunks after the ramp.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        kind="generation",
        unit="frames",
        recovery="replay",
        media={
            "rate_hz": RATE_HZ,
            "samples_per_frame": HOP,
            "values_per_frame": FRAME_WIDTH,
            "language": "en",
        },
        voices=(VOICE,),
    )

    def __init__(
        self,
        *,
        threads: int = 1,
        first_chunk_frames: int = BLOCK + LOOK_AHEAD,
        chunk_frames: int = 5 * BLOCK,
    ) -> None:
        if threads < 1:
            raise ConfigError(f"talker option threads: {threads}; at least 1 is needed")
        if not 1 <= first_chunk_frames <= chunk_frames:
            raise ConfigError(
                f"talker options first_chunk_frames: {first_chunk_frames}, chunk_frames: {chunk_frames}; "
                "1 <= first_chunk_frames <= chunk_frames is needed"
            )
        self._threads = threads
        self._first_chunk_frames = first_chunk_frames
        self._chunk_frames = chunk_frames

    def load(self, progress: LoadProgress) -> None:
        """Read the tables and the model, and speak.

        The longest utterance gives the model's memory its final size. What is there after that is
        put out of the garbage collector's reach: the lexicon would cost it 20 ms each time.
        """
        give_back(_LARGE_BLOCK_BYTES)  # else the process grows by 16 MB over some hundred requests
        assets = Path(importlib.import_module("hibari.tts").ASSETS)
        progress("lexicon", 0.0)
        unknown = _session(assets / "oov.onnx", self._threads)
        oov = importlib.import_module("hibari.g2p.oov")
        self._phonemize = Phonemizer(assets, oov.OOV(str(assets / "oov.onnx"), session=unknown))
        progress("model", 0.5)
        self._ids: dict[str, int] = json.loads((assets / "vocab.json").read_bytes())
        self._model: Model = _session(assets / "hibari.onnx", self._threads)
        progress("warm-up", 0.8)
        phonemes = self._phonemize(_WARM_UP)
        longest = (phonemes * math.ceil(_SEGMENT_PHONEMES / len(phonemes)))[:_SEGMENT_PHONEMES]
        for utterance in (longest, phonemes):
            self._frames(self._numbered(utterance), 1.0)
        gc.collect()
        gc.freeze()
        progress("ready", 1.0)

    def open(self, task: Task) -> TalkerTask:
        """Check the task's options."""
        voice = task.options.get("voice")
        if voice not in (None, VOICE):
            raise InvalidRequest(
                f"voice {voice!r} is unknown; the voice is {VOICE!r}",
                param="voice",
                code="voice_not_found",
            )
        state = TalkerTask(_speed(task.options), self._first_chunk_frames)
        if task.resume is not None:
            state.segments, state.chunk_frames = map(int, task.resume.split())
        return state

    def step(self, items: Sequence[tuple[TalkerTask, Input]]) -> Sequence[Outcome]:
        """Speak one utterance of each task."""
        return [self._outcome(task, item) for task, item in items]

    def close(self, state: TalkerTask) -> None:
        """Forget what is not spoken yet."""
        state.utterances.clear()

    def _outcome(self, task: TalkerTask, item: Input) -> Outcome:
        if not task.utterances:  # else the runtime offers the same input again, after `More`
            text = item.payload.get("text", "")
            if not isinstance(text, str):
                return StageError(
                    f"the talker takes `text` as a string, not as {type(text).__name__}"
                )
            task.utterances.extend(self._utterances(text, task.speed))
        if not task.utterances:
            return ()
        chunks = self._speak(task, task.utterances.popleft())
        if task.utterances:
            return More(*chunks)
        token = f"{task.segments} {task.chunk_frames}".encode()
        return (*chunks[:-1], replace(chunks[-1], boundary=token))

    def _utterances(self, text: str, speed: float) -> list[list[int]]:
        limit = int(_SEGMENT_PHONEMES * min(1.0, speed))
        numbered = map(self._numbered, split_phonemes(self._phonemize(text), limit))
        return [ids for ids in numbered if ids]

    def _numbered(self, phonemes: str) -> list[int]:
        return [self._ids[phoneme] for phoneme in phonemes if phoneme in self._ids]

    def _frames(self, ids: list[int], speed: float) -> Floats:
        padded = np.array([[_PAD, *ids, _PAD]], np.int64)
        outputs = self._model.run(None, {"ids": padded, "speed": np.array([speed], np.float32)})
        *parts, pitch = outputs
        frames = np.empty((pitch.shape[1], FRAME_WIDTH), np.float32)
        for number, part in enumerate(parts):
            frames[:, number * BINS : (number + 1) * BINS] = part[0].T
        frames[:, PITCH] = pitch[0]
        return frames

    def _speak(self, task: TalkerTask, ids: list[int]) -> list[Chunk]:
        frames = self._frames(ids, task.speed)
        chunks: list[Chunk] = []
        at = 0
        while at < len(frames):
            part = frames[at : at + task.chunk_frames]
            at += len(part)
            values = {
                "frames": part.data,
                "segment": task.segments,
                "segment_end": at == len(frames),
            }
            chunks.append(Chunk(values=values, length=len(part), media_s=len(part) * HOP / RATE_HZ))
            task.chunk_frames = min(2 * task.chunk_frames, self._chunk_frames)
        task.segments += 1
        return chunks


def _speed(options: Payload) -> float:
    speed = options.get("speed")
    if speed is None:
        return 1.0
    if (
        isinstance(speed, bool)
        or not isinstance(speed, int | float)
        or not SLOWEST <= speed <= FASTEST
    ):
        raise InvalidRequest(
            f"speed {speed!r} is not possible: a number from {SLOWEST} to {FASTEST} is needed",
            param="speed",
        )
    return float(speed)


def _session(path: Path, threads: int) -> Any:  # noqa: ANN401 - onnxruntime has no types
    # Its telemetry thread wakes an idle process, and nothing about this machine is to leave it.
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
    ort = importlib.import_module("onnxruntime")
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.enable_mem_pattern = False  # it keeps a plan for each length that ever came
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
