"""Commands that are modules of the checkout: they take over this very process."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from seamflow.cli.endpoints import UsageError
from seamflow.user_code.user_modules import FOLDER_VARIABLE

__all__ = ["MODULES", "launch"]

MODULES: Mapping[str, tuple[str, ...]] = {
    "train": ("services.launcher",),
    "serve": ("services.launcher", "--serve"),
    "evaluate": ("services.launcher.evaluate_checkpoint",),
    "export-model": ("trainer.checkpoint.model_folder",),
}
"""Module of each command, with its first arguments."""


def launch(command: str, arguments: Sequence[str]) -> NoReturn:
    """Replace this process by the module of a command.

    The checkout is the current folder's, or the one that seamflow is installed from.

    Raises:
        UsageError: there is none.
    """
    here = Path.cwd()
    places = (here, *here.parents, Path(__file__).parents[4])
    root = next((f for f in places if (f / "services" / "launcher").is_dir()), None)
    if root is None:
        raise UsageError(
            "the processes run from a checkout, not from the wheel: go to a folder of your clone "
            "of seamflow and run the command there"
        )
    paths = [str(root), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONSAFEPATH": "1",
        FOLDER_VARIABLE: os.environ.get(FOLDER_VARIABLE) or str(here),
    }
    module, *first = MODULES[command]
    sys.stdout.flush()
    os.execve(  # noqa: S606  # the module takes over this very process, signals included
        sys.executable, [sys.executable, "-m", module, *first, *arguments], environment
    )
