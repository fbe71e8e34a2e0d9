"""Writes `docs/reference/configuration.md` from the settings types; a test fails if it is stale.

.venv/bin/python -m scripts.reference
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import msgspec

from stretto.config.schema import RANGES
from stretto.config.settings import (
    OrchestratorSettings,
    ServerSettings,
    StageSettings,
)
from stretto.core.graph import EdgeSpec, Limits

TARGET = Path(__file__).parents[1] / "docs/reference/configuration.md"

INTRODUCTION = """\
# Configuration

<!-- Written by `python -m scripts.reference`; do not edit. -->

One YAML file describes one pipeline; `stretto serve` takes several. Each value comes from, in this order: a
flag, a variable `STRETTO_SECTION__KEY` (for example `STRETTO_SERVER__PORT` or
`STRETTO_STAGES__VOCODER__REPLICAS`), the file, the default. Every mistake is reported at once, with file,
line and key; an unknown key names the nearest one that exists.

```yaml
--8<-- "stretto/config/pipelines/speech.yaml"
```

A stage's `inputs` are its edges: `from` is `request.<input>` or a stage, `mode` is `stream` (chunk by chunk)
or `full` (after the source has finished), `adapter` is a `module:factory` that turns the source's chunks into
this stage's input. `outputs` names the stage that makes each output.
"""

SECTIONS: tuple[tuple[str, type[msgspec.Struct], tuple[str, ...]], ...] = (
    ("`server`", ServerSettings, ()),
    ("`orchestrator`", OrchestratorSettings, ("limits",)),
    ("`orchestrator.limits`", Limits, ()),
    ("`stages.<name>`", StageSettings, ("id",)),
    ("`stages.<name>.inputs.<name>`", EdgeSpec, ("target", "name", "source", "request_input")),
)


def page() -> str:
    """Return the page's text."""
    parts = [INTRODUCTION]
    for title, struct, hidden in SECTIONS:
        rows = [
            row(struct, field)
            for field in msgspec.structs.fields(struct)
            if field.name not in hidden
        ]
        parts.append(
            "\n".join(
                [
                    f"## {title}",
                    "",
                    "| key | default | range | meaning |",
                    "| --- | --- | --- | --- |",
                    *rows,
                    "",
                ]
            )
        )
    return "\n".join(parts)


def row(struct: type[msgspec.Struct], field: msgspec.structs.FieldInfo) -> str:
    """Return a field's line of the table."""
    if field.default is not msgspec.NODEFAULT:
        default = f"`{_plain(field.default)}`"
    else:
        default = "required" if field.required else "`{}`"
    low_high = RANGES.get(field.name)
    limits = f"{low_high[0]:,} to {low_high[1]:,}" if low_high else ""
    return f"| `{field.name}` | {default} | {limits} | {meaning(struct, field.name)} |"


def meaning(struct: type[msgspec.Struct], name: str) -> str:
    """Return what the class's docstring says of a field, on one line."""
    found = re.search(
        rf"^    {name}: (.*?)(?=^    \w+: |\Z)",
        inspect.getdoc(struct) or "",
        re.MULTILINE | re.DOTALL,
    )
    assert found, f"{struct.__name__}.{name} is not documented"
    return " ".join(found.group(1).split())


def _plain(value: object) -> object:
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "none"
    return getattr(value, "value", value)


if __name__ == "__main__":
    TARGET.write_text(page())
