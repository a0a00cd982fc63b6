"""docs/adapters.md: its configurations name classes and arguments that exist."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from services.launcher.config import LauncherConfig

ROOT = Path(__file__).parents[4]
PAGE = (ROOT / "docs" / "adapters.md").read_text(encoding="utf-8")
ADAPTERS = sorted(file.parent.name for file in (ROOT / "adapters").glob("*/requirements.txt"))
TABLES = [tomllib.loads(text)["launcher"] for text in re.findall(r"```toml\n(.*?)```", PAGE, re.S)]


def parameters(name: str) -> set[str]:
    """Of the constructor of "package.module:Class", whose framework is not installed here."""
    module, _, class_name = name.partition(":")
    tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
    (found,) = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == class_name]
    (made,) = [n for n in found.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
    return {each.arg for each in (*made.args.args[1:], *made.args.kwonlyargs)}


def unknown_arguments(table: dict[str, Any]) -> set[str]:
    """Arguments that the class does not take."""
    return set(table["environment_arguments"]) - parameters(table["environment"])


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table["environment_python"])
def test_a_configuration_works_when_copied(table: dict[str, Any]) -> None:
    """The launcher takes it, and the class its arguments; the venv is the adapter's."""
    config = LauncherConfig(name="run", model="model", **table)
    assert config.runs_environment
    assert unknown_arguments(table) == set()
    adapter = table["environment"].split(".")[1]
    assert table["environment_python"] == f".venv-adapters/{adapter}/bin/python"


def test_each_adapter_has_a_configuration_and_a_line() -> None:
    """And no other has one."""
    assert sorted(table["environment"].split(".")[1] for table in TABLES) == ADAPTERS
    for adapter in ADAPTERS:
        assert f"[{adapter}](../adapters/{adapter}/environment.py)" in PAGE


def test_an_unknown_argument_is_noticed() -> None:
    """Negative control."""
    assert unknown_arguments({**TABLES[0], "environment_arguments": {"env": "x"}}) == {"env"}
