"""First audio over HTTP against the bare backends in one process, interleaved in one run.

.venv/bin/python -m scripts.measure.first_audio [ROUNDS]
"""

from __future__ import annotations

import statistics
import sys

from scripts.measure.bare_speech import BareSpeech
from scripts.measure.requests import fetch
from tests.e2e.serving import serving

TEXT = "A streaming engine sends its first audio before it has ended"


def main() -> None:
    """Print the medians of both arms and of their ratio, pair by pair."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    bare = BareSpeech()
    with serving() as server:
        for _ in range(5):
            bare.first_audio_s(TEXT)
            fetch(server.url, TEXT)
        pairs = [(bare.first_audio_s(TEXT), fetch(server.url, TEXT).first_s) for _ in range(rounds)]
    for name, values in (("bare", [b for b, _ in pairs]), ("http", [h for _, h in pairs])):
        ordered = sorted(values)
        print(
            f"{name}: median {statistics.median(values) * 1e3:6.1f} ms, "
            f"p10 {ordered[len(ordered) // 10] * 1e3:6.1f}, p90 {ordered[-len(ordered) // 10] * 1e3:6.1f}"
        )
    ratios = [h / b for b, h in pairs]
    print(
        f"http / bare, pair by pair: median {statistics.median(ratios):.2f} ({rounds} rounds, interleaved)"
    )


if __name__ == "__main__":
    main()
