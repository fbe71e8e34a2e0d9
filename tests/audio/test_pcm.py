"""PCM sizes and the WAV header, checked against the standard library's reader."""

from __future__ import annotations

import io
import subprocess
import sys
import wave

import pytest

from stretto.audio.pcm import SPEECH, WAV_HEADER_BYTES, PcmFormat, wav_header

STEREO = PcmFormat(rate_hz=48_000, channels=2)


@pytest.mark.parametrize("pcm", [SPEECH, STEREO])
@pytest.mark.parametrize("frames", [0, 1, 2400])
def test_an_exact_header_describes_the_file(pcm: PcmFormat, frames: int) -> None:
    """`wave` reads rate, channels, width and length from it, and the samples behind it."""
    samples = bytes(range(pcm.frame_bytes)) * frames
    header = wav_header(pcm, len(samples))
    with wave.open(io.BytesIO(header + samples)) as reader:
        assert reader.getparams()[:4] == (pcm.channels, 2, pcm.rate_hz, frames)
        assert reader.readframes(frames) == samples
    assert int.from_bytes(header[4:8], "little") == len(header + samples) - 8


def test_a_streaming_header_leaves_the_sizes_open() -> None:
    """Both size fields are 0xFFFFFFFF, and a reader plays what comes."""
    header = wav_header(SPEECH)
    assert len(header) == WAV_HEADER_BYTES
    assert header[4:8] == header[40:44] == b"\xff\xff\xff\xff"
    with wave.open(io.BytesIO(header + b"\x01\x02" * 10)) as reader:
        assert reader.readframes(20) == b"\x01\x02" * 10


@pytest.mark.parametrize("size_bytes", [-2, 1, 3, 0xFFFF_FFFE])
def test_sizes_that_no_wav_file_has_are_refused(size_bytes: int) -> None:
    """Half frames, negative sizes and 4 GiB are errors."""
    with pytest.raises(ValueError, match=str(size_bytes)):
        wav_header(SPEECH, size_bytes)


def test_sizes_and_durations_follow_from_the_frame() -> None:
    """Partial frames are left for the next write."""
    assert (SPEECH.frame_bytes, STEREO.frame_bytes) == (2, 4)
    assert [STEREO.whole_frames(size) for size in (0, 3, 4, 7, 8)] == [0, 0, 4, 4, 8]
    assert SPEECH.duration_s(48_000) == 1.0


def test_importing_it_imports_no_numpy() -> None:
    """API processes import it and hold no arrays."""
    code = "import sys, stretto.audio.pcm; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
