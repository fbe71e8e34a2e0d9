"""How encoded audio travels: as the bytes themselves, or as server-sent events.

In both forms the same request gives the same audio bytes. Event names and fields are OpenAI's.
"""

from __future__ import annotations

import json
import math
from base64 import b64encode
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from stretto.audio.encoders import MEDIA_TYPES
from stretto.server.errors import error_body

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stretto.audio.pcm import PcmFormat
    from stretto.errors import StrettoError

_BASE64_BYTES = 3
"""So many bytes, and multiples of them, become base64 without padding."""

OUTPUT_TOKEN_S = 0.05
"""Audio counts as one token per 50 ms: there are no others that a client could know of."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request has cost, in the units that stand for tokens here.

    Attributes:
        input_chars: Characters of the text.
        audio_s: Playing time of the audio.
    """

    input_chars: int
    audio_s: float

    def counts(self) -> dict[str, int]:
        """Return OpenAI's three numbers."""
        made = math.ceil(round(self.audio_s / OUTPUT_TOKEN_S, 6))
        return {
            "input_tokens": self.input_chars,
            "output_tokens": made,
            "total_tokens": self.input_chars + made,
        }


class SpeechBody(Protocol):
    """A form of the reply's body."""

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers of this form."""
        ...

    def piece(self, audio: bytes) -> bytes:
        """Return what is sent for a piece of encoded audio; may be empty."""
        ...

    def end(self, usage: Usage) -> bytes:
        """Return what is sent after the last piece."""
        ...

    def failure(self, error: StrettoError, request_id: str) -> bytes:
        """Return what is sent before the connection is broken off."""
        ...


class RawBody:
    """The audio itself."""

    def __init__(self, response_format: str) -> None:
        self.headers = {
            "content-type": MEDIA_TYPES[response_format],
            "cache-control": "no-store",
        }

    def piece(self, audio: bytes) -> bytes:
        """Return it."""
        return audio

    def end(self, usage: Usage) -> bytes:
        """Return nothing."""
        del usage
        return b""

    def failure(self, error: StrettoError, request_id: str) -> bytes:
        """Return nothing: the missing end is the message."""
        del error, request_id
        return b""


class EventBody:
    """Server-sent events with audio in base64.

    Clients join the base64 text before they decode it, so each event but the last holds a multiple of three
    bytes, and of whole frames where the audio is bare samples.
    """

    def __init__(self, response_format: str, pcm: PcmFormat) -> None:
        self.headers = {"content-type": "text/event-stream", "cache-control": "no-cache"}
        frame_bytes = pcm.frame_bytes if response_format == "pcm" else 1
        self._unit_bytes = math.lcm(frame_bytes, _BASE64_BYTES)
        self._rest = b""

    def piece(self, audio: bytes) -> bytes:
        """Return an event, or nothing until there is enough for one."""
        data = self._rest + audio
        cut = len(data) - len(data) % self._unit_bytes
        self._rest = data[cut:]
        return _delta(data[:cut]) if cut else b""

    def end(self, usage: Usage) -> bytes:
        """Return the last piece and the one end marker."""
        last = _delta(self._rest) if self._rest else b""
        done = {"type": "speech.audio.done", "usage": usage.counts()}
        return last + _event("speech.audio.done", json.dumps(done).encode())

    def failure(self, error: StrettoError, request_id: str) -> bytes:
        """Return an error event; a clean end must not follow it."""
        body = {"type": "error", **error_body(error, request_id)}
        return _event("error", json.dumps(body).encode())


def make_body(response_format: str, pcm: PcmFormat, *, as_events: bool) -> SpeechBody:
    """Return the form that was asked for."""
    return EventBody(response_format, pcm) if as_events else RawBody(response_format)


def _delta(audio: bytes) -> bytes:
    # Base64 needs no escaping, so the text of the JSON object is put together by hand.
    data = b'{"type":"speech.audio.delta","audio":"' + b64encode(audio) + b'"}'
    return _event("speech.audio.delta", data)


def _event(name: str, data: bytes) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"
