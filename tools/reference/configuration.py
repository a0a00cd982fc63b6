"""The reference of all settings, from the settings classes themselves."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, cast

from pydantic import BaseModel, SecretStr, TypeAdapter
from pydantic.fields import FieldInfo

from services.chassis.config.settings import ServerConfig, secret_names
from services.launcher.checks.run_settings import CLASSES

TABLES: Mapping[str, str] = {
    "launcher": "services.launcher.config:LauncherConfig",
    "evaluation": "services.lib.evaluation:EvaluationConfig",
    **CLASSES,
    "run": "deploy.create_run:CreateRunConfig",
}
"""Settings class of each table of a configuration file."""

_HEADER = """# Configuration

Generated from the settings classes by `make docs`; do not edit.

A setting is given, in order of precedence, by a flag (`--log-level`, nested
`--optimizer.learning-rate`), an environment variable (`SEAMFLOW_TRAINER_LOG_LEVEL`, nested
`SEAMFLOW_TRAINER_OPTIMIZER__LEARNING_RATE`) or the process's table in the TOML file of
`--config`. Lists in flags and variables are comma-separated or JSON, tables are JSON. A secret
can also be read from a mounted file: `token_file`, `SEAMFLOW_TRAINER_TOKEN_FILE`,
`--token-file`; it is read again when it changes. `--print-config` shows every value with its
origin.

Unknown keys and flags are errors. A variable with the process's prefix that names no setting is
ignored with a warning on stderr; one that Kubernetes or Docker adds for a service of that name
(`…_PORT=tcp://…`, `…_SERVICE_HOST`) without.

[configuration.schema.json](configuration.schema.json) is a JSON Schema for editors: begin the
TOML file with `#:schema docs/configuration.schema.json`.
"""
_COLUMNS = "| setting | value, default | meaning |\n|---|---|---|"
_UNITS = {"seconds": "s", "bytes": "bytes", "tokens": "tokens", "steps": "steps"}
_BOUNDS = {
    "exclusiveMinimum": "> {}",
    "minimum": "≥ {}",
    "exclusiveMaximum": "< {}",
    "maximum": "≤ {}",
}


def configuration_page() -> str:
    parts = [_HEADER, "## Every process\n", _table(ServerConfig, ServerConfig.model_fields)]
    told: dict[str, str] = {_told(*each): "" for each in ServerConfig.model_fields.items()}
    for table, settings in settings_of().items():
        fields = settings.model_fields
        own = {name: field for name, field in fields.items() if _told(name, field) not in told}
        parts.append(f"\n## [{table}]\n\n{_summary(settings)}\n")
        parts.extend(_tables(table, settings, own))
        parts.extend(_as_in(told, fields))
        told |= {_told(name, field): table for name, field in own.items()}
    return "\n".join(parts)


def _told(name: str, field: FieldInfo) -> str:
    return f"{name}: {field!r}"


def _as_in(told: Mapping[str, str], fields: Mapping[str, FieldInfo]) -> Iterator[str]:
    """A line for each table that has told the same settings."""
    same: dict[str, list[str]] = {}
    for name, field in fields.items():
        if table := told.get(_told(name, field)):
            same.setdefault(table, []).append(f"`{name}`")
    for table, names in same.items():
        yield f"\nAs in [{table}]: {', '.join(names)}."


def json_schema() -> str:
    """docs/configuration.schema.json: one property for each table."""
    properties, definitions = settings_schemas()
    whole = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "seamflow configuration",
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
        "$defs": definitions,
    }
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def settings_schemas() -> tuple[dict[str, Any], dict[str, Any]]:
    """The schema of each table, none of whose settings is required, and what these refer to."""
    properties: dict[str, Any] = {}
    definitions: dict[str, Any] = {}
    for table, settings in settings_of().items():
        schema = TypeAdapter(settings).json_schema(ref_template="#/$defs/{model}")
        definitions |= schema.pop("$defs", {})
        for name in sorted(secret_names(settings)):
            schema["properties"][f"{name}_file"] = {"type": "string", "format": "path"}
        # What the file lacks may come from the environment or the command line.
        schema.pop("required", None)
        properties[table] = schema
    return properties, definitions


def settings_of() -> dict[str, type[ServerConfig]]:
    found = {}
    for table, path in TABLES.items():
        module, _, name = path.partition(":")
        found[table] = getattr(import_module(module), name)
    return found


def _tables(
    table: str, settings: type[BaseModel], fields: Mapping[str, FieldInfo]
) -> Iterator[str]:
    """The settings of a table, then those of its nested tables."""
    nested = {name: kind for name, f in fields.items() if (kind := _as_table(f.annotation))}
    yield _table(settings, {name: f for name, f in fields.items() if name not in nested})
    for name, annotation in nested.items():
        yield f"\n### [{table}.{name}]\n\n{_summary(annotation)}\n"
        yield from _tables(f"{table}.{name}", annotation, annotation.model_fields)


def _as_table(annotation: object) -> type[BaseModel] | None:
    is_table = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return cast("type[BaseModel]", annotation) if is_table else None


def _summary(settings: type[BaseModel]) -> str:
    return " ".join((settings.__doc__ or "").partition("\n\n")[0].split())


def _table(settings: type[BaseModel], fields: Mapping[str, FieldInfo]) -> str:
    properties = settings.model_json_schema().get("properties", {})
    rows = [_row(name, field, properties.get(name, {})) for name, field in fields.items()]
    return "\n".join([_COLUMNS, *rows])


def _row(name: str, field: FieldInfo, schema: Mapping[str, Any]) -> str:
    about = [_type(field, schema), _unit(name), _range(schema), _default(field)]
    meaning = " ".join((field.description or "").split())
    cells = [f"`{name}`", ", ".join(filter(None, about)), meaning.replace("|", chr(92) + "|")]
    return f"| {' | '.join(cells)} |"


def _type(field: FieldInfo, schema: Mapping[str, Any]) -> str:
    if SecretStr in (field.annotation, *getattr(field.annotation, "__args__", ())):
        return "secret"
    kinds = [entry for entry in schema.get("anyOf", [schema]) if entry.get("type") != "null"]
    return ", ".join(_kind(kind) for kind in kinds)


def _kind(schema: Mapping[str, Any]) -> str:
    if choices := schema.get("enum"):
        return " \\| ".join(f"`{choice}`" for choice in choices)
    if schema.get("type") == "array":
        items = schema.get("items", {})
        return f"list of {_kind(items)}" if "type" in items else "list of tables"
    if "$ref" in schema or schema.get("type") == "object":
        return "table"
    names = {"integer": "integer", "number": "number", "boolean": "true/false", "string": "text"}
    return "path" if schema.get("format") == "path" else names.get(schema.get("type", ""), "text")


def _unit(name: str) -> str:
    if name.endswith("bytes_per_second"):
        return "bytes/s"
    return next((u for end, u in _UNITS.items() if name == end or name.endswith(f"_{end}")), "")


def _range(schema: Mapping[str, Any]) -> str:
    found = [
        text.format(entry[key])
        for entry in schema.get("anyOf", [schema])
        for key, text in _BOUNDS.items()
        if key in entry
    ]
    return ", ".join(found)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "**required**"
    default = field.get_default(call_default_factory=True, validated_data={})
    return "unset" if default is None else f"`{json.dumps(default)}`"
