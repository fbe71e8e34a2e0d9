"""`stretto config`: what is set and by whom, what is wrong, what may be written, what a key means."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from stretto.cli import exits
from stretto.config.keys import Key, all_keys
from stretto.config.loading import resolve
from stretto.config.mistakes import did_you_mean
from stretto.config.shown import shown_values
from stretto.core.graph import validated
from stretto.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from stretto.config.overrides import Override


def show(
    pipelines: Sequence[str],
    environ: Mapping[str, str],
    overrides: Iterable[Override],
    say: Callable[[str], None],
    *,
    resolved: bool,
) -> None:
    """Print each value as `key: value  # source`; without `resolved` only those that somebody set.

    Raises:
        ConfigError: The configuration is wrong; the text lists every mistake.
    """
    values = shown_values(resolve(pipelines, environ=environ, overrides=overrides))
    section = ""
    for each in values:
        if each.is_default and not resolved:
            continue
        begins = each.path.partition(".")[0]
        if section and begins != section:
            say("")
        section = begins
        say(f"{each.path}: {json.dumps(each.value, ensure_ascii=False)}  # {each.source}")


def check(pipelines: Sequence[str], environ: Mapping[str, str], say: Callable[[str], None]) -> None:
    """Print one line if the configuration is sound.

    Raises:
        ConfigError: It is not; the text lists every mistake.
    """
    settings = resolve(pipelines, environ=environ).settings
    validated(settings.deployment())
    names = ", ".join(pipeline.name for pipeline in settings.pipelines)
    processes = sum(stage.replicas for stage in settings.stages)
    say(f"ok: {names} with {len(settings.stages)} stages and {processes} replicas")


def schema(say: Callable[[str], None]) -> None:
    """Print the JSON Schema of a pipeline file."""
    from stretto.config.json_schema import pipeline_schema

    say(json.dumps(pipeline_schema(), indent=2))


def explain(asked: str, say: Callable[[str], None]) -> int:
    """Say what a key means, or list the keys of a section; return the exit code.

    Raises:
        ConfigError: There is no such key; the text has the nearest one.
    """
    keys = all_keys()
    wanted = _general(asked, keys)
    found = [key for key in keys if not wanted or f"{key.path}.".startswith(f"{wanted}.")]
    if not found:
        names = [key.path for key in keys] + [key.name for key in keys]
        raise ConfigError(f"config explain: unknown key {asked!r}{did_you_mean(wanted, names)}")
    if len(found) == 1 and found[0].path == wanted:
        _tell(found[0], say)
    else:
        width = max(len(key.path) for key in found)
        for key in found:
            say(f"{key.path:{width}}  {key.meaning}")
    return exits.OK


def _general(asked: str, keys: Sequence[Key]) -> str:
    """Return a key as the list has it: `stages.vocoder.slots` is `stages.<name>.slots`, and so on."""
    text = asked.strip().strip(".").lower().replace("-", "_")
    if text.startswith("stretto_"):
        text = text.removeprefix("stretto_").replace("__", ".")
    by_name = [key.path for key in keys if key.name == text]
    if by_name:
        return by_name[0]
    parts = text.split(".")
    if parts[0] == "stages" and len(parts) > 1:
        parts[1] = "<name>"
        if len(parts) > 3 and parts[2] == "inputs":  # noqa: PLR2004 - stages.NAME.inputs.NAME
            parts[3] = "<name>"
    return ".".join(parts)


def _tell(key: Key, say: Callable[[str], None]) -> None:
    say(key.path)
    say(f"  {key.meaning}")
    say(f"  default    {key.default}")
    if key.allowed:
        say(f"  accepted   {key.allowed}")
    if key.variable:
        say(f"  variable   {key.variable}")
    if key.flag:
        say(f"  flag       stretto serve {key.flag}")
