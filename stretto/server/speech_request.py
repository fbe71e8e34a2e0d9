"""The body of `POST /v1/audio/speech`: JSON bytes become a checked `SpeechRequest`, or one typed error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema

from stretto.errors import InvalidRequest

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

FORMATS = ("mp3", "wav", "pcm")
"""What `response_format` may be; the first is OpenAI's default, and ours."""

STREAM_FORMATS = ("audio", "sse")
"""What `stream_format` may be: raw bytes, or server-sent events."""

_INT64 = 2**63

_VOICE_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "string"},
        {"type": "object", "properties": {"id": {"type": "string"}}, "required": ["id"]},
    ],
    "description": "A voice's name; OpenAI's names stand for the default voice.",
}


class SpeechRequest(BaseModel):
    """What a client may ask for. Unknown fields are ignored: OpenAI's clients send new ones."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    input: Annotated[str, Field(description="The text to speak.", examples=["Hello, world."])]
    model: Annotated[str | None, Field(description="A pipeline, or OpenAI's name for one.")] = None
    voice: Annotated[object, WithJsonSchema(_VOICE_SCHEMA)] = None
    response_format: Annotated[
        Literal["mp3", "wav", "pcm"] | None, Field(description="Default: mp3.")
    ] = None
    speed: Annotated[
        float | None, Field(ge=0.25, le=4.0, allow_inf_nan=False, description="1.0 is normal.")
    ] = None
    stream_format: Annotated[
        Literal["audio", "sse"] | None,
        Field(description="Raw bytes, the default, or server-sent events."),
    ] = None
    stream: Annotated[bool | None, Field(description="`false` buffers, with exact sizes.")] = None
    seed: Annotated[
        int | None, Field(ge=-_INT64, lt=_INT64, description="Same seed, same bytes.")
    ] = None

    @property
    def voice_name(self) -> str | None:
        """The name of the wanted voice, `None` for the default one."""
        return self.voice if isinstance(self.voice, str) else None

    @property
    def container(self) -> str:
        """The wanted format."""
        return self.response_format or FORMATS[0]

    @property
    def is_streamed(self) -> bool:
        """Whether bytes are sent as they are made."""
        return self.stream is not False

    @property
    def as_events(self) -> bool:
        """Whether the audio travels in server-sent events."""
        return self.stream_format == "sse"


def parse_speech_request(body: bytes, max_input_chars: int) -> SpeechRequest:
    """Return the request that a body holds.

    Raises:
        InvalidRequest: `param` is the dotted path of the field at fault, `None` for the whole body.
    """
    try:
        parsed = SpeechRequest.model_validate_json(body)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False, include_context=True)[0]) from None
    voice = _voice(parsed.voice)
    if not parsed.input.strip():
        raise InvalidRequest(
            "`input` is blank; send the text to speak.", param="input", code="invalid_value"
        )
    if len(parsed.input) > max_input_chars:
        raise InvalidRequest(
            f"`input` has {len(parsed.input)} characters; at most {max_input_chars} are allowed.",
            param="input",
            code="string_above_max_length",
        )
    if parsed.as_events and not parsed.is_streamed:
        raise InvalidRequest(
            "`stream` can't be false with `stream_format` sse; leave one of them out.",
            param="stream",
            code="unsupported_value",
        )
    return parsed.model_copy(update={"voice": voice})


def _voice(voice: object) -> str | None:
    """Return the name in either form of the field."""
    param = "voice"
    if isinstance(voice, dict):
        voice, param = voice.get("id"), "voice.id"  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    elif voice is None:
        return None
    if not isinstance(voice, str):
        raise InvalidRequest(
            f'`{param}` must be a string; `voice` is a name or {{"id": name}}.',
            param=param,
            code="invalid_type",
        )
    if not voice.strip():
        raise InvalidRequest(
            f"`{param}` is blank; leave `voice` out for the default.",
            param=param,
            code="invalid_value",
        )
    return voice


def _refusal(found: ErrorDetails) -> InvalidRequest:
    """Put pydantic's first finding into OpenAI's words."""
    kind = found["type"]
    param = ".".join(str(part) for part in found["loc"]) or None
    if kind == "json_invalid":
        what = found["msg"].removeprefix("Invalid JSON: ")
        return InvalidRequest(f"The body is not JSON: {what}.", code="invalid_json")
    if param is None:
        return InvalidRequest(
            'The body must be a JSON object such as {"input": "Hello"}.', code="invalid_type"
        )
    if kind == "missing":
        return InvalidRequest(
            f"`{param}` is missing.", param=param, code="missing_required_parameter"
        )
    if kind == "literal_error" and isinstance(found["input"], str):
        return _unsupported(param)
    is_type = kind.endswith("_type") or kind in ("finite_number", "literal_error")
    code = "invalid_type" if is_type else "invalid_value"
    return InvalidRequest(f"`{param}`: {found['msg']}.", param=param, code=code)


def _unsupported(param: str) -> InvalidRequest:
    allowed = FORMATS if param == "response_format" else STREAM_FORMATS
    text = f"`{param}` can be {', '.join(allowed[:-1])} or {allowed[-1]} here."
    return InvalidRequest(text, param=param, code="unsupported_value")
