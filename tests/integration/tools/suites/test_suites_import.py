"""Whatever a suite or bench runs can be imported: what a rename breaks is noticed the same day."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from tools.suites.passes import Suite, benches, suites

ROOT = next(each for each in Path(__file__).parents if (each / "pyproject.toml").exists())
_MODULE = re.compile(r"python3? -m (?!pytest|pip|services)([a-z_.]+)")


@pytest.mark.parametrize("suite", [*suites(ROOT), *benches(ROOT)], ids=lambda suite: suite.name)
def test_what_is_run_can_be_imported(suite: Suite) -> None:
    """With the names that it takes from the product; a suite of pytest names files that exist."""
    modules = _MODULE.findall(suite.run)
    for module in modules:
        is_package = (ROOT / module.replace(".", "/")).is_dir()
        importlib.import_module(f"{module}.__main__" if is_package else module)
    assert modules or "pytest" in suite.run or "services.launcher" in suite.run
