"""What a player makes of encoded audio."""

from __future__ import annotations

import io
from typing import NamedTuple, Protocol, cast

import soundfile  # pyright: ignore[reportMissingTypeStubs] - it has none


class Decoded(NamedTuple):
    """What was found in a stream."""

    frames: int
    rate_hz: int
    channels: int


class _Samples(Protocol):
    shape: tuple[int, int]


def decode(data: bytes) -> Decoded:
    """Decode a WAV or mp3 stream as far as it goes."""
    samples, rate_hz = cast(
        "tuple[_Samples, int]",
        soundfile.read(io.BytesIO(data), always_2d=True),
    )
    return Decoded(samples.shape[0], rate_hz, samples.shape[1])


def frames_of(data: bytes) -> int:
    """Return how many frames a player finds."""
    return decode(data).frames
