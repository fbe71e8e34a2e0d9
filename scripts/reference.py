"""Writes `docs/reference/configuration.md` from the settings types; a test fails if it is stale.

.venv/bin/python -m scripts.reference
"""

from __future__ import annotations

from pathlib import Path

from stretto.config.keys import SECTIONS, Key, all_keys

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


def page() -> str:
    """Return the page's text."""
    parts = [INTRODUCTION]
    for section, _, _ in SECTIONS:
        rows = [row(key) for key in all_keys() if key.section == section]
        parts.append(
            "\n".join(
                [
                    f"## `{section}`",
                    "",
                    "| key | default | range | meaning |",
                    "| --- | --- | --- | --- |",
                    *rows,
                    "",
                ]
            )
        )
    return "\n".join(parts)


def row(key: Key) -> str:
    """Return a key's line of the table."""
    default = key.default if key.default == "required" else f"`{key.default}`"
    return f"| `{key.name}` | {default} | {key.allowed} | {key.meaning} |"


if __name__ == "__main__":
    TARGET.write_text(page())
