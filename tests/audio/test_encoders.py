"""Encoders: one continuous stream per response, whatever the pieces, decodable wherever it is cut."""

from __future__ import annotations

import math
import random
from array import array

import pytest

from stretto.audio.encoders import (
    MEDIA_TYPES,
    MP3_DELAY_SAMPLES,
    MP3_RATES_HZ,
    Encoder,
    UnsupportedAudio,
    make_encoder,
    warm_up,
)
from stretto.audio.pcm import WAV_HEADER_BYTES, PcmFormat, wav_header
from tests.support.decoding import decode, frames_of

MONO = PcmFormat(rate_hz=24000, channels=1)


def tone(pcm: PcmFormat, seconds: float) -> bytes:
    """Return a tone with a little noise, the same on all channels."""
    noise = random.Random(1)  # noqa: S311 - the same each time
    samples = array("h")
    for n in range(int(pcm.rate_hz * seconds)):
        value = 8000 * math.sin(2 * math.pi * 220 * n / pcm.rate_hz) + noise.gauss(0, 100)
        samples.extend([int(value)] * pcm.channels)
    return samples.tobytes()


def encode(name: str, pcm: PcmFormat, samples: bytes, piece_bytes: int) -> list[bytes]:
    """Return what comes out for each piece, the rest last."""
    encoder: Encoder = make_encoder(name, pcm)
    pieces = [samples[at : at + piece_bytes] for at in range(0, len(samples), piece_bytes)]
    return [*(encoder.feed(piece) for piece in pieces), encoder.close()]


def frame_samples(rate_hz: int) -> int:
    """Return the length of an mp3 frame."""
    return 1152 if rate_hz >= 32000 else 576


@pytest.mark.parametrize("name", MEDIA_TYPES)
def test_pieces_do_not_show_in_the_stream(name: str) -> None:
    """However the samples were cut, the bytes are the same: seeded requests stay comparable."""
    samples = tone(MONO, 0.7)
    whole = b"".join(encode(name, MONO, samples, len(samples)))
    assert b"".join(encode(name, MONO, samples, 3840)) == whole
    assert b"".join(encode(name, MONO, samples, 2)) == whole


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("rate_hz", [8000, 16000, 22050, 24000, 44100, 48000])
@pytest.mark.parametrize("name", ["mp3", "wav"])
def test_situation_F1_F7_one_header_with_the_right_rate_and_length(
    name: str, rate_hz: int, channels: int
) -> None:
    """Twenty chunks decode to their length, at their rate, with their channels."""
    pcm = PcmFormat(rate_hz=rate_hz, channels=channels)
    samples = tone(pcm, 1.0)
    data = b"".join(encode(name, pcm, samples, pcm.whole_frames(len(samples) // 20)))
    assert data.count(b"RIFF") == (1 if name == "wav" else 0)
    found = decode(data)
    assert (found.rate_hz, found.channels) == (rate_hz, channels)
    if name == "wav":
        assert data == wav_header(pcm) + samples
    else:
        extra = found.frames - rate_hz - MP3_DELAY_SAMPLES
        assert 0 <= extra <= 2 * frame_samples(rate_hz)


def test_the_first_piece_can_be_played_at_once_and_the_lag_stays_small() -> None:
    """A player of an mp3 stream is never more than 67 ms behind the samples."""
    samples = tone(MONO, 2.0)
    piece_bytes = MONO.frame_bytes * MONO.rate_hz * 80 // 1000
    sent = b""
    lags_ms: list[float] = []
    for number, piece in enumerate(encode("mp3", MONO, samples, piece_bytes)[:-1], start=1):
        sent += piece
        behind = number * piece_bytes // MONO.frame_bytes - frames_of(sent)
        lags_ms.append(behind / MONO.rate_hz * 1000)
    assert max(lags_ms) <= 67
    assert sum(lags_ms) / len(lags_ms) <= 58


@pytest.mark.slow
def test_an_mp3_stream_is_decodable_wherever_it_is_cut() -> None:
    """A player gets what has arrived; more bytes never give less sound."""
    data = b"".join(encode("mp3", MONO, tone(MONO, 0.5), 3840))
    before = 0
    for cut in range(600, len(data), 41):
        frames = frames_of(data[:cut])
        assert frames >= before
        before = frames


def test_two_responses_share_nothing() -> None:
    """Encoders that are used in turns give what each gives alone."""
    first, second = tone(MONO, 0.3), bytes(len(tone(MONO, 0.3)))
    alone = [b"".join(encode("mp3", MONO, samples, 4800)) for samples in (first, second)]
    encoders = [make_encoder("mp3", MONO) for _ in range(2)]
    together = [b"", b""]
    for at in range(0, len(first), 4800):
        for number, samples in enumerate((first, second)):
            together[number] += encoders[number].feed(samples[at : at + 4800])
    assert [out + encoder.close() for out, encoder in zip(together, encoders, strict=True)] == alone


@pytest.mark.parametrize(
    "pcm", [PcmFormat(rate_hz=96000, channels=1), PcmFormat(rate_hz=24000, channels=3)]
)
def test_what_mp3_can_not_hold_is_refused(pcm: PcmFormat) -> None:
    """The text names the rates that it knows."""
    with pytest.raises(UnsupportedAudio, match="24000"):
        make_encoder("mp3", pcm)
    assert make_encoder("pcm", pcm).feed(b"ab") == b"ab"


def test_every_known_rate_can_be_encoded() -> None:
    """The list is the encoder's own."""
    for rate_hz in MP3_RATES_HZ:
        pcm = PcmFormat(rate_hz=rate_hz, channels=1)
        assert frames_of(b"".join(encode("mp3", pcm, tone(pcm, 0.3), 4096)))


def test_a_wav_stream_begins_with_its_header_and_warming_up_does_no_harm() -> None:
    """Even an empty piece carries it."""
    warm_up()
    encoder = make_encoder("wav", MONO)
    assert len(encoder.feed(b"")) == WAV_HEADER_BYTES
    assert encoder.feed(b"ab") == b"ab"
    assert encoder.close() == b""
