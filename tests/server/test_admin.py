"""The operator's routes: closed without a key, and what they pass on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx2
import pytest
from msgspec.structs import replace

from tests.server.conftest import SETTINGS, running_server
from tests.support.fake_orchestrator import WAIT_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.server.conftest import Server

KEY = "open sesame"


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    """A server with an admin key."""
    async with running_server(replace(SETTINGS, admin_key=KEY)) as running:
        yield running


async def order(
    server: Server, path: str, body: object, key: str | None = KEY, scheme: str = "Bearer"
) -> httpx2.Response:
    """Give an order."""
    headers = {} if key is None else {"authorization": f"{scheme} {key}"}
    async with httpx2.AsyncClient(base_url=server.url, timeout=WAIT_S, verify=False) as client:
        return await client.post(path, json=body, headers=headers)


async def test_orders_reach_the_engine(server: Server) -> None:
    """They are taken, which is 202; carrying them out takes time."""
    answer = await order(server, "/admin/scale", {"stage": "vocoder", "replicas": 3})
    assert (answer.status_code, answer.json()) == (202, {"stage": "vocoder", "target": 3})
    known = server.engine.readiness.stages[0].replicas[0].replica
    body = {"replica": f"{known.stage}/{known.slot}", "replace": True}
    assert (await order(server, "/admin/drain", body)).status_code == 202
    assert server.engine.orders == [("vocoder", 3), (str(known), True)]


@pytest.mark.parametrize(
    ("key", "scheme"),
    [(None, ""), ("x", "Bearer"), ("open", "Bearer"), (KEY, "Basic"), (f"{KEY} 2", "Bearer")],
)
async def test_only_the_key_opens(server: Server, key: str | None, scheme: str) -> None:
    """Anything else is 401, and nothing is passed on; the body is not even read."""
    answer = await order(server, "/admin/scale", {"stage": "vocoder", "replicas": 3}, key, scheme)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_admin_key"
    assert server.engine.orders == []


async def test_without_a_key_the_routes_are_closed() -> None:
    """An empty key opens nothing; the text says how to open them."""
    async with running_server() as closed:
        answer = await order(closed, "/admin/scale", {"stage": "x", "replicas": 1}, "x")
        assert answer.status_code == 403
        assert "STRETTO_SERVER__ADMIN_KEY" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        ("/admin/scale", {"stage": "vocoder"}, 400, "its fields are stage, replicas"),
        ("/admin/scale", {"stage": "vocoder", "replicas": "3"}, 400, "replicas"),
        ("/admin/scale", {"stage": "vocoder", "replicas": 3, "x": 1}, 400, "unknown field"),
        ("/admin/scale", "x" * 5000, 413, "4096"),
        ("/admin/drain", {"replica": "nobody/0"}, 404, "there is no replica 'nobody/0'"),
        ("/admin/drain", {"replica": "x"}, 404, "there are "),
    ],
)
async def test_a_bad_order_is_explained(
    server: Server, path: str, body: object, status: int, text: str
) -> None:
    """The status is the client's mistake, and the text says what is possible."""
    answer = await order(server, path, body)
    assert answer.status_code == status
    assert text in answer.json()["error"]["message"]
