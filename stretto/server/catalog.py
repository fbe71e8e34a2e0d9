"""Names that clients use, and what they stand for here: models are pipelines, voices are a stage's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stretto.audio.pcm import PcmFormat
from stretto.config.mistakes import did_you_mean
from stretto.engine.client import EngineState
from stretto.errors import EngineDead, InvalidRequest, NoReplica, StageError
from stretto.types import OutputName, StageId

if TYPE_CHECKING:
    from stretto.engine.readiness import Readiness
    from stretto.messages.channel import PipelineInfo
    from stretto.messages.link import StageFacts
    from stretto.server.contract import SpeechEngine

MODEL_ALIASES = ("tts-1", "tts-1-hd", "gpt-4o-mini-tts")
"""OpenAI's models: clients have them as defaults. They stand for the first speech pipeline."""

VOICE_ALIASES = (
    "alloy",
    "ash",
    "ballad",
    "cedar",
    "coral",
    "echo",
    "fable",
    "marin",
    "nova",
    "onyx",
    "sage",
    "shimmer",
    "verse",
)
"""OpenAI's voices: some clients send no others. They stand for a pipeline's default voice."""

TEXT = "text"
"""The input that a speech pipeline has."""

AUDIO = OutputName("audio")
"""The output that a speech pipeline has, and the value in its chunks."""

_SHOWN_CHARS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechModel:
    """A pipeline that makes audio of text.

    Attributes:
        name: The pipeline.
        pcm: How its samples lie.
        voices: Names that it knows; the first is its default.
    """

    name: str
    pcm: PcmFormat
    voices: tuple[str, ...]

    def voice(self, asked: str | None) -> str | None:
        """Return the voice to ask the pipeline for, `None` for its default.

        Raises:
            InvalidRequest: There is no such voice.
        """
        if asked is None:
            return None
        wanted = asked.strip().casefold()
        known = {voice.casefold(): voice for voice in self.voices}
        if wanted in known:
            return known[wanted]
        if wanted in VOICE_ALIASES:
            return None
        raise InvalidRequest(
            f"There is no voice {_shown(asked)}"
            f"{did_you_mean(wanted, [*self.voices, *VOICE_ALIASES])}",
            param="voice",
            code="voice_not_found",
        )


def check_started(engine: SpeechEngine) -> None:
    """Raise if the engine can't take requests yet, or not any more.

    Raises:
        NoReplica: It starts: a stage has not been ready yet.
        EngineDead: It is gone; its successor is not here yet.
    """
    if engine.state in (EngineState.LOST, EngineState.GONE):
        raise EngineDead("The engine is gone; it is restarted if it can be.")
    if not engine.readiness.has_been_ready:
        raise starting()


def starting() -> NoReplica:
    """Return the error of requests that come too early."""
    return NoReplica(
        "The engine is starting; try again.", code="engine_starting", retry_after_s=2.0
    )


def speech_pipelines(engine: SpeechEngine) -> tuple[PipelineInfo, ...]:
    """Return the pipelines that make audio of text."""
    return tuple(
        info
        for info in engine.pipelines
        if TEXT in info.inputs and any(name == AUDIO for name, _ in info.outputs)
    )


def resolve_pipeline(engine: SpeechEngine, asked: str | None) -> PipelineInfo:
    """Return the speech pipeline that a model name stands for.

    Raises:
        InvalidRequest: There is no such model.
    """
    found = speech_pipelines(engine)
    if found and (asked is None or asked in MODEL_ALIASES):
        return found[0]
    for info in found:
        if info.name == asked:
            return info
    known = [*(str(info.name) for info in found), *MODEL_ALIASES] if found else []
    raise InvalidRequest(
        f"There is no speech model {_shown(asked or '')}{did_you_mean(asked or '', known)}",
        param="model",
        code="model_not_found",
    )


def speech_model(engine: SpeechEngine, asked: str | None) -> SpeechModel:
    """Return what is known of the model that a client asks for.

    Raises:
        InvalidRequest: There is no such model.
        NoReplica: Its stages have not been ready yet.
        StageError: Its audio is not 16-bit PCM.
    """
    info = resolve_pipeline(engine, asked)
    facts = _facts(engine.readiness, dict(info.outputs).get(AUDIO))
    if facts is None:
        raise starting()
    return SpeechModel(name=info.name, pcm=_pcm(info.name, facts), voices=voices(engine.readiness))


def voices(readiness: Readiness) -> tuple[str, ...]:
    """Return the voices that the stages declare."""
    return tuple(languages(readiness))


def languages(readiness: Readiness) -> dict[str, str | None]:
    """Return the language of each voice that the stages declare; `None` if they do not say."""
    found: dict[str, str | None] = {}
    for view in readiness.stages:
        if view.facts is not None:
            language = view.facts.media.get("language")
            for name in view.facts.voices:
                found.setdefault(name, language if isinstance(language, str) else None)
    return found


def _facts(readiness: Readiness, stage: StageId | None) -> StageFacts | None:
    for view in readiness.stages:
        if view.stage == stage:
            return view.facts
    return None


def _pcm(name: str, facts: StageFacts) -> PcmFormat:
    rate_hz, channels = facts.media.get("rate_hz"), facts.media.get("channels", 1)
    if (
        isinstance(rate_hz, int)
        and isinstance(channels, int)
        and facts.media.get("format") == "s16le"
    ):
        return PcmFormat(rate_hz=rate_hz, channels=channels)
    raise StageError(
        f"Pipeline {name!r} declares the media {facts.media}; speech needs s16le and a rate."
    )


def _shown(name: str) -> str:
    return repr(name if len(name) <= _SHOWN_CHARS else f"{name[:_SHOWN_CHARS]}…")
