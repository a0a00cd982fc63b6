"""Reads deploy/monitoring/: dashboards, alert rules, and the metrics in their expressions."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
MONITORING = ROOT / "deploy" / "monitoring"
_STRING = re.compile(r'"[^"]*"')
_LABELS = re.compile(r"\b(?:by|on|without|ignoring)\s*\([^)]*\)|\{[^}]*\}|\[[^\]]*\]")
_WORD = re.compile(r"\b[a-zA-Z_:][a-zA-Z0-9_:]*\b(?!\s*\()")
_OPERATORS = {"or", "and", "unless", "bool", "offset"}
_AGGREGATIONS = {"sum", "max", "min", "avg", "count"}


def dashboards() -> dict[str, dict[str, Any]]:
    """By file name."""
    files = sorted((MONITORING / "dashboards").glob("*.json"))
    return {file.name: json.loads(file.read_text()) for file in files}


def rules() -> list[dict[str, Any]]:
    """All alert rules."""
    groups = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def metrics_in(expression: str) -> set[str]:
    """Names of the metrics in a PromQL expression; functions, labels and durations are not."""
    bare = _LABELS.sub(" ", _STRING.sub("", expression))
    return set(_WORD.findall(bare)) - _OPERATORS - _AGGREGATIONS
