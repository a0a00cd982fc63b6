"""JSON types of a tool's arguments, for formats that write arguments as text.

`transformers.utils.chat_parsing` converts an argument by the `type` of its schema alone. Schemas
that say it in another way (`$ref`, `allOf`, `enum`, `const`, `properties`) get one here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_MAX_DEPTH = 16
_TYPE_OF = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    dict: "object",
    list: "array",
    type(None): "null",
}
_OF_OBJECTS = frozenset({"properties", "additionalProperties", "patternProperties", "required"})
_OF_ARRAYS = frozenset({"items", "prefixItems", "contains", "minItems", "maxItems"})


def typed_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a function, with the types of its parameters in place of their schemas."""
    function = dict(tool.get("function", tool))
    parameters = function.get("parameters")
    root = parameters if isinstance(parameters, Mapping) else {}
    properties = root.get("properties")
    given = properties if isinstance(properties, Mapping) else {}
    types = {name: {"type": _types(schema, root, _MAX_DEPTH)} for name, schema in given.items()}
    function["parameters"] = {"type": "object", "properties": types}
    return {"type": "function", "function": function}


def _types(schema: object, root: Mapping[str, Any], depth: int) -> list[str]:
    """The JSON types that a schema allows; none if it does not tell."""
    if not isinstance(schema, Mapping) or depth == 0:
        return []
    found = _own_types(schema)
    parts = [_types(_referenced(schema.get("$ref"), root), root, depth - 1)]
    parts += [_types(each, root, depth - 1) for each in _list(schema.get("allOf"))]
    for name in ("anyOf", "oneOf"):
        choices = [_types(each, root, depth - 1) for each in _list(schema.get(name))]
        parts.append([kind for kinds in choices for kind in kinds])
    for kinds in filter(None, parts):
        found = [kind for kind in found if kind in kinds] or kinds if found else kinds
    nullable = ["null"] if schema.get("nullable") else []
    return [*dict.fromkeys([*found, *nullable])]


def _own_types(schema: Mapping[str, Any]) -> list[str]:
    """By its `type`, its values, or keywords that only one type has."""
    declared = schema.get("type")
    if isinstance(declared, str):
        return [declared]
    if isinstance(declared, Sequence):
        return [each for each in declared if isinstance(each, str)]
    values = [schema["const"]] if "const" in schema else _list(schema.get("enum"))
    if values:
        return [*dict.fromkeys(_TYPE_OF[type(value)] for value in values)]
    if schema.keys() & _OF_OBJECTS:
        return ["object"]
    return ["array"] if schema.keys() & _OF_ARRAYS else []


def _referenced(reference: object, root: Mapping[str, Any]) -> object:
    """What a reference into the same schema names; None for others."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found: object = root
    for part in filter(None, reference.removeprefix("#").split("/")):
        name = part.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
