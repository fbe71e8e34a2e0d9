"""`stretto call`: has a method called at the replicas of an engine that runs on this machine."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import msgspec

from stretto.cli import exits
from stretto.cli.asking import only_engine, table
from stretto.engine.channel import Channel
from stretto.errors import ConfigError, DeadlineExceeded

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from stretto.engine import RpcResult
    from stretto.types import ReplicaId, RunId

CONNECT_S = 2.0
"""How long an engine may take to let us in."""


def call_method(
    method: str,
    say: Callable[[str], None],
    *,
    stages: Sequence[str],
    arguments: Sequence[str],
    timeout_s: float,
    only: str | None = None,
    as_json: bool = False,
) -> int:
    """Call a method and print what came of it at each replica; return 1 if it failed at one.

    Raises:
        ConfigError: There is not exactly one engine, or an argument is not `NAME=VALUE`.
        StrettoError: The call as a whole has failed.
    """
    values = dict(_argument(each) for each in arguments)
    run, path = only_engine(only)
    results = asyncio.run(_call(run, path, method, stages, values, timeout_s))
    if as_json:
        say(json.dumps({str(each): _fields(result) for each, result in results.items()}, indent=2))
    else:
        _tell(results, say)
    is_good = all(result.status == "ok" for result in results.values())
    return exits.OK if is_good else exits.FAILED


def _argument(text: str) -> tuple[str, object]:
    """Return an argument's name and value; what is no JSON is a text."""
    name, sign, value = text.partition("=")
    if not name or not sign:
        raise ConfigError(f"--argument {text!r}: NAME=VALUE is expected")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


async def _call(
    run: RunId,
    path: Path,
    method: str,
    stages: Sequence[str],
    arguments: Mapping[str, object],
    timeout_s: float,
) -> dict[ReplicaId, RpcResult]:
    try:
        async with asyncio.timeout(CONNECT_S):
            channel = await Channel.connect(str(path / "channel.sock"), run=run, name="call")
    except TimeoutError:
        raise DeadlineExceeded(
            f"run {run} did not answer within {CONNECT_S:g} s: it starts, or it hangs"
        ) from None
    try:
        return await channel.call(
            method, stages=stages or None, arguments=arguments, timeout_s=timeout_s
        )
    finally:
        await channel.aclose()


def _fields(result: RpcResult) -> dict[str, object]:
    if result.error is not None:
        return {"status": result.status, "error": msgspec.to_builtins(result.error.failure())}
    return {"status": result.status, "value": msgspec.to_builtins(result.value)}


def _tell(results: Mapping[ReplicaId, RpcResult], say: Callable[[str], None]) -> None:
    """Print a line per replica; a value of several lines follows its own."""
    rows: list[tuple[str, ...]] = []
    long: list[tuple[str, str]] = []
    for replica, result in results.items():
        text = _text(result)
        if "\n" in text:
            long.append((str(replica), text))
            text = "(below)"
        rows.append((str(replica), result.status, text))
    table([("REPLICA", "STATUS", "RESULT"), *rows], say)
    for name, text in long:
        say(f"\n{name}:\n{text.rstrip()}")


def _text(result: RpcResult) -> str:
    if result.error is not None:
        return result.error.detail
    if result.value is None:
        return ""
    if isinstance(result.value, str):
        return result.value
    return msgspec.json.encode(result.value).decode()
