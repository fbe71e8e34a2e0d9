"""Answers to questions about the engine: snapshots of the router and of the metrics. Nothing changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

import msgspec

from stretto.config.mistakes import nearest
from stretto.core.commands import ReplicaState
from stretto.core.router import ARCHIVED_STORIES, Statistics
from stretto.core.story import StoryEntry
from stretto.core.waiting import OpenRequest
from stretto.errors import Failure, FailureKind
from stretto.messages import channel
from stretto.types import RequestId

if TYPE_CHECKING:
    from stretto.core.router import Router
    from stretto.observe.metrics import Metrics

_SHOWN_NAMES = 5


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `status`: the engine at this moment."""

    epoch: int
    statistics: Statistics
    replicas: tuple[ReplicaState, ...]
    open: tuple[OpenRequest, ...]


class RequestStory(msgspec.Struct, frozen=True, kw_only=True):
    """What happened to one request; `waiting` is empty once it has ended."""

    request: RequestId
    label: str
    entries: tuple[StoryEntry, ...]
    waiting: str = ""


class Answers:
    """Reads the router and the metrics for whoever asks.

    Args:
        router: Is only read.
        metrics: Are read, and told what API processes report.
        epoch: Which life of the orchestrator this is.
    """

    def __init__(self, router: Router, metrics: Metrics, epoch: int) -> None:
        self._router = router
        self._metrics = metrics
        self._epoch = epoch

    def answer(self, ask: channel.Ask, now: float) -> channel.Answer:
        """Return the answer to a question."""
        match ask.topic:
            case "status":
                text = msgspec.json.encode(self._status(now)).decode()
            case "metrics":
                text = self._metrics.render(self._router.statistics())
            case "story":
                stories = self._stories(ask.argument, now)
                if not stories:
                    return channel.Answer(ask.number, "", self._unknown(ask.argument))
                text = msgspec.json.encode(stories).decode()
            case _:
                assert_never(ask.topic)
        return channel.Answer(ask.number, text)

    def http_done(self, message: channel.HttpDone) -> None:
        """Count an HTTP exchange."""
        self._metrics.http_done(message)

    def _status(self, now: float) -> Status:
        return Status(
            epoch=self._epoch,
            statistics=self._router.statistics(),
            replicas=self._router.replica_states(),
            open=self._router.waiting(now),
        )

    def _stories(self, name: str, now: float) -> tuple[RequestStory, ...]:
        waiting = {each.request: each.what for each in self._router.waiting(now)}
        found: list[RequestStory] = []
        for request in self._router.named(name):
            story = self._router.story(request)
            if story is not None:
                found.append(
                    RequestStory(
                        request=request,
                        label=story.label,
                        entries=story.entries(),
                        waiting=waiting.get(request, ""),
                    )
                )
        return tuple(found)

    def _unknown(self, name: str) -> Failure:
        names = self._router.names()
        match = nearest(name, names)
        if match is not None:
            known = f"; did you mean {match!r}?"
        elif names:
            known = f"; the newest are {', '.join(names[-_SHOWN_NAMES:])}"
        else:
            known = "; there was none yet"
        return Failure(
            kind=FailureKind.INVALID_REQUEST,
            detail=(
                f"no request {name!r} among those that are open and the last {ARCHIVED_STORIES} that have "
                f"ended{known}"
            ),
            code="request_not_found",
        )
