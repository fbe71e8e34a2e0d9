"""Asynchronous tests run on both event loops."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
import uvloop

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Name the loops that Stretto runs on; pytest-asyncio runs each asynchronous test on every one."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture
def socket_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A short path for a socket."""
    return str(tmp_path_factory.mktemp("s") / "s")
