"""Commands that are modules of the services: they take over this very process."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from seamflow.cli.parser import Verbs
from seamflow.inspect.endpoints import UsageError
from seamflow.installation import find_services, how_to_install, missing_packages
from seamflow.user_code.user_modules import FOLDER_VARIABLE

_WHOLE = "quickstart"
"""The extra of everything that a run on one machine starts."""


@dataclass(frozen=True, slots=True)
class ServiceModule:
    """What carries a command out."""

    name: str
    about: str
    needs: str
    """The extra that it cannot be imported without."""
    first: tuple[str, ...] = ()
    """Its first arguments."""
    install: str = _WHOLE
    """The extra to install where something is missing."""


MODULES: Mapping[str, ServiceModule] = {
    "train": ServiceModule("services.launcher", "Train by a configuration file.", "launcher"),
    "serve": ServiceModule(
        "services.launcher",
        "Keep the processes for agents elsewhere, until Ctrl-C.",
        "launcher",
        ("--serve",),
    ),
    "console": ServiceModule(
        "services.console",
        "Show a run, or a finished run's folder, in a browser.",
        "console",
        (),
        "console",
    ),
    "join": ServiceModule(
        "services.launcher.hosts",
        "Start this host's part of a run that began on another host.",
        "launcher",
    ),
    "slurm": ServiceModule(
        "services.launcher.hosts.slurm",
        "Write the batch script of a run for a Slurm cluster.",
        "launcher",
    ),
    "evaluate": ServiceModule(
        "services.launcher.evaluate_checkpoint",
        "Run tasks with a checkpoint, without training.",
        "launcher",
    ),
    "export-model": ServiceModule(
        "trainer.checkpoint.model_folder",
        "Write a checkpoint as a plain Hugging Face folder.",
        "trainer",
        (),
        "trainer",
    ),
    "backup": ServiceModule(
        "tools.backup", "Save runs while they go on, or restore them.", "trainer", (), "trainer"
    ),
    "plan": ServiceModule(
        "tools.plan", "Say what a run needs, takes and costs, and how to split its nodes.", _WHOLE
    ),
}
"""Module of each command."""


def register(verbs: Verbs) -> None:
    """Add the verbs for the help: `launch` takes them before they are parsed."""
    for name, module in MODULES.items():
        verbs.add_module(name, module.about)


def launch(command: str, arguments: Sequence[str]) -> NoReturn:
    """Replace this process by the module of a command.

    Raises:
        UsageError: the services, or packages that they need, are not installed.
    """
    module = MODULES[command]
    root = find_services()
    if root is None:
        raise UsageError(
            "this installation of seamflow has no services: install the wheel, or go to a folder "
            "of your clone of seamflow and run the command there"
        )
    if missing := missing_packages(module.needs):
        raise UsageError(how_to_install(f"seamflow {command}", missing, module.install))
    sys.stdout.flush()
    os.execve(  # noqa: S606  # the module takes over this very process, signals included
        sys.executable,
        [sys.executable, "-m", module.name, *module.first, *arguments],
        _environment(root),
    )


def _environment(root: Path) -> dict[str, str]:
    """This process's own, in which modules come from `root`, never from the current folder."""
    paths = [str(root), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONSAFEPATH": "1",
        FOLDER_VARIABLE: os.environ.get(FOLDER_VARIABLE) or str(Path.cwd()),
    }
