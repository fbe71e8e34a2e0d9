"""Checks a tree of values against the frozen settings types and notes every mistake.

Which keys exist and their types come from the `msgspec.Struct` classes themselves; this module adds
the range of each number. A key that is wrong gets its default, so that reading goes on.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Final, TypeVar, cast

import msgspec
from msgspec import UNSET, inspect

from stretto.config.document import Node, Text, parse, scalar
from stretto.config.mistakes import Mistakes, Origin, did_you_mean, shown

DEFAULT = "default"

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_OBJECT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_BACKEND_NAME = re.compile(r"[a-z][a-z0-9-]*")

_DAY_S: Final = 86_400
_TIB: Final = 1024**4

RANGES: Final[Mapping[str, tuple[float, float]]] = {
    "replicas": (0, 256),
    "slots": (1, 4096),
    "max_batch": (1, 4096),
    "max_wait_ms": (0, 10_000),
    "threads": (1, 256),
    "memory_bytes": (64 * 1024**2, _TIB),
    "chunk_timeout_s": (0.1, _DAY_S),
    "progress_timeout_s": (0.1, _DAY_S),
    "start_timeout_s": (0.1, _DAY_S),
    "shared_memory_bytes": (0, _TIB),
    "port": (0, 65_535),
    "api_processes": (1, 64),
    "drain_timeout_s": (0, 3600),
    "receive_timeout_s": (0.1, _DAY_S),
    "max_body_bytes": (1024, 1024**3),
    "max_input_chars": (1, 10_000_000),
    "first_chunk_timeout_s": (0.1, _DAY_S),
    "max_queued": (1, 1_000_000),
    "queue_timeout_s": (0.1, _DAY_S),
    "input_timeout_s": (0.1, _DAY_S),
    "request_timeout_s": (0.1, _DAY_S),
    "slow_client_timeout_s": (0.1, _DAY_S),
    "cancel_timeout_s": (0.1, _DAY_S),
    "stage_unavailable_timeout_s": (0.1, _DAY_S),
    "retention_bytes": (1, _TIB),
    "client_window_chunks": (1, 65_536),
    "client_window_bytes": (1, _TIB),
    "respawn_min_s": (0.001, 3600),
    "respawn_max_s": (0.001, 3600),
    "breaker_deaths": (1, 1000),
    "breaker_window_s": (0.1, _DAY_S),
    "breaker_rearm_s": (0.1, _DAY_S),
    "poison_deaths": (1, 1000),
    "window_chunks": (1, 65_536),
    "window_bytes": (1, _TIB),
    "join_silence_s": (1, 3600),
}
"""The accepted range of each number, both ends included."""

FORMS: Final[Mapping[str, tuple[re.Pattern[str], str]]] = {
    "device": (re.compile(r"cpu|cuda(:[0-9]{1,3})?"), "cpu, cuda, or cuda:N for the N-th GPU"),
    "join_address": (
        re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:\[\]/]+):[0-9]{1,5}"),
        "host:port, with brackets around an IPv6 number",
    ),
}
"""What each text must look like that has a form of its own, and how that is said."""

StructT = TypeVar("StructT", bound=msgspec.Struct)


@functools.cache
def _fields_of(struct: type[msgspec.Struct]) -> tuple[inspect.Field, ...]:
    return cast("inspect.StructType", inspect.type_info(struct)).fields


class Reader:
    """Reads checked values out of nodes.

    Attributes:
        mistakes: What was wrong.
        sources: Where each value that was read came from, by its dotted path.
    """

    def __init__(self, mistakes: Mistakes) -> None:
        self.mistakes = mistakes
        self.sources: dict[str, str] = {}

    def struct(
        self,
        struct: type[StructT],
        node: Node | None,
        key: str,
        *,
        path: str = "",
        besides: Collection[str] = (),
        **given: object,
    ) -> StructT:
        """Read a settings object.

        Args:
            struct: The type to make.
            node: A mapping with its fields; `None` gives the defaults.
            key: Where the node is in its document, for error texts.
            path: Where the values belong in the resolved settings; `key` if empty.
            besides: Further keys that the node may have; they are read by others.
            given: Fields that are not read from the node.
        """
        fields = {field.name: field for field in _fields_of(struct) if field.name not in given}
        if node is not None:
            self.refuse_unknown(self.mapping(node, key), [*fields, *besides], key)
        return struct(**given, **self._fields(fields, node, key, path or key))

    def _fields(
        self, fields: Mapping[str, inspect.Field], node: Node | None, key: str, path: str
    ) -> dict[str, object]:
        values: dict[str, object] = {}
        items: Mapping[str, Node] = self.mapping(node, key) if node is not None else {}
        for name, field in fields.items():
            child, at, to = items.get(name), f"{key}.{name}", f"{path}.{name}"
            if isinstance(field.type, inspect.StructType):
                values[name] = self.struct(field.type.cls, child, at, path=to)
            elif child is not None:
                value = self._value(field, child, at, to)
                values[name] = "" if field.required and value is UNSET else value
            elif field.required:
                values[name] = ""
                if node is not None:
                    self.mistakes.add(node.origin, key, f"the key {name!r} is missing")
            else:
                self.sources[to] = DEFAULT
        return {name: value for name, value in values.items() if value is not UNSET}

    def _value(  # noqa: C901 - one arm per kind of type
        self, field: inspect.Field, node: Node, key: str, path: str
    ) -> object:
        """Return the field's value, or `UNSET` with a mistake noted."""
        if node.value is UNSET:
            return UNSET
        self.sources[path] = str(node.origin)
        match field.type:
            case inspect.IntType() | inspect.FloatType() as kind:
                value = self._number(node, key, field.name, whole=isinstance(kind, inspect.IntType))
            case inspect.BoolType():
                value = self._flag(node, key)
            case inspect.LiteralType(values=values):
                value = self._choice(node, key, [str(value) for value in values])
            case inspect.EnumType(cls=cls):
                name = self._choice(node, key, [str(member.value) for member in cls])
                value = UNSET if name is UNSET else cls(name)
            case inspect.UnionType() if node.value in (None, Text("null")):
                value = None
            case inspect.UnionType(types=types) if any(
                isinstance(each, inspect.IntType) for each in types
            ):
                value = self._number(node, key, field.name, whole=True)
            case inspect.UnionType() if node.value == Text(""):
                value = None
            case inspect.DictType(value_type=inspect.StrType()):
                value = self._variables(node, key, path)
            case inspect.DictType():
                value = self._free(node, key, path)
            case _:
                value = self._formed(field.name, self.text(node, key), node, key)
        return value

    def _formed(self, name: str, text: str, node: Node, key: str) -> object:
        """Return text that has the form of its field, or `UNSET` with a mistake noted."""
        form = FORMS.get(name)
        if text and form is not None and not form[0].fullmatch(text):
            self.mistakes.add(node.origin, key, f"{shown(text)} is not {form[1]}")
            return UNSET
        return text or UNSET

    def _number(self, node: Node, key: str, name: str, *, whole: bool) -> object:
        low, high = RANGES[name]
        value = self._scalar(node, key)
        is_number = isinstance(value, int if whole else (int, float)) and not isinstance(
            value, bool
        )
        if is_number and low <= cast("float", value) <= high:
            return value if whole else float(cast("float", value))
        kind = "a whole number" if whole else "a number"
        return self._checked(node, key, value, f"{shown(value)} is not {kind} from {low} to {high}")

    def _choice(self, node: Node, key: str, choices: Sequence[str]) -> object:
        value = self._scalar(node, key)
        if value in choices:
            return value
        what = f"{shown(value)} is not one of {', '.join(sorted(choices))}"
        if isinstance(value, str) and "did you mean" in (hint := did_you_mean(value, choices)):
            what += hint
        return self._checked(node, key, value, what)

    def _checked(self, node: Node, key: str, value: object, what: str | None) -> object:
        """Return the value if nothing is wrong with it; else note that, unless it is noted."""
        if what is None:
            return value
        if value is not UNSET:
            self.mistakes.add(node.origin, key, what)
        return UNSET

    def _scalar(self, node: Node, key: str) -> object:
        """Return the node's value; text from outside a file is read as a file would read it."""
        if not isinstance(node.value, Text):
            return node.plain()
        try:
            return scalar(node.value.text)
        except ValueError as error:
            self.mistakes.add(node.origin, key, str(error))
            return UNSET

    def _flag(self, node: Node, key: str) -> object:
        value = self._scalar(node, key)
        is_flag = isinstance(value, bool)
        return self._checked(
            node, key, value, None if is_flag else f"{shown(value)} is neither true nor false"
        )

    def _variables(self, node: Node, key: str, path: str) -> dict[str, str]:
        items = self.mapping(node, key)
        self._forget_if_any(items, path)
        return {n: self._variable(item, f"{key}.{n}", n, path) for n, item in items.items()}

    def _forget_if_any(self, items: Mapping[str, Node], path: str) -> None:
        """Forget where a mapping came from if its items have sources of their own."""
        if items:
            del self.sources[path]

    def _variable(self, node: Node, key: str, name: str, path: str) -> str:
        if not _NAME.fullmatch(name) or "-" in name:
            self.mistakes.add(node.origin, key, f"{shown(name)} can't name an environment variable")
        self.sources[f"{path}.{name}"] = str(node.origin)
        return self.text(node, key, may_be_empty=True)

    def _free(self, node: Node, key: str, path: str) -> dict[str, object]:
        """Return a mapping whose keys are a backend's; text from outside a file becomes values."""
        items = {name: self._parsed(item) for name, item in self.mapping(node, key).items()}
        self._forget_if_any(items, path)
        for name, item in items.items():
            self._free_sources(item, f"{path}.{name}")
        return {name: item.plain() for name, item in items.items()}

    def _free_sources(self, node: Node, path: str) -> None:
        if isinstance(node.value, Mapping) and node.value:
            for name, item in node.value.items():
                self._free_sources(item, f"{path}.{name}")
        else:
            self.sources[path] = str(node.origin)

    def _parsed(self, node: Node) -> Node:
        match node.value:
            case Text(""):
                return Node("", node.origin)
            case Text(text):
                return parse(text, node.origin, self.mistakes) or Node(UNSET, node.origin)
            case Mapping():
                return Node(
                    {name: self._parsed(item) for name, item in node.value.items()}, node.origin
                )
            case _:
                return node

    def mapping(self, node: Node, key: str) -> Mapping[str, Node]:
        """Return a mapping's items; anything else is a mistake and has none."""
        if isinstance(node.value, Text):
            node = self._parsed(node)
        if isinstance(node.value, Mapping):
            return node.value
        if node.value is not None and node.value is not UNSET:
            what = f"{shown(node.plain())} is not a mapping of keys to values"
            self.mistakes.add(node.origin, key, what)
        return {}

    def refuse_unknown(self, items: Mapping[str, Node], known: Collection[str], key: str) -> None:
        """Note every key that is not known, with the nearest one that is."""
        for name, item in items.items():
            if name not in known:
                at = f"{key}.{name}" if key else name
                self.mistakes.add(item.origin, at, f"unknown key{did_you_mean(name, known)}")

    def text(self, node: Node, key: str, *, may_be_empty: bool = False) -> str:
        """Return text; anything else is a mistake and gives the empty text."""
        value = node.value.text if isinstance(node.value, Text) else node.plain()
        if value is UNSET:
            return ""
        if isinstance(value, str) and (value or may_be_empty):
            return value
        hint = "; put it in quotes" if isinstance(value, int | float) else ""
        what = "it is empty" if value in ("", None) else f"{shown(value)} is not text{hint}"
        self.mistakes.add(node.origin, key, what)
        return ""

    def name(self, text: str, origin: Origin, key: str) -> str:
        """Return the text after checking that it can be an identity."""
        if text and not _NAME.fullmatch(text):
            what = f"{shown(text)} is not a name: use letters, digits, '-' and '_', a letter first"
            self.mistakes.add(origin, key, what)
        return text

    def object_path(self, text: str, origin: Origin, key: str, *, or_name: bool = False) -> str:
        """Return the text after checking that it is `module:name`, or a built-in name."""
        if (
            text
            and not _OBJECT_PATH.fullmatch(text)
            and not (or_name and _BACKEND_NAME.fullmatch(text))
        ):
            allowed = (
                "a built-in name such as 'scripted', or 'module:Class'"
                if or_name
                else "'module:name'"
            )
            self.mistakes.add(origin, key, f"{shown(text)} is not {allowed}")
        return text
