"""Whatever a suite runs can be imported: what a rename breaks is noticed the same day."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from tools.suites.passes import suites

ROOT = next(each for each in Path(__file__).parents if (each / "pyproject.toml").exists())
_MODULE = re.compile(r"\$\((?:RUN|CONTAINED)\) (?!pytest)([a-z_.]+)")


def recipe(target: str) -> str:
    """The lines of a target of the Makefile."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    found = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", text, flags=re.MULTILINE)
    assert found, target
    return found[1]


@pytest.mark.parametrize("name", [suite.name for suite in suites(ROOT)])
def test_the_module_of_a_suite_can_be_imported(name: str) -> None:
    """With the names that it takes from the product; a suite of pytest names files that exist."""
    modules = _MODULE.findall(recipe(name))
    for module in modules:
        is_package = (ROOT / module.replace(".", "/")).is_dir()
        importlib.import_module(f"{module}.__main__" if is_package else module)
    assert modules or "pytest" in recipe(name)
