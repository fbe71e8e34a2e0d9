"""`stretto say`: text to a WAV file, by a running server or by an engine of its own."""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from typing import TYPE_CHECKING, BinaryIO, cast

import uvloop

from stretto.audio.pcm import SPEECH, wav_header
from stretto.engine import Engine
from stretto.errors import ConfigError, InvalidRequest, StageError

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping
    from http.client import HTTPResponse
    from pathlib import Path


def say_by_engine(text: str, options: Mapping[str, str | float | int], output: Path) -> None:
    """Start an engine, speak, write the file, and end the engine.

    Raises:
        StrettoError: The engine did not start, or the text could not be spoken.
    """
    _check(text, output)
    audio, first_s = uvloop.run(_speak(text, options))
    if not audio:
        raise InvalidRequest("there is nothing in this text that can be spoken", param="input")
    with _opened(output) as file:
        file.write(wav_header(SPEECH, len(audio)) + audio)
    _report(output, len(audio), first_s)


def _check(text: str, output: Path) -> None:
    """Find mistakes before anything is started.

    Raises:
        InvalidRequest: The text is blank.
        ConfigError: The file can't be written.
    """
    if not text.strip():
        raise InvalidRequest("the text is blank; say what to speak", param="input")
    if str(output) == "-":
        return
    if output.is_dir():
        raise ConfigError(f"{output} is a folder; name a file: -o {output}/speech.wav")
    if not os.access(output if output.exists() else output.absolute().parent, os.W_OK):
        raise ConfigError(f"{output} can't be written; name another file with -o")


async def _speak(text: str, options: Mapping[str, str | float | int]) -> tuple[bytes, float]:
    async with Engine.from_pipeline("speech") as engine:
        began = time.monotonic()
        first_s = 0.0
        audio = bytearray()
        async for chunk in engine.generate(text=text, options=dict(options)):
            if not audio:
                first_s = time.monotonic() - began
            piece = chunk.values.get("audio", b"")
            audio += cast("bytes", piece)
        return bytes(audio), first_s


def say_by_server(
    url: str, text: str, options: Mapping[str, str | float | int], output: Path
) -> None:
    """Ask a server for speech and write the file.

    Raises:
        InvalidRequest: The server refused the request; the text is the server's.
        StageError: The server can't be reached or the audio was cut short.
    """
    _check(text, output)
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{url!r} is no URL; write for example http://127.0.0.1:8000/v1")
    body = json.dumps(
        {"input": text, "response_format": "wav", "stream": False, **options}
    ).encode()
    request = urllib.request.Request(  # noqa: S310 - the operator's own URL
        f"{url.rstrip('/')}/audio/speech", data=body, headers={"Content-Type": "application/json"}
    )
    began = time.monotonic()
    try:
        with urllib.request.urlopen(request, timeout=600) as response:  # noqa: S310 - as above
            data = cast("HTTPResponse", response).read()
    except urllib.error.HTTPError as error:
        raise InvalidRequest(
            f"{url} answered {error.code}: {error.read().decode(errors='replace')}"
        ) from error
    except OSError as error:
        raise StageError(f"{url} can't be reached: {error}; is `stretto serve` running?") from error
    with _opened(output) as file:
        file.write(data)
    _report(output, len(data), time.monotonic() - began)


@contextmanager
def _opened(output: Path) -> Generator[BinaryIO]:
    if str(output) == "-":
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    with output.open("wb") as file:
        yield file


def _report(output: Path, size_bytes: int, first_s: float) -> None:
    if str(output) != "-":
        sys.stderr.write(
            f"{output}: {size_bytes / 48_000:.1f} s of speech, first audio after {first_s * 1000:.0f} ms\n"
        )
