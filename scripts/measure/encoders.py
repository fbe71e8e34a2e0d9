"""How far a player is behind an encoder that is fed 80 ms pieces, and what encoding costs.

`python -m scripts.measure.encoders` needs what `make test` installs.
"""

from __future__ import annotations

import time

from stretto.audio.encoders import make_encoder
from stretto.audio.pcm import SPEECH
from tests.audio.test_encoders import tone
from tests.support.decoding import frames_of

SECONDS = 4.8
PIECE_S = 0.08


def measure(name: str) -> tuple[float, float, float, float]:
    """Return ms until the first sound, mean and maximal lag in ms, and CPU ms per second of audio."""
    encoder = make_encoder(name, SPEECH)
    samples = tone(SPEECH, SECONDS)
    step = SPEECH.whole_frames(int(SPEECH.rate_hz * PIECE_S) * SPEECH.frame_bytes)
    sent = b""
    first_ms, cpu_s = 0.0, 0.0
    lags_ms: list[float] = []
    for at in range(0, len(samples), step):
        began = time.process_time()
        sent += encoder.feed(samples[at : at + step])
        cpu_s += time.process_time() - began
        heard_s = frames_of(sent) / SPEECH.rate_hz
        fed_s = SPEECH.duration_s(min(at + step, len(samples)))
        if heard_s and not first_ms:
            first_ms = fed_s * 1000
        lags_ms.append((fed_s - heard_s) * 1000)
    return first_ms, sum(lags_ms) / len(lags_ms), max(lags_ms), cpu_s / SECONDS * 1000


def main() -> None:
    """Print one line per format."""
    print(f"{'':6}{'first after ms':>16}{'lag mean':>10}{'max':>6}{'CPU ms/s':>10}")
    for name in ("mp3", "wav"):
        print("{:6}{:16.0f}{:10.0f}{:6.0f}{:10.2f}".format(name, *measure(name)))


if __name__ == "__main__":
    main()
