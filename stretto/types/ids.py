"""Identities. Each is minted in one place and never reused within a run."""

from typing import Literal, NamedTuple, NewType, TypeAlias

StageId = NewType("StageId", str)
"""A node of the deployment's graph, for example `talker`. Not to be confused with a replica of it."""

PipelineName = NewType("PipelineName", str)
InputName = NewType("InputName", str)
"""A named input of a pipeline that a request supplies, for example `text`."""

OutputName = NewType("OutputName", str)
"""A named output of a pipeline that a request wants, for example `audio`."""

EdgeId = NewType("EdgeId", str)
"""`<source>-><target>`, where the source is a stage or `request.<input name>`."""

ChannelId = NewType("ChannelId", str)
"""`<epoch>.<number>`: one API process's connection to one life of the orchestrator."""

RequestId = NewType("RequestId", str)
"""`<channel>-<number>`: minted inside; a client's own id is only a label."""

CallId = NewType("CallId", str)
"""`<channel>-call-<number>`: one collective call. Not to be confused with a request."""

CallClass: TypeAlias = Literal["control", "exclusive"]
"""How a replica runs a method: `control` at once beside its tasks, `exclusive` alone, drained first."""

SessionId = NewType("SessionId", str)
RunId = NewType("RunId", str)
"""One start of a deployment; names its sockets and its shared-memory directory."""

IncarnationNumber = NewType("IncarnationNumber", int)
"""Counts the processes that have served one slot; minted by the orchestrator."""


class ReplicaId(NamedTuple):
    """One process that serves a stage. A successor in the same slot has another incarnation."""

    stage: StageId
    slot: int
    incarnation: IncarnationNumber

    def __str__(self) -> str:
        """Return `stage/slot#incarnation`, the form used in logs and error texts."""
        return f"{self.stage}/{self.slot}#{self.incarnation}"


class TaskKey(NamedTuple):
    """A request's part at one stage; every frame about the task carries it. Attempts are never reused."""

    request: RequestId
    stage: StageId
    attempt: int
    session: SessionId | None = None

    def __str__(self) -> str:
        """Return `request@stage` and, from the second attempt on, `~attempt`."""
        suffix = f"~{self.attempt}" if self.attempt else ""
        return f"{self.request}@{self.stage}{suffix}"
