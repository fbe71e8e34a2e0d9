"""The client side of an engine: channels to the orchestrator, and the façade that applications use.

`Engine` is what an application holds, `Stream` what a request gives it. This package must not know
backends, HTTP, or how the router decides.
"""

from stretto.engine.calls import RpcResult
from stretto.engine.channel import Channel, ChannelStatistics
from stretto.engine.client import EngineClient, EngineState
from stretto.engine.engine import Engine
from stretto.engine.readiness import Readiness, StageView
from stretto.engine.stream import OutputChunk, Stream

__all__ = [
    "Channel",
    "ChannelStatistics",
    "Engine",
    "EngineClient",
    "EngineState",
    "OutputChunk",
    "Readiness",
    "RpcResult",
    "StageView",
    "Stream",
]
