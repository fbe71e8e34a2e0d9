"""Samples become the bytes of a response, piece by piece: one encoder per response, one header at most.

Every encoder takes samples as they are made and returns what a player can already use of them; `close`
returns the rest. Another format is another entry in `_MAKERS`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, cast

from stretto.audio.pcm import PcmFormat, wav_header

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MEDIA_TYPES: Mapping[str, str] = {"mp3": "audio/mpeg", "wav": "audio/wav", "pcm": "audio/pcm"}
"""`Content-Type` by format name. Bare `audio/pcm`, since some clients compare the whole string."""

MP3_RATES_HZ = (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000)
"""Rates that mp3 knows."""

MP3_DELAY_SAMPLES = 1105
"""How many samples an mp3 stream begins with before the first one that was given."""

_LOW_RATE_HZ = 12000  # up to here a frame is 576 samples long and may have 64 kbit/s at most
_QUALITY = 5


class Encoder(Protocol):
    """Encodes one response."""

    def feed(self, samples: bytes) -> bytes:
        """Return what can be played of the samples so far and was not returned yet; may be empty.

        Args:
            samples: Whole frames of signed 16-bit little-endian samples, channels interleaved.
        """
        ...

    def close(self) -> bytes:
        """Return the rest. Called once, after the last `feed`."""
        ...


class UnsupportedAudio(ValueError):
    """A format can't hold samples of this kind; the text says what it can."""


def make_encoder(name: str, pcm: PcmFormat) -> Encoder:
    """Return a new encoder.

    Args:
        name: A key of `MEDIA_TYPES`.
        pcm: How the samples lie.

    Raises:
        UnsupportedAudio: The format does not know this rate or number of channels.
    """
    return _MAKERS[name](pcm)


def warm_up() -> None:
    """Load what encoding needs and run it once, so that the first response does not pay for it."""
    pcm = PcmFormat(rate_hz=24000, channels=1)
    encoder = Mp3Encoder(pcm)
    encoder.feed(bytes(pcm.frame_bytes * pcm.rate_hz // 10))
    encoder.close()


class PcmEncoder:
    """The samples as they are."""

    def __init__(self, pcm: PcmFormat) -> None:
        del pcm

    def feed(self, samples: bytes) -> bytes:
        """Return them."""
        return samples

    def close(self) -> bytes:
        """Return nothing."""
        return b""


class WavEncoder:
    """A header that leaves the length open, then the samples."""

    def __init__(self, pcm: PcmFormat) -> None:
        self._header = wav_header(pcm)

    def feed(self, samples: bytes) -> bytes:
        """Return the samples, the first time behind the header."""
        header, self._header = self._header, b""
        return header + samples

    def close(self) -> bytes:
        """Return nothing."""
        return b""


class Mp3Encoder:
    """One continuous mp3 stream of constant bit rate, without tags.

    A player is 48 ms behind what was fed (mean, at 24 kHz), nearly all of it the codec's own delay. At
    64 kbit/s it would be 72 ms: bits are then borrowed from earlier frames, and a frame is complete later.

    Source: `python -m scripts.measure.encoders`.

    Raises:
        UnsupportedAudio: mp3 knows neither this rate nor more than two channels.
    """

    def __init__(self, pcm: PcmFormat) -> None:
        if pcm.rate_hz not in MP3_RATES_HZ or pcm.channels not in (1, 2):
            rates = ", ".join(map(str, MP3_RATES_HZ))
            raise UnsupportedAudio(
                f"mp3 has one or two channels at {rates} Hz, not {pcm.channels} at {pcm.rate_hz} Hz"
            )
        self._encoder = _lame(pcm)

    def feed(self, samples: bytes) -> bytes:
        """Return the frames that are complete now."""
        return bytes(self._encoder.encode(samples))

    def close(self) -> bytes:
        """Return the last frames."""
        return bytes(self._encoder.flush())


class _Lame(Protocol):
    """The part of `lameenc.Encoder` that is used."""

    def silence(self) -> None: ...
    def set_channels(self, channels: int) -> None: ...
    def set_in_sample_rate(self, rate_hz: int) -> None: ...
    def set_out_sample_rate(self, rate_hz: int) -> None: ...
    def set_bit_rate(self, rate_kbps: int) -> None: ...
    def set_quality(self, quality: int) -> None: ...
    def encode(self, samples: bytes) -> bytearray: ...
    def flush(self) -> bytearray: ...


def _lame(pcm: PcmFormat) -> _Lame:
    import lameenc  # noqa: PLC0415 - only servers encode

    encoder = cast("_Lame", lameenc.Encoder())  # pyright: ignore[reportUnknownMemberType] - no stubs
    encoder.silence()
    encoder.set_channels(pcm.channels)
    encoder.set_in_sample_rate(pcm.rate_hz)
    encoder.set_out_sample_rate(pcm.rate_hz)
    rate_kbps = 64 if pcm.rate_hz <= _LOW_RATE_HZ else 96 if pcm.channels == 1 else 160
    encoder.set_bit_rate(rate_kbps)
    encoder.set_quality(_QUALITY)
    return encoder


_MAKERS: Mapping[str, Callable[[PcmFormat], Encoder]] = {
    "mp3": Mp3Encoder,
    "wav": WavEncoder,
    "pcm": PcmEncoder,
}
