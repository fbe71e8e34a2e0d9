"""`POST /v1/audio/speech`: from the checked request to the last byte of audio.

The status is sent together with the first audio, so a failure before it is a proper error reply. After it,
the transfer is broken off visibly: an HTTP body that ends cleanly would say that all is there.

One task per request watches for the client's end. It aborts the stream, and the reading side, wherever
it waits, sees that as the stream's error.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.responses import Response

from stretto.audio.encoders import UnsupportedAudio, make_encoder
from stretto.audio.pcm import SAMPLE_BYTES, wav_header
from stretto.errors import Cancelled, DeadlineExceeded, InvalidRequest, StageError, StrettoError
from stretto.server.catalog import AUDIO, SpeechModel, check_started, speech_model
from stretto.server.errors import error_response, rule_of
from stretto.server.speech_body import Usage, make_body

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from starlette.types import Receive, Scope, Send

    from stretto.audio.encoders import Encoder
    from stretto.core.commands import Timings
    from stretto.engine.stream import OutputChunk
    from stretto.server.contract import SpeechEngine, SpeechStream
    from stretto.server.in_flight import InFlight
    from stretto.server.speech_body import SpeechBody
    from stretto.server.speech_request import SpeechRequest

log = logging.getLogger("stretto.server")

BREAK_OFF = "stretto.break_off"
"""ASGI extension of our server: `{"call": function}`; `function(at_once)` ends the connection in the middle
of a body, after what was written or at once."""

MAX_BUFFERED_BYTES = 64 * 1024 * 1024
"""Largest reply that is collected before it is sent (`stream: false`): 23 minutes at 24 kHz."""

_SERVER_FAULT = 500


class BodyBroken(Exception):
    """The body can't be completed; whoever runs the application must not end it cleanly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechLimits:
    """Bounds of one reply.

    Attributes:
        first_chunk_timeout_s: Longest wait for the first audio.
        slow_client_timeout_s: Longest wait of a write for a client that does not read.
        max_buffered_bytes: Largest reply that is collected.
    """

    first_chunk_timeout_s: float
    slow_client_timeout_s: float
    max_buffered_bytes: int = MAX_BUFFERED_BYTES


class SpeechReply(Response):
    """Submits the request and sends its audio. An ASGI application of one use."""

    def __init__(
        self, engine: SpeechEngine, in_flight: InFlight, limits: SpeechLimits, asked: SpeechRequest
    ) -> None:
        self._engine = engine
        self._in_flight = in_flight
        self._limits = limits
        self._asked = asked
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request to its end, or to its client's."""
        state = scope["state"]
        exchange = _Exchange(
            scope, receive, send, self._limits, state["request_id"], state["arrived_s"]
        )
        try:
            self._in_flight.check_open()
            check_started(self._engine)
            model = speech_model(self._engine, self._asked.model)
            encoder = _encoder(self._asked.container, model)
            stream = self._submit(model, exchange.request_id)
            with self._in_flight.running(stream.abort):
                await exchange.serve(stream, encoder, model, self._asked)
        except StrettoError as error:
            await exchange.fail(error)

    def _submit(self, model: SpeechModel, label: str) -> SpeechStream:
        asked = self._asked
        wanted = {"voice": model.voice(asked.voice_name), "speed": asked.speed, "seed": asked.seed}
        return self._engine.generate(
            pipeline=model.name,
            outputs=(AUDIO,),
            options={name: value for name, value in wanted.items() if value is not None},
            label=label,
            text=asked.input,
        )


