"""Arguments and results of open calls: bytes that the router never sees, kept until the call is answered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stretto.messages import channel

if TYPE_CHECKING:
    from stretto.core import commands as do
    from stretto.types import CallId, ReplicaId


class CallValues:
    """What open calls carry. It is bounded by the calls that the router lets be open."""

    def __init__(self) -> None:
        self._arguments: dict[CallId, bytes] = {}
        self._values: dict[CallId, dict[ReplicaId, bytes]] = {}

    def __len__(self) -> int:
        """Return of how many calls something is kept."""
        return len(self._arguments)

    def begin(self, call: CallId, arguments: bytes) -> None:
        """Keep a call's arguments."""
        self._arguments[call] = arguments
        self._values[call] = {}

    def arguments(self, call: CallId) -> bytes:
        """Return a call's arguments, encoded."""
        return self._arguments[call]

    def keep(self, call: CallId, replica: ReplicaId, value: bytes) -> None:
        """Keep what a replica has answered; nothing, if the call has ended."""
        values = self._values.get(call)
        if values is not None:
            values[replica] = value

    def end(self, answer: do.AnswerRpc) -> tuple[channel.CallResult, ...]:
        """Let a call go; return its outcomes with their values."""
        self._arguments.pop(answer.call, None)
        values = self._values.pop(answer.call, {})
        return tuple(
            channel.CallResult(
                outcome.replica,
                outcome.status,
                values.get(outcome.replica, b"") if outcome.status == "ok" else b"",
                outcome.failure,
            )
            for outcome in answer.outcomes
        )
