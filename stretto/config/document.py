"""YAML text becomes a tree of values that remember where they were written.

Types are those of YAML 1.2's core schema: `yes`, `no` and dates are text, `1e3` is a number. Tags,
repeated keys and deep or repeated structures are refused, so a document costs what it looks like.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from msgspec import UNSET, UnsetType

from stretto.config.mistakes import Mistakes, Origin, shown

if TYPE_CHECKING:
    import yaml

MAX_DOCUMENT_BYTES = 1024 * 1024
_MAX_DEPTH = 32
_MAX_VALUES = 50_000
_INT64 = range(-(2**63), 2**63)

_INTEGER = re.compile(r"[-+]?[0-9]+(_[0-9]+)*")
_NUMBER = re.compile(r"[-+]?([0-9]+(_[0-9]+)*\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
_WORDS: dict[str, bool | None] = {
    "": None,
    "~": None,
    "null": None,
    "Null": None,
    "NULL": None,
    "true": True,
    "True": True,
    "TRUE": True,
    "false": False,
    "False": False,
    "FALSE": False,
}
_PLAIN_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("str", "seq", "map")}

Scalar: TypeAlias = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Text:
    """A value written outside a file; the key that it is for says how to read it."""

    text: str


@dataclass(frozen=True, slots=True)
class Node:
    """A value and its origin. Mappings and sequences hold further nodes.

    The value is `UNSET` where it could not be read; that mistake is noted already.
    """

    value: Scalar | Text | UnsetType | Sequence[Node] | Mapping[str, Node]
    origin: Origin

    def plain(self) -> object:
        """Return the value without origins, as JSON could hold it."""
        match self.value:
            case Text(text):
                return text
            case Mapping():
                return {key: node.plain() for key, node in self.value.items()}
            case str() | int() | float() | UnsetType() | None:
                return self.value
            case _:
                return [node.plain() for node in self.value]


def scalar(text: str) -> Scalar:
    """Read a plain scalar.

    Raises:
        ValueError: It looks like a number but is too large for one.
    """
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        if len(text) > 40 or int(text) not in _INT64:  # noqa: PLR2004 - far above 64 bits
            raise ValueError(f"{shown(text)} does not fit in 64 bits")
        return int(text)
    if _NUMBER.fullmatch(text):
        number = float(text)
        if not math.isfinite(number):
            raise ValueError(f"{shown(text)} is too large")
        return number
    return text


def parse(text: str, origin: Origin, mistakes: Mistakes) -> Node | None:
    """Return the document's tree, or `None` with the mistakes noted.

    Lines are counted if the origin has one; all values of an environment variable have one origin.
    """
    import yaml  # noqa: PLC0415 - 20 ms that only readers of files pay

    try:
        root = yaml.BaseLoader(text).get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = (
            origin if mark is None or origin.line is None else Origin(origin.place, mark.line + 1)
        )
        mistakes.add(place, "", f"not YAML: {error.problem or error.context}")
        return None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        mistakes.add(origin, "", f"not YAML: {str(error).splitlines()[0]}")
        return None
    except RecursionError:
        mistakes.add(origin, "", f"nested deeper than {_MAX_DEPTH} levels")
        return None
    if root is None:
        mistakes.add(origin, "", "it is empty")
        return None
    return _Converter(origin, mistakes).convert(root, "", 0)


class _Converter:
    """Turns one composed document into nodes."""

    def __init__(self, origin: Origin, mistakes: Mistakes) -> None:
        self._origin = origin
        self._mistakes = mistakes
        self._values = 0

    def convert(self, node: yaml.Node, path: str, depth: int) -> Node:
        import yaml  # noqa: PLC0415 - already loaded by `parse`

        origin = self._at(node)
        self._values += 1
        if depth > _MAX_DEPTH or self._values > _MAX_VALUES:
            self._refuse_size(origin, path, depth)
        elif node.tag not in _PLAIN_TAGS:
            self._mistakes.add(
                origin, path, f"the tag {node.tag!r} is not supported; write plain values"
            )
        elif isinstance(node, yaml.MappingNode):
            return Node(self._mapping(node, path, depth), origin)
        elif isinstance(node, yaml.SequenceNode):
            items = [
                self.convert(item, f"{path}[{number}]", depth + 1)
                for number, item in enumerate(node.value)
            ]
            return Node(items, origin)
        elif isinstance(node, yaml.ScalarNode):
            return Node(self._scalar(node, path), origin)
        return Node(UNSET, origin)

    def _at(self, node: yaml.Node) -> Origin:
        return (
            self._origin
            if self._origin.line is None
            else Origin(self._origin.place, node.start_mark.line + 1)
        )

    def _refuse_size(self, origin: Origin, path: str, depth: int) -> None:
        if depth > _MAX_DEPTH:
            self._mistakes.add(origin, path, f"nested deeper than {_MAX_DEPTH} levels")
        elif self._values == _MAX_VALUES + 1:
            self._mistakes.add(
                origin, path, f"more than {_MAX_VALUES} values, repeats by alias included"
            )

    def _mapping(self, node: yaml.MappingNode, path: str, depth: int) -> dict[str, Node]:
        import yaml  # noqa: PLC0415 - already loaded by `parse`

        result: dict[str, Node] = {}
        lines: dict[str, Origin] = {}
        for key_node, value_node in node.value:
            origin = self._at(key_node)
            if self._values > _MAX_VALUES:
                break
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag not in _PLAIN_TAGS:
                self._mistakes.add(origin, path, "a key must be plain text")
                continue
            key = str(key_node.value)
            if not self._is_text(key, origin, path):
                continue
            value = self.convert(value_node, f"{path}.{key}" if path else key, depth + 1)
            if key in result:
                what = (
                    f"the key {shown(key)} is repeated; it was first set in line {lines[key].line}"
                )
                self._mistakes.add(origin, path, what)
            result[key] = Node(value.value, origin)
            lines.setdefault(key, origin)
        return result

    def _scalar(self, node: yaml.ScalarNode, path: str) -> Scalar | UnsetType:
        origin = self._at(node)
        if not self._is_text(node.value, origin, path):
            return UNSET
        if node.style is not None:
            return node.value
        try:
            return scalar(node.value)
        except ValueError as error:
            self._mistakes.add(origin, path, str(error))
            return UNSET

    def _is_text(self, text: str, origin: Origin, path: str) -> bool:
        """Say whether a process can be given the text, or note the mistake."""
        if is_portable(text):
            return True
        self._mistakes.add(origin, path, f"{shown(text)} holds a character that is not text")
        return False


def is_portable(text: str) -> bool:
    """Say whether the text survives UTF-8 and an environment: no lone surrogates and no NUL."""
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:
        return False
