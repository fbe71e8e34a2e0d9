"""What each configuration key means: the one source of the reference page, `config explain` and the schema.

Meanings are read from the settings types' docstrings, ranges from the table of ranges.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass

import msgspec

from stretto.config.overrides import FLAGS, PREFIX
from stretto.config.schema import FORMS, RANGES
from stretto.config.settings import OrchestratorSettings, ServerSettings, StageSettings
from stretto.core.graph import EdgeSpec, Limits

SECTIONS: tuple[tuple[str, type[msgspec.Struct], tuple[str, ...]], ...] = (
    ("server", ServerSettings, ()),
    ("orchestrator", OrchestratorSettings, ("limits",)),
    ("orchestrator.limits", Limits, ()),
    ("stages.<name>", StageSettings, ("id",)),
    ("stages.<name>.inputs.<name>", EdgeSpec, ("target", "name", "source", "request_input")),
)
"""Each section with its type, and fields of the type that are no keys of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One configuration key.

    Attributes:
        section: Where it stands, for example `orchestrator.limits`.
        name: Its last part.
        meaning: What its value does, on one line.
        default: The default as a file would have it; `required` if there is none.
        allowed: The accepted values, empty if any of its type is.
        variable: The environment variable that sets it, empty if none does.
        flag: The flag of `stretto serve` that sets it, empty if none does.
    """

    section: str
    name: str
    meaning: str
    default: str
    allowed: str
    variable: str
    flag: str

    @property
    def path(self) -> str:
        """The dotted key."""
        return f"{self.section}.{self.name}"


def all_keys() -> tuple[Key, ...]:
    """Return every key, section by section."""
    return tuple(
        _key(section, struct, field)
        for section, struct, hidden in SECTIONS
        for field in msgspec.structs.fields(struct)
        if field.name not in hidden
    )


def _key(section: str, struct: type[msgspec.Struct], field: msgspec.structs.FieldInfo) -> Key:
    path = f"{section}.{field.name}"
    is_edge = struct is EdgeSpec
    variable = PREFIX + path.replace(".", "__").replace("<name>", "NAME").upper()
    return Key(
        section=section,
        name=field.name,
        meaning=_meaning(struct, field.name),
        default=_default(field),
        allowed=_allowed(field),
        variable="" if is_edge else variable,
        flag=FLAGS.get(path, ""),
    )


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.default is msgspec.NODEFAULT:
        return "required" if field.required else "{}"
    value = getattr(field.default, "value", field.default)
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)


def _allowed(field: msgspec.structs.FieldInfo) -> str:
    if field.name in RANGES:
        low, high = RANGES[field.name]
        return f"{low:,} to {high:,}"
    if field.name in FORMS:
        return FORMS[field.name][1]
    return " or ".join(choices(field.type))


def choices(kind: object) -> tuple[str, ...]:
    """Return what a field of few values may be; empty for any other."""
    match msgspec.inspect.type_info(kind):
        case msgspec.inspect.LiteralType(values=values):
            return tuple(str(value) for value in values)
        case msgspec.inspect.EnumType(cls=cls):
            return tuple(str(member.value) for member in cls)
        case msgspec.inspect.BoolType():
            return ("true", "false")
        case _:
            return ()


def _meaning(struct: type[msgspec.Struct], name: str) -> str:
    found = re.search(
        rf"^    {name}: (.*?)(?=^    \w+: |\Z)",
        inspect.getdoc(struct) or "",
        re.MULTILINE | re.DOTALL,
    )
    assert found, f"{struct.__name__}.{name} is not documented"
    return " ".join(found.group(1).split())
