"""Values from flags and from the environment, laid over the values of files.

`STRETTO_SECTION__KEY` names a key by its path: `STRETTO_SERVER__PORT`,
`STRETTO_ORCHESTRATOR__LIMITS__MAX_QUEUED`, `STRETTO_STAGES__VOCODER__REPLICAS`. A stage's `-` is
written `_`. Every name with our prefix must be known, so that a misspelt one does not go unnoticed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from stretto.config.document import Node, Scalar, Text, is_portable
from stretto.config.mistakes import Mistakes, Origin, did_you_mean, nearest, shown
from stretto.config.settings import ServerSettings, StageSettings
from stretto.core.graph import Limits

PREFIX = "STRETTO_"
FLAT_NAMES: tuple[str, ...] = ()
"""Variables that are no configuration keys. A name must be here, or be a key, to be accepted."""

FLAGS: Mapping[str, str] = {
    "server.host": "--host",
    "server.port": "--port",
    "server.api_processes": "--api-processes",
    "server.drain_timeout_s": "--drain-timeout",
    "orchestrator.restart": "--restart",
    "orchestrator.event_log": "--event-log",
    "stages.<name>.replicas": "--replicas",
}
"""The flag of `stretto serve` that sets a key, by the key."""

_MAX_PATH = 32
_SECTIONS = ("server", "orchestrator", "stages")


@dataclass(frozen=True, slots=True)
class Override:
    """A value for one key, from outside the files.

    Attributes:
        path: The key's path, for example `("stages", "vocoder", "replicas")`.
        node: The value and its origin.
    """

    path: tuple[str, ...]
    node: Node

    @classmethod
    def of_flag(cls, key: str, value: Scalar, flag: str) -> Override:
        """Return the override that a flag gives to a dotted key."""
        return cls(tuple(key.split(".")), Node(value, Origin(flag)))


def flag_overrides(
    *,
    host: str | None = None,
    port: int | None = None,
    api_processes: int | None = None,
    drain_timeout_s: float | None = None,
    restart: bool | None = None,
    event_log: str | None = None,
    replicas: Sequence[str] = (),
) -> tuple[Override, ...]:
    """Return what the flags of `stretto serve` say; `None` is a flag that was not given.

    Args:
        host: `--host`.
        port: `--port`.
        api_processes: `--api-processes`.
        drain_timeout_s: `--drain-timeout`, in seconds.
        restart: `--restart` or `--no-restart`.
        event_log: `--event-log`.
        replicas: Each `--replicas`, in the form `stage=number`.

    Raises:
        ConfigError: A `--replicas` has another form.
    """
    given: dict[str, Scalar] = {
        "server.host": host,
        "server.port": port,
        "server.api_processes": api_processes,
        "server.drain_timeout_s": drain_timeout_s,
        "orchestrator.restart": restart,
        "orchestrator.event_log": event_log,
    }
    overrides = [
        Override.of_flag(key, value, "--no-restart" if value is False else FLAGS[key])
        for key, value in given.items()
        if value is not None
    ]
    mistakes = Mistakes()
    for text in replicas:
        stage, equals, number = text.partition("=")
        if not stage or not equals or not number:
            mistakes.add(
                Origin(f"--replicas {text}"), "", "write STAGE=NUMBER, for example vocoder=2"
            )
        overrides.append(
            Override(
                ("stages", stage, "replicas"), Node(Text(number), Origin(f"--replicas {text}"))
            )
        )
    mistakes.raise_if_any()
    return tuple(overrides)


def environment_overrides(
    environ: Mapping[str, str], stages: Iterable[str], mistakes: Mistakes
) -> tuple[Override, ...]:
    """Return what the environment says; names with our prefix that mean nothing are mistakes."""
    overrides: list[Override] = []
    known: list[str] | None = None
    for name, text in environ.items():
        if not name.startswith(PREFIX) or name in FLAT_NAMES:
            continue
        path = tuple(name.removeprefix(PREFIX).lower().split("__"))
        if (
            name != name.upper()
            or not 1 < len(path) < _MAX_PATH
            or path[0] not in _SECTIONS
            or "" in path
        ):
            known = known if known is not None else _known_names(stages)
            match = nearest(name, known)
            hint = f"; did you mean {match}?" if match else f"; use {PREFIX}SECTION__KEY"
            mistakes.add(Origin(name), "", f"no such variable{hint}")
        elif not is_portable(text):
            mistakes.add(Origin(name), "", f"{shown(text)} holds a character that is not text")
        else:
            overrides.append(Override(path, Node(Text(text), Origin(name))))
    overrides.sort(key=lambda override: override.path)
    for outer, inner in pairwise(overrides):
        if inner.path[: len(outer.path)] == outer.path:
            what = f"{outer.node.origin} already sets all of it"
            mistakes.add(inner.node.origin, ".".join(inner.path), what)
    return tuple(overrides)


def _known_names(stages: Iterable[str]) -> list[str]:
    keys = [f"server.{field}" for field in ServerSettings.__struct_fields__]
    keys += [f"orchestrator.limits.{field}" for field in Limits.__struct_fields__]
    keys += ["orchestrator.event_log", "orchestrator.restart"]
    keys += [
        f"stages.{stage}.{field}"
        for stage in stages
        for field in StageSettings.__struct_fields__[1:]
    ]
    return [
        *FLAT_NAMES,
        *(PREFIX + key.replace(".", "__").replace("-", "_").upper() for key in keys),
    ]


def laid_over(root: Node, overrides: Iterable[Override]) -> Node:
    """Return the tree with the overrides' values in place of its own; a later one wins."""
    for override in overrides:
        root = _replaced(root, override.path, override.node)
    return root


def _replaced(node: Node, path: Sequence[str], value: Node) -> Node:
    if not path:
        return value
    items = dict(node.value) if isinstance(node.value, Mapping) else {}
    key = matching_key(items, path[0])
    child = items.get(key, Node({}, value.origin))
    items[key] = _replaced(child, path[1:], value)
    return Node(items, node.origin)


def matching_key(items: Iterable[str], segment: str) -> str:
    """Return the key that a segment of a variable's name means; the segment if there is none."""
    keys = list(items)
    if segment in keys:
        return segment
    return next((key for key in keys if key.lower().replace("-", "_") == segment), segment)


def refuse_unknown_stages(
    overrides: Iterable[Override], stages: Sequence[str], mistakes: Mistakes
) -> None:
    """Note overrides for stages that no file has."""
    for override in overrides:
        if override.path[0] != "stages":
            continue
        name = override.path[1]
        if matching_key(stages, name) not in stages:
            what = f"unknown stage{did_you_mean(name, stages)}"
            mistakes.add(override.node.origin, f"stages.{name}", what)
        elif len(override.path) == 2:  # noqa: PLR2004 - a whole stage, not a key of it
            mistakes.add(override.node.origin, f"stages.{name}", "name one of its keys too")
