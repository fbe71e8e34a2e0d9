"""Pipelines, flags and environment become one frozen `Settings`, or one error with all mistakes.

Precedence: flag, `STRETTO_SECTION__KEY`, file, default. The source of each value is kept.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stretto.config.document import MAX_DOCUMENT_BYTES, Node, parse
from stretto.config.mistakes import Mistakes, Origin, did_you_mean, shown
from stretto.config.overrides import (
    Override,
    environment_overrides,
    laid_over,
    matching_key,
    refuse_unknown_stages,
)
from stretto.config.pipeline_file import SHARED_KEYS, PipelineFile, read_pipeline
from stretto.config.schema import Reader
from stretto.config.settings import OrchestratorSettings, ServerSettings, Settings, StageSettings

if TYPE_CHECKING:
    from stretto.types import StageId

_BUILT_IN_FOLDER = Path(__file__).with_name("pipelines")
_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True, slots=True)
class Resolved:
    """Settings, and where each value came from.

    Attributes:
        settings: What the deployment is told.
        sources: `file:line`, variable, flag or `default`, by dotted path: `server.port`,
            `orchestrator.limits.max_queued`, `stages.<id>.replicas`,
            `pipelines.<name>.stages.<id>.inputs.<input>.mode`.
    """

    settings: Settings
    sources: Mapping[str, str]


def built_in_pipelines() -> tuple[str, ...]:
    """Return the names of the pipelines that are shipped with Stretto."""
    return tuple(sorted(path.stem for path in _BUILT_IN_FOLDER.glob("*.yaml")))


def load_settings(
    pipelines: Sequence[str], *, environ: Mapping[str, str], overrides: Iterable[Override] = ()
) -> Settings:
    """Return the settings of a deployment; see `resolve`.

    Raises:
        ConfigError: With every mistake, one per line.
    """
    return resolve(pipelines, environ=environ, overrides=overrides).settings


def resolve(
    pipelines: Sequence[str], *, environ: Mapping[str, str], overrides: Iterable[Override] = ()
) -> Resolved:
    """Return the settings of a deployment and the source of each value.

    Args:
        pipelines: Built-in names or paths of YAML files; all of them make one deployment.
        environ: The environment; only names that start with `STRETTO_` are read.
        overrides: Values from flags; see `flag_overrides`.

    Raises:
        ConfigError: With every mistake, one per line, in the form `file:line:key: what`.
    """
    mistakes = Mistakes()
    roots = [root for item in pipelines if (root := _opened(item, mistakes)) is not None]
    if not pipelines:
        mistakes.add(
            Origin("pipelines"),
            "",
            f"name at least one; built in: {', '.join(built_in_pipelines())}",
        )
    stages = list(dict.fromkeys(stage for root in roots for stage in _stage_names(root)))
    given = [*environment_overrides(environ, stages, mistakes), *overrides]
    if len(roots) == len(pipelines):
        refuse_unknown_stages(given, stages, mistakes)
    reader = Reader(mistakes)
    files = [read_pipeline(reader, laid_over(root, _about(root, given))) for root in roots]
    common = laid_over(
        _common(roots, mistakes),
        [override for override in given if override.path[0] in SHARED_KEYS],
    )
    sections = reader.mapping(common, "")
    orchestrator = reader.struct(OrchestratorSettings, sections.get("orchestrator"), "orchestrator")
    _check_respawn(orchestrator, sections.get("orchestrator", common), mistakes)
    if (mistake := orchestrator.join_mistake()) is not None:
        origin = sections.get("orchestrator", common).origin
        mistakes.add(origin, "orchestrator.join_token", mistake)
    settings = Settings(
        stages=_pooled(files, mistakes),
        pipelines=tuple(file.pipeline for file in files),
        server=reader.struct(ServerSettings, sections.get("server"), "server"),
        orchestrator=orchestrator,
        module_folders=_module_folders(pipelines),
    )
    mistakes.raise_if_any()
    return Resolved(settings=settings, sources=reader.sources)


def _module_folders(pipelines: Sequence[str]) -> tuple[str, ...]:
    """Return the folders of the pipeline files; built-in pipelines have none."""
    folders = (
        str(Path(item).resolve().parent) for item in pipelines if item not in built_in_pipelines()
    )
    return tuple(dict.fromkeys(folders))


def _opened(item: str, mistakes: Mistakes) -> Node | None:
    """Return the tree of a named pipeline or file."""
    if item in built_in_pipelines():
        text = (_BUILT_IN_FOLDER / f"{item}.yaml").read_text(encoding="utf-8")
        return parse(text, Origin(f"built-in {item}.yaml", 1), mistakes)
    path = Path(item)
    is_path = "/" in item or path.suffix in _SUFFIXES
    if not is_path and not path.exists():
        what = f"no such pipeline{did_you_mean(item, built_in_pipelines())}"
        mistakes.add(
            Origin(item), "", f"{what} A file is given by its path, for example ./pipeline.yaml"
        )
        return None
    text = _text(path, mistakes)
    if text is None:
        return None
    root = parse(text, Origin(item, 1), mistakes)
    if root is not None and not isinstance(root.value, Mapping):
        mistakes.add(
            root.origin, "", f"{shown(root.plain())} is not a pipeline; write keys and values"
        )
        return None
    return root


def _text(path: Path, mistakes: Mistakes) -> str | None:
    origin = Origin(str(path))
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            mistakes.add(origin, "", "it is not a regular file")
        elif status.st_size > MAX_DOCUMENT_BYTES:
            mistakes.add(origin, "", f"it is larger than {MAX_DOCUMENT_BYTES} bytes")
        else:
            return path.read_bytes()[:MAX_DOCUMENT_BYTES].decode()
    except OSError as error:
        mistakes.add(origin, "", f"it can't be read: {error.strerror}")
    except UnicodeDecodeError as error:
        mistakes.add(origin, "", f"it is not UTF-8 at byte {error.start}")
    except ValueError as error:
        mistakes.add(origin, "", f"it can't be read: {error}")
    return None


def _stage_names(root: Node) -> tuple[str, ...]:
    items = root.value
    stages = items.get("stages") if isinstance(items, Mapping) else None
    return tuple(stages.value) if stages is not None and isinstance(stages.value, Mapping) else ()


def _about(root: Node, overrides: Iterable[Override]) -> list[Override]:
    """Return the overrides of stages that this file has."""
    stages = _stage_names(root)
    result: list[Override] = []
    for override in overrides:
        section, *rest = override.path
        if section == "stages" and len(rest) > 1:
            stage = matching_key(stages, rest[0])
            if stage in stages:
                result.append(Override((section, stage, *rest[1:]), override.node))
    return result


def _common(roots: Sequence[Node], mistakes: Mistakes) -> Node:
    """Return the sections that all files share."""
    merged: dict[str, Node] = {}
    for root in roots:
        items: Mapping[str, Node] = root.value if isinstance(root.value, Mapping) else {}
        for key in SHARED_KEYS:
            if key in items:
                merged[key] = _merged(merged.get(key), items[key], key, mistakes)
    return Node(merged, Origin("pipelines"))


def _merged(first: Node | None, second: Node, key: str, mistakes: Mistakes) -> Node:
    if first is None or first.value is None:
        return second
    if isinstance(first.value, Mapping) and isinstance(second.value, Mapping):
        items = dict(first.value)
        for name, node in second.value.items():
            items[name] = _merged(items.get(name), node, f"{key}.{name}", mistakes)
        return Node(items, first.origin)
    if second.value is not None and first.plain() != second.plain():
        what = f"{shown(second.plain())} differs from {shown(first.plain())} in {first.origin}"
        mistakes.add(second.origin, key, f"{what}; one deployment has one value")
    return first


def _check_respawn(orchestrator: OrchestratorSettings, section: Node, mistakes: Mistakes) -> None:
    limits = orchestrator.limits
    if limits.respawn_min_s > limits.respawn_max_s:
        what = f"{limits.respawn_min_s} is more than respawn_max_s, {limits.respawn_max_s}"
        mistakes.add(section.origin, "orchestrator.limits.respawn_min_s", what)


def _pooled(files: Sequence[PipelineFile], mistakes: Mistakes) -> tuple[StageSettings, ...]:
    """Return every stage once; a stage that two files name is one pool, so they must agree."""
    pool: dict[StageId, tuple[StageSettings, Origin]] = {}
    names: dict[str, Origin] = {}
    for file in files:
        name, origin = file.pipeline.name, file.origins.get("name")
        if origin is not None and name in names:
            mistakes.add(origin, "name", f"the pipeline {name!r} is also in {names[name]}")
        elif origin is not None:
            names[name] = origin
        for stage in file.stages:
            at = file.origins[f"stages.{stage.id}"]
            known, first = pool.setdefault(stage.id, (stage, at))
            keys = [
                key
                for key in StageSettings.__struct_fields__
                if getattr(known, key) != getattr(stage, key)
            ]
            if keys:
                what = f"it differs from the same stage in {first} by {', '.join(keys)}"
                mistakes.add(at, f"stages.{stage.id}", what)
    return tuple(stage for stage, _ in pool.values())
