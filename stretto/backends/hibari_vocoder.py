"""The vocoder stage of the `speech` pipeline: spectral frames to 24 kHz PCM, as they come.

It runs `hibari_dsp` for many tasks in turn and turns samples into 16-bit integers. The bytes depend
on a task's frames and seed alone, whatever the chunks, the batch and the replica. (Across machines
that holds as far as numpy computes alike on their processors.) So another replica can go on with a
task, and it needs no more than the frames behind the last segment that was spoken to its end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from stretto.backends.contract import Capabilities, Chunk, Input, LoadProgress, Outcome, Task
from stretto.backends.hibari_dsp import (
    BLOCK,
    FRAME_WIDTH,
    LOOK_AHEAD,
    RATE_HZ,
    Floats,
    Segment,
    Workspace,
    silence,
)
from stretto.errors import InvalidRequest, StageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.types import Payload

_FULL_SCALE = np.float32(32_767.0)


class VocoderTask:
    """One task's state: its seed, and the segment that is being spoken."""

    __slots__ = ("number", "seed", "segment")

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.number = -1
        self.segment: Segment | None = None


class Vocoder:
    """Step backend: inputs `{"frames", "segment", "segment_end"}` to chunks `{"audio"}`.

    Request option `seed` (default 0) fixes the noise part of the voice.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        kind="generation",
        unit="samples",
        recovery="replay",
        media={"rate_hz": RATE_HZ, "channels": 1, "format": "s16le"},
    )

    def __init__(self) -> None:
        self._workspace = Workspace()

    def load(self, progress: LoadProgress) -> None:
        """Warm up; there are no weights."""
        progress("vocoder", 0.0)
        Segment(0, 0, self._workspace).feed(silence(2 * BLOCK + LOOK_AHEAD), ends=True)
        progress("vocoder", 1.0)

    def open(self, task: Task) -> VocoderTask:
        """Read the task's seed."""
        seed = task.options.get("seed")
        if seed is None:
            seed = 0
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise InvalidRequest("seed: an integer is needed", param="seed")
        state = VocoderTask(seed)
        if task.resume is not None:
            state.number = int(task.resume)
        return state

    def step(self, items: Sequence[tuple[VocoderTask, Input]]) -> Sequence[Outcome]:
        """Return the audio that each task's new frames complete."""
        return [self._outcome(task, item) for task, item in items]

    def close(self, state: VocoderTask) -> None:
        """Forget the segment."""
        state.segment = None

    def _outcome(self, task: VocoderTask, item: Input) -> Outcome:
        try:
            samples = self._samples(task, item)
        except StageError as error:
            return error
        if not len(samples):
            return ()
        audio = np.rint(np.clip(samples, -1.0, 1.0) * _FULL_SCALE).astype("<i2").tobytes()
        has_ended = task.segment is None
        return (
            Chunk(
                values={"audio": audio},
                length=len(samples),
                media_s=len(samples) / RATE_HZ,
                boundary=str(task.number).encode() if has_ended else None,
            ),
        )

    def _samples(self, task: VocoderTask, item: Input) -> Floats:
        frames = _frames(item.payload)
        if len(frames):
            self._enter_segment(task, item.payload)
        segment = task.segment
        if segment is None:
            return np.empty(0, np.float32)
        ends = item.last or bool(item.payload.get("segment_end"))
        if ends:
            task.segment = None
        return segment.feed(frames, ends=ends)

    def _enter_segment(self, task: VocoderTask, payload: Payload) -> None:
        number = payload.get("segment")
        if not isinstance(number, int):
            raise StageError("the vocoder's input has frames without a `segment` number")
        if task.segment is None and number > task.number:
            task.segment = Segment(task.seed, number, self._workspace)
            task.number = number
        elif number != task.number or task.segment is None:
            raise StageError(
                f"the vocoder got frames of segment {number} behind segment {task.number}, which "
                f"{'has ended' if task.segment is None else 'has not ended'}"
            )


def _frames(payload: Payload) -> Floats:
    value = payload.get("frames")
    if value is None:
        return np.empty((0, FRAME_WIDTH), np.float32)
    if (
        not isinstance(value, memoryview)
        or value.format != "f"
        or tuple(value.shape or ())[1:] != (FRAME_WIDTH,)
    ):
        found = value.shape if isinstance(value, memoryview) else type(value).__name__
        raise StageError(
            f"the vocoder takes `frames` as float32 [frames, {FRAME_WIDTH}], not as {found}"
        )
    return np.asarray(value, np.float32)
