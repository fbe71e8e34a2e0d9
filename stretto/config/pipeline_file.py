"""One file's pipeline: its graph and its stages, read from a tree of values.

A name that is nearly right is taken for what it was meant to be once its mistake is noted, so that
the graph is still checked and shows no mistake that follows from the first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from msgspec import UNSET

from stretto.config.mistakes import Origin, did_you_mean, nearest, shown
from stretto.config.settings import StageSettings
from stretto.core.graph import Deployment, EdgeSpec, OutputSpec, PipelineSpec, validated
from stretto.errors import ConfigError
from stretto.types import InputName, OutputName, PipelineName, StageId

if TYPE_CHECKING:
    from stretto.config.document import Node
    from stretto.config.schema import Reader

VERSION: Final = 1
REQUIRED_KEYS: Final = ("version", "name", "inputs", "outputs", "stages")
SHARED_KEYS: Final = ("server", "orchestrator")

_REQUEST = "request."
_NAMED_IN_GRAPH_MISTAKE = re.compile(r"(stage|output) '([^']+)'")


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineFile:
    """What one file says, as far as it could be read.

    Attributes:
        pipeline: The graph.
        stages: The stages of the graph, in the order of the file.
        origins: Where each stage and the name were written, by dotted key.
    """

    pipeline: PipelineSpec
    stages: tuple[StageSettings, ...]
    origins: Mapping[str, Origin]


def read_pipeline(reader: Reader, root: Node) -> PipelineFile:
    """Read one file; mistakes are noted in the reader."""
    return _FileReader(reader, root).read()


class _FileReader:
    """Holds what the parts of one file need of each other: its names."""

    def __init__(self, reader: Reader, root: Node) -> None:
        self._reader = reader
        self._root = root
        self._items = reader.mapping(root, "")
        self._origins = {key: node.origin for key, node in self._items.items()}
        self._inputs: list[str] = []
        self._stages: Mapping[str, Node] = {}

    def read(self) -> PipelineFile:
        self._reader.refuse_unknown(self._items, [*REQUIRED_KEYS, *SHARED_KEYS], "")
        for key in REQUIRED_KEYS:
            if key not in self._items:
                self._reader.mistakes.add(self._root.origin, "", f"the key {key!r} is missing")
        self._check_version()
        name = self._name()
        self._inputs = self._read_inputs(name)
        self._stages = self._section("stages")
        for stage, node in self._stages.items():
            self._reader.name(stage, node.origin, f"stages.{stage}")
            self._origins[f"stages.{stage}"] = node.origin
        file = PipelineFile(
            pipeline=PipelineSpec(
                name=PipelineName(name),
                inputs=tuple(InputName(text) for text in self._inputs),
                edges=tuple(edge for stage in self._stages for edge in self._edges(stage, name)),
                outputs=tuple(self._outputs(name)),
            ),
            stages=tuple(self._stage(stage, node) for stage, node in self._stages.items()),
            origins=self._origins,
        )
        if self._inputs and self._stages and file.pipeline.outputs:
            self._check_graph(file)
        return file

    def _check_version(self) -> None:
        node = self._items.get("version")
        if node is not None and node.plain() not in (VERSION, UNSET):
            what = f"{shown(node.plain())} is not supported; this Stretto reads version {VERSION}"
            self._reader.mistakes.add(node.origin, "version", what)

    def _name(self) -> str:
        node = self._items.get("name")
        if node is None:
            return ""
        name = self._reader.name(self._reader.text(node, "name"), node.origin, "name")
        self._reader.sources[f"pipelines.{name}.name"] = str(node.origin)
        return name

    def _section(self, key: str) -> Mapping[str, Node]:
        """Return the items of a mapping that must not be empty."""
        node = self._items.get(key)
        if node is None:
            return {}
        items = self._reader.mapping(node, key)
        if not items and _may_hold_keys(node):
            self._reader.mistakes.add(node.origin, key, "it is empty; name at least one")
        return items

    def _read_inputs(self, pipeline: str) -> list[str]:
        node = self._items.get("inputs")
        if node is None:
            return []
        if not isinstance(node.value, Sequence) or isinstance(node.value, str) or not node.value:
            if node.value is not UNSET:
                what = f"{shown(node.plain())} is not a list of names, for example [text]"
                self._reader.mistakes.add(node.origin, "inputs", what)
            return []
        self._reader.sources[f"pipelines.{pipeline}.inputs"] = str(node.origin)
        names: list[str] = []
        for number, item in enumerate(node.value):
            key = f"inputs[{number}]"
            name = self._reader.name(self._reader.text(item, key), item.origin, key)
            if name in names:
                self._reader.mistakes.add(item.origin, key, f"the input {name!r} is repeated")
            elif name:
                names.append(name)
        return names

    def _outputs(self, pipeline: str) -> list[OutputSpec]:
        outputs: list[OutputSpec] = []
        for name, node in self._section("outputs").items():
            key = f"outputs.{name}"
            self._reader.name(name, node.origin, key)
            self._origins[key] = node.origin
            stage = self._reader.text(node, key)
            if stage and stage not in self._stages:
                what = f"unknown stage {shown(stage)}{did_you_mean(stage, self._stages)}"
                self._reader.mistakes.add(node.origin, key, what)
                stage = nearest(stage, self._stages) or next(reversed(list(self._stages)), "")
            if stage:
                outputs.append(OutputSpec(name=OutputName(name), stage=StageId(stage)))
            self._reader.sources[f"pipelines.{pipeline}.outputs.{name}"] = str(node.origin)
        return outputs

    def _stage(self, stage: str, node: Node) -> StageSettings:
        key = f"stages.{stage}"
        settings = self._reader.struct(
            StageSettings, node, key, besides=("inputs",), id=StageId(stage)
        )
        backend = self._reader.mapping(node, key).get("backend")
        if backend is not None:
            self._reader.object_path(
                settings.backend, backend.origin, f"{key}.backend", or_name=True
            )
        return settings

    def _edges(self, stage: str, pipeline: str) -> list[EdgeSpec]:
        edges = self._read_edges(stage, pipeline)
        if edges or not self._inputs:
            return edges
        return [EdgeSpec(target=StageId(stage), name="?", request_input=InputName(self._inputs[0]))]

    def _read_edges(self, stage: str, pipeline: str) -> list[EdgeSpec]:
        key, node = f"stages.{stage}.inputs", self._stages[stage]
        if not _may_hold_keys(node):
            return []
        inputs = self._reader.mapping(node, f"stages.{stage}").get("inputs")
        if inputs is None:
            self._reader.mistakes.add(node.origin, f"stages.{stage}", "the key 'inputs' is missing")
            return []
        items = self._reader.mapping(inputs, key)
        if not items and _may_hold_keys(inputs):
            self._reader.mistakes.add(inputs.origin, key, "it is empty; name at least one")
        return [
            self._edge(stage, name, item, f"{key}.{name}", pipeline) for name, item in items.items()
        ]

    def _edge(self, stage: str, name: str, node: Node, key: str, pipeline: str) -> EdgeSpec:
        self._reader.name(name, node.origin, key)
        source = self._source(node, key)
        is_request = source.startswith(_REQUEST)
        path = f"pipelines.{pipeline}.{key}"
        edge = self._reader.struct(
            EdgeSpec,
            node,
            key,
            path=path,
            besides=("from",),
            target=StageId(stage),
            name=name,
            source=None if is_request else StageId(source),
            request_input=InputName(source.removeprefix(_REQUEST)) if is_request else None,
        )
        items = self._reader.mapping(node, key)
        if "from" in items:
            self._reader.sources[f"{path}.from"] = str(items["from"].origin)
        if edge.adapter is not None:
            self._reader.object_path(edge.adapter, items["adapter"].origin, f"{key}.adapter")
        return edge

    def _source(self, node: Node, key: str) -> str:
        """Return the edge's source, `request.<input>` or a stage, as it was probably meant."""
        known = [*self._stages, *(f"{_REQUEST}{name}" for name in self._inputs)]
        fallback = f"{_REQUEST}{self._inputs[0]}" if self._inputs else ""
        item = self._reader.mapping(node, key).get("from")
        if item is None:
            if _may_hold_keys(node):
                self._reader.mistakes.add(node.origin, key, "the key 'from' is missing")
            return fallback
        source = self._reader.text(item, f"{key}.from")
        if not source or source in known or (not self._inputs and source.startswith(_REQUEST)):
            return source or fallback  # that there is no input at all is noted already
        what = f"unknown source {shown(source)}{did_you_mean(source, known)}"
        self._reader.mistakes.add(item.origin, f"{key}.from", what)
        return nearest(source, known) or fallback

    def _check_graph(self, file: PipelineFile) -> None:
        specs = tuple(stage.router_spec() for stage in file.stages)
        try:
            validated(Deployment(stages=specs, pipelines=(file.pipeline,)))
        except ConfigError as error:
            for line in error.detail.splitlines():
                what = line.removeprefix(f"pipeline {file.pipeline.name!r}: ")
                named = _NAMED_IN_GRAPH_MISTAKE.search(what)
                key = f"{named[1]}s.{named[2]}" if named is not None else "stages"
                origin = self._origins.get(key, self._origins["stages"])
                self._reader.mistakes.add(origin, key if key in self._origins else "stages", what)


def _may_hold_keys(node: Node) -> bool:
    """Say whether a key can be missing here; anything but a mapping is a mistake of its own."""
    return node.value is None or isinstance(node.value, Mapping)
