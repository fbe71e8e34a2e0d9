"""Settings key by key, each value with its source, as `config show` prints them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import msgspec

from stretto.config.schema import DEFAULT

if TYPE_CHECKING:
    from stretto.config.loading import Resolved
    from stretto.core.graph import PipelineSpec

_MISSING = object()

SECRETS = re.compile(r"(^|[_-])(key|token|secret|password|credentials?)s?$", re.IGNORECASE)
"""Keys whose values are never shown, by their last part; nor is a stage's environment."""

_HIDDEN = "(hidden)"


@dataclass(frozen=True, slots=True)
class Shown:
    """One value.

    Attributes:
        path: Its dotted key.
        value: As JSON could hold it.
        source: A flag, a variable, `file:line`, or `default`.
    """

    path: str
    value: object
    source: str

    @property
    def is_default(self) -> bool:
        """Whether nobody has set it."""
        return self.source == DEFAULT


def shown_values(resolved: Resolved) -> tuple[Shown, ...]:
    """Return every value that has a source, section by section."""
    settings = resolved.settings
    tree: dict[str, object] = {
        "server": msgspec.to_builtins(settings.server),
        "orchestrator": _with_defaults(settings.orchestrator),
        "stages": {stage.id: msgspec.to_builtins(stage) for stage in settings.stages},
        "pipelines": {pipeline.name: _pipeline(pipeline) for pipeline in settings.pipelines},
    }
    order = {section: number for number, section in enumerate(tree)}
    found = [
        Shown(path, _unless_secret(path, value), source)
        for path, source in resolved.sources.items()
        if (value := _at(tree, path)) is not _MISSING
    ]
    return tuple(sorted(found, key=lambda each: order[each.path.partition(".")[0]]))


def _unless_secret(path: str, value: object) -> object:
    if not value:
        return value
    *above, name = path.split(".")
    if name == "environment" and isinstance(value, Mapping):
        return dict.fromkeys(cast("Mapping[str, object]", value), _HIDDEN)
    is_secret = "environment" in above or SECRETS.search(name) is not None
    return _HIDDEN if is_secret and isinstance(value, str) else value


def _with_defaults(struct: object) -> object:
    """Return a struct as a mapping; types that travel without their defaults get them back."""
    if not isinstance(struct, msgspec.Struct):
        return msgspec.to_builtins(struct)
    return {name: _with_defaults(getattr(struct, name)) for name in struct.__struct_fields__}


def _pipeline(pipeline: PipelineSpec) -> object:
    stages: dict[str, dict[str, dict[str, object]]] = {}
    for edge in pipeline.edges:
        values = cast("dict[str, object]", _with_defaults(edge))
        values["from"] = edge.source or f"request.{edge.request_input}"
        stages.setdefault(edge.target, {"inputs": {}})["inputs"][edge.name] = values
    return {
        "name": pipeline.name,
        "inputs": list(pipeline.inputs),
        "outputs": {output.name: output.stage for output in pipeline.outputs},
        "stages": stages,
    }


def _at(tree: object, path: str) -> object:
    """Return the value at a path; names may hold no dots, so each part is one key."""
    for part in path.split("."):
        if not isinstance(tree, Mapping) or part not in tree:
            return _MISSING
        tree = cast("Mapping[str, object]", tree)[part]
    return tree
