"""What an operator may change over HTTP, behind a key of its own: the size of stages, and who leaves.

Without `server.admin_key` these routes are closed.
"""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING, TypeVar

import msgspec
from fastapi import Request  # noqa: TC002 - FastAPI reads the annotations of routes
from fastapi.responses import JSONResponse

from stretto.engine.readiness import find_replica
from stretto.errors import InvalidRequest
from stretto.server.body import read_body

if TYPE_CHECKING:
    from fastapi import FastAPI

    from stretto.config.settings import ServerSettings
    from stretto.server.contract import SpeechEngine

_MAX_ORDER_BYTES = 4096

OrderT = TypeVar("OrderT", bound=msgspec.Struct)


class ScaleOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /admin/scale`: how many replicas a stage is to have."""

    stage: str
    replicas: int


class DrainOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /admin/drain`: who is to leave, `stage/slot` or `stage/slot#incarnation`.

    Attributes:
        replica: Which one.
        replace: Another one starts at once.
    """

    replica: str
    replace: bool = False


def add_admin(app: FastAPI, engine: SpeechEngine, settings: ServerSettings) -> None:
    """Add the operator's routes."""

    @app.post("/admin/scale", tags=["admin"])
    async def scale(request: Request) -> JSONResponse:
        """Have a stage get another number of replicas; 202, since it takes time."""
        _check_key(request, settings.admin_key)
        order = await _order(request, ScaleOrder, settings)
        await engine.scale(order.stage, order.replicas)
        return JSONResponse({"stage": order.stage, "target": order.replicas}, 202)

    @app.post("/admin/drain", tags=["admin"])
    async def drain(request: Request) -> JSONResponse:
        """Have a replica finish what it has and leave; 202, since it takes time."""
        _check_key(request, settings.admin_key)
        order = await _order(request, DrainOrder, settings)
        known = [state.replica for view in engine.readiness.stages for state in view.replicas]
        replica = find_replica(order.replica, known)
        await engine.drain(replica, replace=order.replace)
        return JSONResponse({"replica": str(replica), "replace": order.replace}, 202)


def _check_key(request: Request, key: str) -> None:
    """Let only an operator in.

    Raises:
        InvalidRequest: The server has no admin key, or the request has another one.
    """
    if not key:
        raise InvalidRequest(
            "The admin routes are closed: set STRETTO_SERVER__ADMIN_KEY where the server starts.",
            code="admin_closed",
        )
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    is_right = hmac.compare_digest(given.strip().encode(), key.encode())
    if scheme.lower() != "bearer" or not is_right:
        raise InvalidRequest(
            "The admin routes need the header `Authorization: Bearer <server.admin_key>`.",
            code="invalid_admin_key",
        )


async def _order(request: Request, form: type[OrderT], settings: ServerSettings) -> OrderT:
    body = await read_body(request, _MAX_ORDER_BYTES, settings.receive_timeout_s)
    try:
        return msgspec.json.decode(body, type=form)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        fields = ", ".join(form.__struct_fields__)
        raise InvalidRequest(f"the body: {error}; its fields are {fields}") from error
