"""Import every module of some packages; print what they, or modules of ours, name in vain.

`python import_all.py OPTIONAL PACKAGE …`: comma-separated names that may be missing, then packages
or modules; "-NAME" leaves out what begins so.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType


def main() -> None:
    """Each missing name, with the first module that imports it, somewhere in its text."""
    optional = set(sys.argv[1].split(","))
    left_out = tuple(each[1:] for each in sys.argv[2:] if each.startswith("-"))
    for name in (each for each in sys.argv[2:] if not each.startswith("-")):
        _import(importlib.import_module(name), left_out)
    missing = {
        name: module.__name__
        for module in list(sys.modules.values())
        if "_services" in (getattr(module, "__file__", None) or "")
        and not module.__name__.startswith(left_out or "-")
        for name in _imported(module)
        if name not in optional and not _is_there(name)
    }
    print("\n".join(f"{name} of {module}" for name, module in sorted(missing.items())), end="")


def _import(package: ModuleType, left_out: tuple[str, ...]) -> None:
    for found in pkgutil.walk_packages(getattr(package, "__path__", ()), f"{package.__name__}."):
        if not found.name.endswith("__main__") and not found.name.startswith(left_out or "-"):
            importlib.import_module(found.name)


def _imported(module: ModuleType) -> Iterator[str]:
    for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def _is_there(name: str) -> bool:
    return name in sys.modules or importlib.util.find_spec(name) is not None


if __name__ == "__main__":
    main()
