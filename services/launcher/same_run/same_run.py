"""A run goes on by the rules, and from the model, that it began with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict

from services.chassis.errors import ConfigError
from services.launcher.config import LauncherConfig
from services.launcher.layout import Layout
from services.launcher.run_rules import rules
from services.launcher.same_run.model_fingerprint import fingerprint

FILE = "began_with.json"


def check_same_run(config: LauncherConfig, layout: Layout) -> None:
    """Compare with what the run began with, before anything starts.

    Raises:
        ConfigError: names what differs, both values and the cure.
    """
    began, now = _read(layout.folder / FILE), _facts(config, layout)
    if not began:
        return  # a new run, or one of an older release: its trajectory manager compares
    rules_then, rules_now = began.get("rules", {}), now["rules"]
    differing = [
        f"{name} (was {rules_then.get(name)}, is {rules_now.get(name)})"
        for name in sorted({*rules_then, *rules_now})
        if rules_then.get(name) != rules_now.get(name)
    ]
    if differing:
        raise ConfigError(
            f"run {config.name!r} began with other rules: {', '.join(differing)}; set them back, "
            "or start a new run by another --name"
        )
    _check_model(config, layout, began.get("model") or {}, now["model"])


def note_beginning(config: LauncherConfig, layout: Layout) -> None:
    """Write down what the run begins with, unless an earlier start has."""
    file = layout.folder / FILE
    if not _read(file):
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(_facts(config, layout), indent=2) + "\n", encoding="utf-8")
        partial.rename(file)


def _check_model(
    config: LauncherConfig, layout: Layout, then: Mapping[str, str], now: Mapping[str, str]
) -> None:
    differing = [name for name in then if name in now and then[name] != now[name]]
    if differing:
        raise ConfigError(
            f"model is {layout.path(config.model)!r}, and run {config.name!r} began with another "
            f"one: {' and '.join(differing)} differ; give that model, or start a new run by "
            "another --name"
        )


def _facts(config: LauncherConfig, layout: Layout) -> dict[str, Any]:
    """As JSON gives them back; of a model that is still to be prepared, nothing."""
    own = config.replace(required_columns=config.columns)
    folder = Path(layout.path(config.model))
    return {
        "rules": MessageToDict(rules(own), preserving_proto_field_name=True),
        "model": {} if config.prepare is not None else dict(fingerprint(folder)),
    }


def _read(file: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