class _Exchange:
    """One client and what it was sent."""

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        limits: SpeechLimits,
        request_id: str,
        arrived_s: float,
    ) -> None:
        self.request_id = request_id
        self._limits = limits
        self._scope = scope
        self._receive = receive
        self._send = send
        self._arrived_s = arrived_s
        extension = scope.get("extensions", {}).get(BREAK_OFF)
        self._break_off: Callable[[bool], None] | None = extension and extension["call"]
        self._body: SpeechBody | None = None  # what has begun to be sent
        self._client_left = False

    async def serve(
        self, stream: SpeechStream, encoder: Encoder, model: SpeechModel, asked: SpeechRequest
    ) -> None:
        """Send the stream's audio; the stream is over when this returns."""
        watch = asyncio.get_running_loop().create_task(self._watch(stream))
        try:
            audio = _Audio(stream, model.pcm.frame_bytes, self._limits.first_chunk_timeout_s)
            send = self._send_streamed if asked.is_streamed else self._send_buffered
            await send(audio, encoder, model, asked)
        finally:
            watch.cancel()
            stream.abort()
            await asyncio.wait([watch])

    async def fail(self, error: StrettoError) -> None:
        """Answer with an error, or break off what has begun. A client that has left gets nothing."""
        if self._body is not None or rule_of(error).status >= _SERVER_FAULT:
            log.warning("%s: %s: %s", self.request_id, type(error).__name__, error.detail)
        if self._client_left:
            return
        if self._body is None:
            await error_response(error, self.request_id)(self._scope, self._receive, self._send)
            return
        await self._write(self._body.failure(error, self.request_id))
        if self._break_off is None:
            raise BodyBroken(self.request_id)
        self._break_off(False)  # noqa: FBT003 - see `BREAK_OFF`

    async def _watch(self, stream: SpeechStream) -> None:
        """Abort the stream when the client has left."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._client_left = True
        stream.abort(Cancelled("The client has left."))

    async def _send_streamed(
        self, audio: _Audio, encoder: Encoder, model: SpeechModel, asked: SpeechRequest
    ) -> None:
        data = await audio.first()
        body = make_body(asked.container, model.pcm, as_events=asked.as_events)
        await self._start(body, model, audio.timings)
        while data:
            await self._write(body.piece(encoder.feed(data)))
            data = await audio.next()
        usage = Usage(len(asked.input), model.pcm.duration_s(audio.size_bytes))
        await self._write(body.piece(encoder.close()) + body.end(usage), more=False)

    async def _send_buffered(
        self, audio: _Audio, encoder: Encoder, model: SpeechModel, asked: SpeechRequest
    ) -> None:
        parts: list[bytes] = []
        data = await audio.first()
        while data:
            # A file whose length is known gets a header that tells it.
            parts.append(data if asked.container == "wav" else encoder.feed(data))
            if audio.size_bytes > self._limits.max_buffered_bytes:
                raise InvalidRequest(
                    f"The audio is longer than {self._limits.max_buffered_bytes} bytes of samples; "
                    "leave out `stream` to get it as it is made.",
                    param="stream",
                    code="unsupported_value",
                )
            data = await audio.next()
        if asked.container == "wav":
            parts.insert(0, wav_header(model.pcm, audio.size_bytes))
        else:
            parts.append(encoder.close())
        whole = b"".join(parts)
        body = make_body(asked.container, model.pcm, as_events=False)
        await self._start(body, model, audio.timings, {"content-length": str(len(whole))})
        await self._write(whole, more=False)

    async def _start(
        self,
        body: SpeechBody,
        model: SpeechModel,
        timings: Timings | None,
        more: Mapping[str, str] | None = None,
    ) -> None:
        headers = {
            **body.headers,
            **(more or {}),
            "x-sample-rate": str(model.pcm.rate_hz),
            "x-channels": str(model.pcm.channels),
            "x-bit-depth": str(8 * SAMPLE_BYTES),
            "x-accel-buffering": "no",
            "server-timing": server_timing(timings, time.monotonic() - self._arrived_s),
        }
        self._body = body
        self._scope["state"]["first_audio_s"] = time.monotonic() - self._arrived_s
        encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": 200, "headers": encoded})

    async def _write(self, data: bytes, *, more: bool = True) -> None:
        """Write a piece of the body; this waits while the client does not read."""
        if not data and more:
            return  # an encoder may keep the first samples back
        timer = asyncio.get_running_loop().call_later(
            self._limits.slow_client_timeout_s, self._drop_client
        )
        try:
            await self._send({"type": "http.response.body", "body": data, "more_body": more})
        finally:
            timer.cancel()

    def _drop_client(self) -> None:
        """Hang up on a client that has stopped reading; the pending write then returns."""
        log.warning("%s: its client does not read", self.request_id)
        if self._break_off is not None:
            self._break_off(True)  # noqa: FBT003 - see `BREAK_OFF`


class _Audio:
    """A stream's audio bytes: whole frames, never an empty piece before the end.

    Attributes:
        timings: Where the time to the first audio went.
        size_bytes: How many bytes were returned so far.
    """

    def __init__(self, stream: SpeechStream, frame_bytes: int, first_timeout_s: float) -> None:
        self.timings: Timings | None = None
        self.size_bytes = 0
        self._stream = stream
        self._frame_bytes = frame_bytes
        self._first_timeout_s = first_timeout_s

    async def first(self) -> bytes:
        """Return the first piece.

        Raises:
            DeadlineExceeded: It did not come in time; the stream is aborted.
            InvalidRequest: The request has finished without any audio.
        """
        late = DeadlineExceeded(f"No audio within {self._first_timeout_s:g} s.")
        timer = asyncio.get_running_loop().call_later(
            self._first_timeout_s, self._stream.abort, late
        )
        try:
            data = await self.next()
        finally:
            timer.cancel()
        if not data:
            raise InvalidRequest(
                "`input` gave no audio: there is nothing in it that can be spoken.",
                param="input",
                code="no_audio",
            )
        return data

    async def next(self) -> bytes:
        """Return the next piece, empty at the end."""
        async for chunk in self._stream:
            if self.timings is None:
                self.timings = chunk.timings
            data = self._bytes(chunk)
            if data:
                self.size_bytes += len(data)
                return data
        return b""

    def _bytes(self, chunk: OutputChunk) -> bytes:
        value = chunk.values.get(AUDIO)
        if value is None or chunk.kind != "data":
            return b""
        if not isinstance(value, bytes | memoryview):
            raise StageError(f"The value {AUDIO!r} is a {type(value).__name__}, not samples.")
        data = bytes(value)
        if len(data) % self._frame_bytes:
            raise StageError(
                f"A chunk of {len(data)} bytes is no whole number of {self._frame_bytes}-byte frames."
            )
        return data


def _encoder(container: str, model: SpeechModel) -> Encoder:
    """Return an encoder for a reply.

    Raises:
        InvalidRequest: The format can't hold this model's audio.
    """
    try:
        return make_encoder(container, model.pcm)
    except UnsupportedAudio as error:
        raise InvalidRequest(
            f"`response_format` can't be {container} for model {model.name!r}: {error}; use wav or pcm.",
            param="response_format",
            code="unsupported_value",
        ) from error


def server_timing(timings: Timings | None, ttfa_s: float) -> str:
    """Return the `Server-Timing` header, in ms: in the queue, per stage to its first chunk, in all."""
    parts: list[tuple[str, float]] = []
    if timings is not None:
        parts.append(("queue", timings.queued_s))
        parts += [
            (str(t.stage), t.first_chunk_s) for t in timings.stages if t.first_chunk_s is not None
        ]
    parts.append(("ttfa", ttfa_s))
    return ", ".join(f"{name};dur={seconds * 1000:.1f}" for name, seconds in parts)
