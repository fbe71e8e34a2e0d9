"""16-bit PCM, raw and in a WAV file: sizes and the 44-byte header."""

from __future__ import annotations

import struct
from dataclasses import dataclass

SAMPLE_BYTES = 2
"""Samples are signed 16-bit little-endian integers."""

WAV_HEADER_BYTES = 44
_UNKNOWN = 0xFFFF_FFFF  # players read to the end; with 0 many of them play nothing
_RIFF_REST_BYTES = WAV_HEADER_BYTES - 8  # what the RIFF size counts besides the samples
_WAV_HEADER = struct.Struct("<4sI4s4sIHHIIHH4sI")
_FORMAT_PCM = 1
_FORMAT_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PcmFormat:
    """How samples lie in a stream. A *frame* is one sample of each channel.

    Attributes:
        rate_hz: Frames per second.
        channels: Samples per frame.
    """

    rate_hz: int
    channels: int

    @property
    def frame_bytes(self) -> int:
        """Size of one frame."""
        return SAMPLE_BYTES * self.channels

    def whole_frames(self, size_bytes: int) -> int:
        """Return how many of `size_bytes` bytes are whole frames."""
        return size_bytes - size_bytes % self.frame_bytes

    def duration_s(self, size_bytes: int) -> float:
        """Return the playing time of `size_bytes` bytes of samples."""
        return size_bytes / (self.frame_bytes * self.rate_hz)


SPEECH = PcmFormat(rate_hz=24_000, channels=1)
"""What the speech pipelines produce."""


def wav_header(pcm: PcmFormat, size_bytes: int | None = None) -> bytes:
    """Return the header that goes before the samples of a WAV file.

    Args:
        pcm: How the samples lie.
        size_bytes: Size of the samples; `None` while it is unknown (streaming), which writes
            0xFFFFFFFF into both size fields.

    Raises:
        ValueError: The samples are no whole frames, or too many for a WAV file.
    """
    if size_bytes is None:
        riff_bytes = data_bytes = _UNKNOWN
    else:
        riff_bytes, data_bytes = size_bytes + _RIFF_REST_BYTES, size_bytes
        if size_bytes < 0 or size_bytes % pcm.frame_bytes:
            raise ValueError(
                f"{size_bytes} bytes are no whole number of {pcm.frame_bytes}-byte frames"
            )
        if riff_bytes >= _UNKNOWN:
            raise ValueError(f"{size_bytes} bytes of samples do not fit into a WAV file (4 GiB)")
    return _WAV_HEADER.pack(
        b"RIFF",
        riff_bytes,
        b"WAVE",
        b"fmt ",
        _FORMAT_BYTES,
        _FORMAT_PCM,
        pcm.channels,
        pcm.rate_hz,
        pcm.rate_hz * pcm.frame_bytes,
        pcm.frame_bytes,
        8 * SAMPLE_BYTES,
        b"data",
        data_bytes,
    )
