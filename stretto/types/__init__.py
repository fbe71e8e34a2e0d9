"""Names that every layer shares: identities, payload references and the Protocols that siblings meet at.

This package must not know any other part of Stretto.
"""

from stretto.types.clock import Clock
from stretto.types.ids import (
    CallClass,
    CallId,
    ChannelId,
    EdgeId,
    IncarnationNumber,
    InputName,
    OutputName,
    PipelineName,
    ReplicaId,
    RequestId,
    RunId,
    SessionId,
    StageId,
    TaskKey,
)
from stretto.types.launcher import Launcher, LaunchSpec
from stretto.types.payload import (
    INLINE,
    MAX_METRICS,
    SHARED_MEMORY,
    Payload,
    PayloadRef,
    Value,
)
from stretto.types.recovery import Boundary, Recovery, weakest

__all__ = [
    "INLINE",
    "MAX_METRICS",
    "SHARED_MEMORY",
    "Boundary",
    "CallClass",
    "CallId",
    "ChannelId",
    "Clock",
    "EdgeId",
    "IncarnationNumber",
    "InputName",
    "LaunchSpec",
    "Launcher",
    "OutputName",
    "Payload",
    "PayloadRef",
    "PipelineName",
    "Recovery",
    "ReplicaId",
    "RequestId",
    "RunId",
    "SessionId",
    "StageId",
    "TaskKey",
    "Value",
    "weakest",
]
