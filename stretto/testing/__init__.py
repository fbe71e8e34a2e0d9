"""Conformance suites: for people who write backends, and for every implementation and double of ours."""

from stretto.testing.backend_suite import BackendCheckFailed, check_backend
from stretto.testing.channel_suite import (
    ChannelSuite,
    ChannelTopology,
    ProcessTopology,
    ThreadTopology,
)
from stretto.testing.stream_suite import StreamCheckFailed, check_stream

__all__ = [
    "BackendCheckFailed",
    "ChannelSuite",
    "ChannelTopology",
    "ProcessTopology",
    "StreamCheckFailed",
    "ThreadTopology",
    "check_backend",
    "check_stream",
]
