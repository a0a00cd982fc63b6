"""Modules of a user's project: imported when the configuration names them, and only then.

`seamflow train` starts its processes without the user's folder among the places that Python
imports from, so that a file there called trainer.py or queue.py is never taken for one of ours or
of Python's. `python -m seamflow.user_code.user_modules NAME …` runs such a module as a program.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import runpy
import sys
from importlib.machinery import PathFinder
from types import ModuleType

FOLDER_VARIABLE = "SEAMFLOW_USER_FOLDER"
"""Environment variable with the folder; without it modules are imported as usual."""


def import_user_module(name: str) -> ModuleType:
    """Import a module that the configuration names: that of the user's folder, if it has it.

    What the module imports in turn comes from there last.

    Raises:
        ModuleNotFoundError: there is none.
        ValueError: this process has loaded another module of that name, or of its package's.
    """
    folder = os.environ.get(FOLDER_VARIABLE, "")
    if folder:
        _prefer(folder, name.partition(".")[0])
    return importlib.import_module(name)


def _prefer(folder: str, top: str) -> None:
    """Make `top` the module or package of this name in the folder, if there is one."""
    if folder not in sys.path:
        sys.path.append(folder)
    spec = PathFinder.find_spec(top, [folder])
    if spec is None or spec.loader is None:
        return
    loaded = sys.modules.get(top)
    if loaded is None:
        module = sys.modules[top] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    elif getattr(loaded.__spec__, "origin", None) != spec.origin:
        raise ValueError(
            f"{spec.origin} has the name of a module that this process needs: rename it"
        )


def main() -> None:
    """Run a module of the user's folder as `python -m` does."""
    del sys.argv[0]
    folder = os.environ.get(FOLDER_VARIABLE, "")
    if folder and folder not in sys.path:
        sys.path.append(folder)
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
