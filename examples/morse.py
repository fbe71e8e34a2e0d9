"""Two stages of one's own: `Code` turns text into Morse code, `Tone` turns the code into sound."""

import math
from array import array
from collections.abc import Sequence

from stretto.backends.contract import Capabilities, Chunk, Input, LoadProgress, Outcome, Task

RATE_HZ = 8000
DOT_S = 0.06
LETTERS = dict(
    zip(
        "ABCDEFGHIJKLMNOPQRSTUVWXYZ",
        ".- -... -.-. -.. . ..-. --. .... .. .--- -.- .-.. -- -. --- .--. --.- .-. ... - ..- "
        "...- .-- -..- -.-- --..".split(),
        strict=True,
    )
)


class Code:
    """Text in, one chunk of dots and dashes per word out."""

    capabilities = Capabilities(kind="function", unit="signs")

    def load(self, progress: LoadProgress) -> None:
        """Nothing to load; a model would be read here, with its progress."""
        progress("the alphabet", 1.0)

    def open(self, task: Task) -> Task:
        """What a task needs to remember between steps: nothing."""
        return task

    def step(self, items: Sequence[tuple[Task, Input]]) -> Sequence[Outcome]:
        """One outcome per item: here a list of chunks, one for each word."""
        return [[self._chunk(word) for word in self._words(item)] for _, item in items]

    def close(self, state: Task) -> None:
        """Called once for each task, however it ends."""

    def _words(self, item: Input) -> list[str]:
        text = item.payload.get("text")  # the last item of a task may be empty
        return text.upper().split() if isinstance(text, str) else []

    def _chunk(self, word: str) -> Chunk:
        code = " ".join(LETTERS[letter] for letter in word if letter in LETTERS)
        return Chunk(values={"code": code + " / "}, length=len(code))


class Tone:
    """Code in, 16-bit samples out.

    Args:
        pitch_hz: Of the tone.
    """

    capabilities = Capabilities(
        kind="generation",
        unit="samples",
        media={"rate_hz": RATE_HZ, "channels": 1, "format": "s16le"},
    )

    def __init__(self, pitch_hz: float = 600.0) -> None:
        self._pitch_hz = pitch_hz
        self._sounds: dict[str, bytes] = {}

    def load(self, progress: LoadProgress) -> None:
        """Compute each sign's sound once."""
        lengths = {".": (1, 1), "-": (3, 1), " ": (0, 2), "/": (0, 2)}
        for number, (sign, (on, off)) in enumerate(lengths.items(), start=1):
            self._sounds[sign] = self._sound(on * DOT_S, off * DOT_S)
            progress(f"sign {sign!r}", number / len(lengths))

    def open(self, task: Task) -> Task:
        """Nothing to remember."""
        return task

    def step(self, items: Sequence[tuple[Task, Input]]) -> Sequence[Outcome]:
        """Turn each item's code into one chunk of sound."""
        return [self._spoken(item) for _, item in items]

    def close(self, state: Task) -> None:
        """Nothing to release."""

    def _spoken(self, item: Input) -> Outcome:
        code = item.payload.get("code")
        if not isinstance(code, str):
            return []
        audio = b"".join(self._sounds[sign] for sign in code)
        samples = len(audio) // 2
        return [Chunk(values={"audio": audio}, length=samples, media_s=samples / RATE_HZ)]

    def _sound(self, on_s: float, off_s: float) -> bytes:
        step = 2 * math.pi * self._pitch_hz / RATE_HZ
        tone = (int(12000 * math.sin(step * n)) for n in range(int(on_s * RATE_HZ)))
        return array("h", [*tone, *[0] * int(off_s * RATE_HZ)]).tobytes()
