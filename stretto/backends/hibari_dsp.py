"""Spectral frames to audio, a block at a time: the signal processing of the `hibari` voice.

A frame is 12.5 ms: five parts of 601 values (log magnitude and phase of the harmonics, log
magnitude of the noise, log magnitude and phase of the rest) and the pitch in Hz. Its spectrum is

    exp(harmonic) e^{i pi tanh(angle)} STFT(pulses(pitch)) + exp(noise) Z + exp(rest) e^{i phase}

with Z complex Gaussian; the audio is the inverse STFT (1200 samples, hop 300, Hann).

The grid. A segment (one utterance) is computed in blocks of `BLOCK` frames that start at multiples
of `BLOCK`, whatever pieces the frames come in, and Z of a block is drawn from a counter-based
generator at (seed, segment, block). So the samples depend on the segment's frames, its number and
the seed alone. What a block of frames s to s+n-1 touches:

    hop              s-2   s-1    s    s+1   ...  s+n-3 s+n-2 s+n-1  s+n
    spectrum s        #     #     #     #                                    reads, then adds to
    spectrum s+n-1                                  #     #     #     #      reads, then adds to
    final then       |<------------------------------->|

The pulses of hop s+n interpolate towards the pitch of frame s+n+1: hence `LOOK_AHEAD` is 2. Before
the first hop and behind the last, the pulses are mirrored.

Source: the formulas of the package `hibari-tts` 0.2.1 (Apache-2.0); a test compares the results.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float32]
Spectra: TypeAlias = NDArray[np.complex64]

RATE_HZ = 24_000
HOP = 300
"""Samples per frame."""
BINS = 601
PARTS = 5
PITCH = PARTS * BINS
"""Where the pitch is in a frame."""
FRAME_WIDTH = PITCH + 1
"""Values in a frame, float32."""

BLOCK = 8
"""Frames per block: 100 ms. Half of it costs a third more time and gains 0.2 ms of first audio."""
LOOK_AHEAD = 2
"""Frames behind a block that must be known before it is computed, unless the segment ends."""

_WINDOW_HOPS = 4
_WINDOW_SIZE = _WINDOW_HOPS * HOP
_HALF_WINDOW = _WINDOW_SIZE // 2
_HALF_HOPS = _HALF_WINDOW // HOP
_CARRIED_HOPS = _WINDOW_HOPS - 1

_VOICED_HZ = 40.0
_HIGHEST_HARMONIC_HZ = 11_000.0
_SINGULAR = 2e-3  # below it the pulse formula is replaced by its limit
_LARGEST_LOG = 7.0

_WINDOW: Floats = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(_WINDOW_SIZE) / _WINDOW_SIZE)).astype(
    np.float32
)
_SOURCE_WINDOW: Floats = _WINDOW / np.float32(HOP)

# Sample j of a frame lies between the pitch of the frame before and its own (first half of the hop)
# or between its own and that of the frame behind (second half).
_TOWARDS: Floats = (((np.arange(HOP) + 0.5) / HOP - 0.5) % 1.0).astype(np.float32)
_FROM: Floats = np.float32(1.0) - _TOWARDS

_SEED_BITS = 64
_SEED_MASK = (1 << _SEED_BITS) - 1


def _overlap_norms() -> dict[tuple[int, int], Floats]:
    """Return one over the summed squared window by which of the four hops of it take part."""
    squares = (_WINDOW * _WINDOW).reshape(_WINDOW_HOPS, HOP)
    return {
        (first, last): np.float32(1.0)
        / np.maximum(squares[first : last + 1].sum(axis=0), np.float32(1e-11))
        for last in range(_WINDOW_HOPS)
        for first in range(last + 1)
    }


_NORMS = _overlap_norms()
_INNER_NORM = _NORMS[0, _WINDOW_HOPS - 1]


class Workspace:
    """Scratch memory of one compute thread; segments share it, since they are computed in turn."""

    def __init__(self) -> None:
        self.parts: Floats = np.empty((PARTS, BLOCK, BINS), np.float32)
        self.turn: Spectra = np.empty((BLOCK, BINS), np.complex64)


class Segment:
    """The synthesis of one utterance, fed with its frames in order and in pieces of any size."""

    __slots__ = ("_hertz_sum", "_key", "_overlap", "_pulses", "_rows", "_start", "_workspace")

    def __init__(self, seed: int, number: int, workspace: Workspace) -> None:
        self._key = (number & _SEED_MASK) << _SEED_BITS | seed & _SEED_MASK
        self._workspace = workspace
        self._start = 0  # the next block's first frame
        self._rows: Floats = np.empty((0, FRAME_WIDTH), np.float32)  # known frames from there on
        self._pulses: Floats = np.empty(0, np.float32)  # of the three frames up to `_start`
        self._hertz_sum = 0.0  # the pulses' phase, times the rate
        self._overlap: Floats = np.zeros((_CARRIED_HOPS, HOP), np.float32)

    def feed(self, frames: Floats, *, ends: bool) -> Floats:
        """Return the samples that are final now; all of them once the segment ends.

        Args:
            frames: float32 `[frames, FRAME_WIDTH]`; not kept.
            ends: No frame follows. The segment can't be fed again.
        """
        rows = np.concatenate((self._rows, frames)) if len(self._rows) else frames
        hops: list[Floats] = []
        at = 0
        while len(rows) - at >= BLOCK + LOOK_AHEAD or (ends and len(rows) > at):
            hops.append(self._block(rows[at : at + BLOCK], rows[at:, PITCH][: BLOCK + LOOK_AHEAD]))
            at += BLOCK
        if ends:
            hops.append(
                _normalised(self._overlap[:_HALF_HOPS], first=self._start, frames=self._start)
            )
        else:
            self._rows = rows[at:].copy()
        return np.concatenate(hops).reshape(-1) if hops else np.empty(0, np.float32)

    def _block(self, rows: Floats, pitch: Floats) -> Floats:
        """Return the hops `[hops, HOP]` that this block completes."""
        count = len(rows)
        source = self._source(count, pitch)
        waves = _waves(self._spectra(rows, source))
        summed = np.zeros((count + _CARRIED_HOPS, HOP), np.float32)
        summed[:_CARRIED_HOPS] = self._overlap
        for hop in range(_WINDOW_HOPS):
            summed[hop : hop + count] += waves[:, hop]
        self._overlap = summed[count:].copy()
        final = summed[:count]
        if self._start:
            final *= _INNER_NORM
        else:
            final = _normalised(final, first=0, frames=count)
        self._start += count
        return final

    def _source(self, count: int, pitch: Floats) -> Floats:
        """Return the pulses that the spectra of the block's `count` frames read.

        Args:
            count: Frames in the block.
            pitch: Of the block's frames and up to `LOOK_AHEAD` behind; fewer only at the segment's end.
        """
        is_first = not self._start
        ends_in_reach = len(pitch) <= count
        curve = [pitch[:1], pitch] if is_first else [pitch]
        if len(pitch) < count + LOOK_AHEAD:
            curve.append(pitch[-1:])
        source = np.concatenate((self._pulses, self._new_pulses(np.concatenate(curve))))
        if is_first or ends_in_reach:
            mirrored = (_HALF_WINDOW if is_first else 0, HOP if ends_in_reach else 0)
            source = np.pad(source, mirrored, mode="reflect")
        self._pulses = source[count * HOP :].copy()
        return source

    def _new_pulses(self, curve: Floats) -> Floats:
        """Return a pulse train of unit harmonics for the frames between `curve`'s first and last."""
        before, here, behind = curve[:-2, None], curve[1:-1, None], curve[2:, None]
        half = HOP // 2
        hertz = np.empty((len(here), HOP), np.float32)
        hertz[:, :half] = before * _FROM[:half] + here * _TOWARDS[:half]
        hertz[:, half:] = here * _FROM[half:] + behind * _TOWARDS[half:]
        hertz = hertz.reshape(-1)
        if not len(hertz):
            return hertz
        is_voiced = hertz > _VOICED_HZ
        np.maximum(hertz, np.float32(_VOICED_HZ), out=hertz)
        angle = self._angles(hertz)
        harmonics = np.floor(np.float32(_HIGHEST_HARMONIC_HZ) / hertz) + np.float32(0.5)
        below = np.sin(angle * np.float32(0.5)) * np.float32(2.0)
        is_singular = np.abs(below) <= _SINGULAR
        below[is_singular] = 1.0
        train: Floats = np.sin(harmonics * angle)
        train /= below
        train[is_singular] = harmonics[is_singular]
        train -= np.float32(0.5)
        train[~is_voiced] = 0.0
        return train

    def _angles(self, hertz: Floats) -> Floats:
        """Return the running phase in [0, 2 pi), and remember where it ends.

        The sum goes on from the last block's in the same order as over the whole curve, so that a
        phase is the same number as without blocks.
        """
        turns = hertz.astype(np.float64)
        turns[0] += self._hertz_sum
        np.cumsum(turns, out=turns)
        self._hertz_sum = float(turns[-1])
        turns *= 1.0 / RATE_HZ
        np.modf(turns, turns, np.empty_like(turns))
        turns *= 2.0 * np.pi
        return turns.astype(np.float32)

    def _spectra(self, rows: Floats, source: Floats) -> Spectra:
        count = len(rows)
        parts = self._workspace.parts[:, :count]
        np.copyto(parts, rows[:, :PITCH].reshape(count, PARTS, BINS).transpose(1, 0, 2))
        harmonic, angle, noise, rest, phase = parts
        for log in (harmonic, noise, rest):
            np.exp(np.minimum(log, np.float32(_LARGEST_LOG), out=log), out=log)
        np.multiply(np.tanh(angle, out=angle), np.float32(np.pi), out=angle)
        windows = np.lib.stride_tricks.sliding_window_view(source, _WINDOW_SIZE)[::HOP][:count]
        spectra = np.fft.rfft(windows * _SOURCE_WINDOW, axis=1).astype(np.complex64, copy=False)
        spectra *= self._turned(harmonic, angle)
        spectra += self._noise(count) * noise
        spectra += self._turned(rest, phase)
        return spectra

    def _turned(self, magnitude: Floats, angle: Floats) -> Spectra:
        """Return `magnitude * e^{i angle}`, valid until the next call."""
        turn = self._workspace.turn[: len(angle)]
        np.multiply(np.cos(angle), magnitude, out=turn.real)
        np.multiply(np.sin(angle), magnitude, out=turn.imag)
        return turn

    def _noise(self, count: int) -> Spectra:
        counter = self._start // BLOCK << _SEED_BITS  # the low word counts the draws of this block
        bits = np.random.Generator(np.random.Philox(key=self._key, counter=counter))
        return bits.standard_normal((count, 2 * BINS), dtype=np.float32).view(np.complex64)


def _waves(spectra: Spectra) -> Floats:
    waves = np.fft.irfft(spectra, _WINDOW_SIZE, axis=1).astype(np.float32, copy=False)
    waves *= _WINDOW
    return waves.reshape(len(spectra), _WINDOW_HOPS, HOP)


def _normalised(hops: Floats, *, first: int, frames: int) -> Floats:
    """Scale hops near an end of the segment by the windows that cover them.

    Args:
        hops: Overlap-added hops, from number `first` on.
        first: Counted from where the first window begins: two hops before the audio, which are dropped.
        frames: Frames that take part.
    """
    scaled = [
        hops[hop - first] * _NORMS[max(0, hop - frames + 1), min(hop, _CARRIED_HOPS)]
        for hop in range(max(first, _HALF_HOPS), first + len(hops))
    ]
    return np.array(scaled, np.float32).reshape(-1, HOP)


def silence(frames: int) -> Floats:
    """Return frames without any energy."""
    quiet = np.full((frames, FRAME_WIDTH), -60.0, np.float32)
    quiet[:, PITCH] = 0.0
    return quiet
