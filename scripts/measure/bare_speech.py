"""First audio of the two speech backends in one process, without the engine: the baseline.

.venv/bin/python -m scripts.measure.bare_speech [RUNS] [TEXT]
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, cast

from stretto.backends.contract import Chunk, Finished, Input, More, Outcome, Task
from stretto.backends.hibari_talker import Talker
from stretto.backends.hibari_vocoder import Vocoder
from stretto.backends.sentences import Sentences
from stretto.types import RequestId, StageId, TaskKey

if TYPE_CHECKING:
    from stretto.types import Payload

TEXT = "A streaming engine sends its first audio before it has ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoken:
    """What the first utterance of a text took.

    Attributes:
        first_audio_ms: From the text to the first samples.
        talker_ms: Of that, until all frames of the utterance are there.
        vocoder_ms: Of that, for the first chunk of them.
        talker_rtf: Computing time of the frames over their duration.
        vocoder_rtf: The same for the audio, chunk by chunk.
    """

    first_audio_ms: float
    talker_ms: float
    vocoder_ms: float
    talker_rtf: float
    vocoder_rtf: float


class BareSpeech:
    """Both backends, loaded; each call is one request."""

    def __init__(self) -> None:
        self._talker, self._vocoder = Talker(), Vocoder()
        self._talker.load(_ignore)
        self._vocoder.load(_ignore)

    def first_audio_s(self, text: str) -> float:
        """Return the seconds from the text to its first samples."""
        return self.speak(text).first_audio_ms / 1e3

    def speak(self, text: str) -> Spoken:
        """Speak the text's first utterance."""
        stage = StageId("bare")
        task = Task(key=TaskKey(RequestId("bare"), stage, 0), stage=stage, options={})
        talking, sounding = self._talker.open(task), self._vocoder.open(task)
        start = time.perf_counter()
        sentence = Sentences()({"text": text}, final=True)[0]
        utterance = _chunks(self._talker.step([(talking, Input(name="text", payload=sentence))])[0])
        talked = time.perf_counter()
        heard = [
            time.perf_counter()
            for chunk in utterance
            if _chunks(self._vocoder.step([(sounding, _frames_input(chunk))])[0])
        ]
        media_s = sum(chunk.media_s for chunk in utterance)
        return Spoken(
            first_audio_ms=(heard[0] - start) * 1e3,
            talker_ms=(talked - start) * 1e3,
            vocoder_ms=(heard[0] - talked) * 1e3,
            talker_rtf=(talked - start) / media_s,
            vocoder_rtf=(heard[-1] - talked) / media_s,
        )


def _chunks(outcome: Outcome) -> list[Chunk]:
    if isinstance(outcome, Exception):
        raise outcome
    return list(outcome.chunks if isinstance(outcome, More | Finished) else outcome)


def _frames_input(chunk: Chunk) -> Input:
    return Input(name="frames", payload=cast("Payload", chunk.values))


def _ignore(what: str, fraction: float) -> None:
    """Take a report of loading progress."""


def main() -> None:
    """Print medians over the runs, and the least of each figure."""
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    text = sys.argv[2] if len(sys.argv) > 2 else TEXT  # noqa: PLR2004 - the second argument
    bare = BareSpeech()
    figures = [asdict(bare.speak(text)) for _ in range(runs)]
    for name in figures[0]:
        values = [figure[name] for figure in figures]
        print(f"{name:15} median {statistics.median(values):8.4f}, least {min(values):8.4f}")


if __name__ == "__main__":
    main()
