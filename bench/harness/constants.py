"""Limits that a test or a bench changes, here or in a process that it starts.

`python -m bench.harness.constants MODULE` runs a module with those that CHANGED_CONSTANTS holds as
JSON, {"package.module": {"NAME": value}}.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

VARIABLE = "CHANGED_CONSTANTS"


@contextmanager
def changed(module: str, values: Mapping[str, Any]) -> Iterator[None]:
    """Constants of a module by name, in either case, while the block runs.

    Raises:
        AttributeError: the module has no such constant.
    """
    found = importlib.import_module(module)
    before = {name.upper(): getattr(found, name.upper()) for name in values}
    for name, value in values.items():
        setattr(found, name.upper(), value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(found, name, value)


def split(module: str, given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings among `given`, and those that name a constant of the module."""
    names = {name.lower() for name in vars(importlib.import_module(module)) if name.isupper()}
    settings = {name: value for name, value in given.items() if name not in names}
    return settings, {name: value for name, value in given.items() if name in names}


def main() -> None:
    """Change them, and run the module of the command line."""
    for module, values in json.loads(os.environ[VARIABLE]).items():
        found = importlib.import_module(module)
        for name, value in values.items():
            getattr(found, name)  # an unknown one ends the process
            setattr(found, name, value)
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
