"""Both topologies of the orchestrator keep the contract of the channel."""

from __future__ import annotations

import pytest

from stretto.testing.channel_suite import ChannelSuite, ProcessTopology, ThreadTopology


@pytest.mark.usefixtures("leak_check")
class TestThread(ChannelSuite):
    """The orchestrator in a thread."""

    topology = ThreadTopology()


@pytest.mark.slow
@pytest.mark.usefixtures("leak_check")
class TestProcess(ChannelSuite):
    """The orchestrator in a process."""

    topology = ProcessTopology()
