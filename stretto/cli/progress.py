"""What the operator sees while the server starts and when something changes: plain lines."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stretto.core.commands import ReplicaState
    from stretto.messages.channel import PipelineInfo
    from stretto.types import ReplicaId

READY_TEXT = """\
ready in {elapsed:.1f} s: {pipelines}

  URL      {url}/v1
{usage}

Ctrl-C stops it."""

SPEECH_TEXT = """\
  curl     curl -N {url}/v1/audio/speech -d '{{"input":"Hello there.","response_format":"wav"}}' | aplay
  python   from openai import OpenAI
           client = OpenAI(base_url="{url}/v1", api_key="none")
           speech = client.audio.speech.create(
               model="tts-1", voice="alloy", input="Hello.", response_format="wav"
           )
           speech.write_to_file("hello.wav")"""

OTHER_TEXT = """\
  python   none of these pipelines makes audio, and HTTP serves no other kind yet; use stretto.Engine"""


class Progress:
    """Writes to one stream; the same state of a replica is told once.

    Args:
        out: Where lines go.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._told: dict[ReplicaId, tuple[str, str]] = {}

    def line(self, text: str) -> None:
        """Write one line."""
        with suppress(OSError, ValueError):  # a full disk or a closed terminal ends no server
            self._out.write(f"{text}\n")
            self._out.flush()

    def replica(self, state: ReplicaState) -> None:
        """Tell about a replica if there is news."""
        news = (state.state, state.detail)
        if self._told.get(state.replica) == news:
            return
        self._told[state.replica] = news
        name = f"[{state.replica.stage}/{state.replica.slot}]"
        match state.state:
            case "loading" if state.detail and state.fraction < 1:
                self.line(f"{name} loading {state.detail} ({state.fraction:.0%})")
            case "dead":
                self.line(f"{name} died: {state.detail}; a new process is started")
            case "parked":
                self.line(f"{name} failed: {state.detail}; it is tried again later")
            case "starting" | "loading":
                pass
            case _:
                self.line(f"{name} {state.state}")
        for known in [known for known in self._told if _is_former(known, state.replica)]:
            del self._told[known]

    def orchestrator_died(self, epoch: int, reason: str) -> None:
        """Tell that a life of the orchestrator has ended unasked."""
        self.line(
            f"the orchestrator (epoch {epoch}) died: {reason}; requests in flight have failed"
        )

    def ready(self, url: str, pipelines: Sequence[PipelineInfo], elapsed_s: float) -> None:
        """Say that requests are served, and how to make one."""
        speaks = any(name == "audio" for each in pipelines for name, _ in each.outputs)
        usage = SPEECH_TEXT.format(url=url) if speaks else OTHER_TEXT
        names = ", ".join(each.name for each in pipelines)
        self.line(READY_TEXT.format(url=url, pipelines=names, usage=usage, elapsed=elapsed_s))


def _is_former(known: ReplicaId, now: ReplicaId) -> bool:
    return known[:2] == now[:2] and known.incarnation < now.incarnation
