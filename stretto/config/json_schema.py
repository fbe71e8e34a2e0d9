"""The JSON Schema of a pipeline file, for editors: completion, and mistakes while typing.

    # yaml-language-server: $schema=pipeline.schema.json

It describes shape, types and ranges. Whether the graph is sound is checked when a file is loaded.
"""

from __future__ import annotations

import msgspec
from msgspec import inspect

from stretto.config.keys import SECTIONS, all_keys
from stretto.config.pipeline_file import REQUIRED_KEYS, VERSION
from stretto.config.schema import FORMS, RANGES

Json = dict[str, object]

_NAME = "^[A-Za-z_][A-Za-z0-9_-]*$"


def pipeline_schema() -> Json:
    """Return the schema as a JSON-compatible mapping."""
    sections = {section: _section(section) for section, _, _ in SECTIONS}
    edge = sections["stages.<name>.inputs.<name>"]
    _properties(edge)["from"] = {
        "type": "string",
        "description": "`request.<input>` or the stage that feeds this input.",
    }
    edge["required"] = ["from"]
    stage = sections["stages.<name>"]
    _properties(stage)["inputs"] = _named(edge, "Edges into this stage, by name.")
    stage["required"] = ["backend", "inputs"]
    orchestrator = sections["orchestrator"]
    _properties(orchestrator)["limits"] = sections["orchestrator.limits"]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Stretto pipeline",
        "type": "object",
        "additionalProperties": False,
        "required": list(REQUIRED_KEYS),
        "properties": {
            "version": {"const": VERSION, "description": "Of this format."},
            "name": {"type": "string", "pattern": _NAME, "description": "What clients ask for."},
            "inputs": {
                "type": "array",
                "minItems": 1,
                "items": {"type": "string", "pattern": _NAME},
                "description": "What a request supplies.",
            },
            "outputs": {
                "type": "object",
                "minProperties": 1,
                "additionalProperties": {"type": "string"},
                "description": "Each output, and the stage that makes it.",
            },
            "stages": _named(stage, "The stages, by name."),
            "server": sections["server"],
            "orchestrator": orchestrator,
        },
    }


def _section(section: str) -> Json:
    struct, hidden = next((s, h) for name, s, h in SECTIONS if name == section)
    meanings = {key.name: key.meaning for key in all_keys() if key.section == section}
    properties = {
        field.name: {**_value(field), "description": meanings[field.name]}
        for field in msgspec.structs.fields(struct)
        if field.name not in hidden
    }
    return {"type": ["object", "null"], "additionalProperties": False, "properties": properties}


def _value(field: msgspec.structs.FieldInfo) -> Json:  # noqa: C901 - one arm per kind of type
    found: Json
    match inspect.type_info(field.type):
        case inspect.IntType():
            found = {"type": "integer"}
        case inspect.FloatType():
            found = {"type": "number"}
        case inspect.BoolType():
            found = {"type": "boolean"}
        case inspect.LiteralType(values=values):
            found = {"enum": list(values)}
        case inspect.EnumType(cls=cls):
            found = {"enum": [member.value for member in cls]}
        case inspect.UnionType(types=types):
            is_number = any(isinstance(each, inspect.IntType) for each in types)
            found = {"type": ["integer" if is_number else "string", "null"]}
        case inspect.DictType(value_type=inspect.StrType()):
            found = {"type": ["object", "null"], "additionalProperties": {"type": "string"}}
        case inspect.DictType():
            found = {"type": ["object", "null"]}
        case _:
            found = {"type": "string", "minLength": 1}
    if field.name in RANGES:
        found["minimum"], found["maximum"] = RANGES[field.name]
    if field.name in FORMS:
        found["pattern"] = f"^({FORMS[field.name][0].pattern})$"
    if not field.required and field.default is not msgspec.NODEFAULT:
        found["default"] = getattr(field.default, "value", field.default)
    return found


def _named(item: Json, meaning: str) -> Json:
    return {
        "type": "object",
        "minProperties": 1,
        "propertyNames": {"pattern": _NAME},
        "additionalProperties": item,
        "description": meaning,
    }


def _properties(section: Json) -> Json:
    properties = section["properties"]
    assert isinstance(properties, dict)
    return properties  # pyright: ignore[reportUnknownVariableType] - made above
