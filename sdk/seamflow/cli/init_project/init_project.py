"""`seamflow init FOLDER`: write a commented project that learns within minutes."""

from __future__ import annotations

import argparse
from importlib.resources import as_file, files
from pathlib import Path
from shutil import copyfile

from seamflow.cli.arguments.verbs import Verbs
from seamflow.cli.endpoints import UsageError

__all__ = ["init_project", "register"]

_NEXT = """\
{folder} holds:
  README.md       what it does, what comes out, how to make it yours
  train.toml      the run: model, tasks, agent, and the settings that matter first
  agent.py        the agent and its reward
  tasks.jsonl     its tasks; heldout.jsonl has those that it is evaluated on
  tiny_model.py   makes a tiny model, until you give your own
  test_agent.py   tests of the agent without a model
train it:
  cd {folder} && seamflow train"""


def register(verbs: Verbs) -> None:
    """Add `seamflow init`."""
    init = verbs.add_local("init", "Write a commented project that learns within minutes.", _init)
    init.add_argument("folder", type=Path, metavar="FOLDER", help="a new folder")


def _init(given: argparse.Namespace) -> int:
    return init_project(given.folder)


def init_project(folder: Path) -> int:
    """Write the project into the new `folder`, and print what to do next.

    Raises:
        UsageError: it holds files already.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} exists and is not empty: name a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    with as_file(files("seamflow.cli.init_project") / "template") as template:
        for file in sorted(template.iterdir()):
            if file.is_file():
                copyfile(file, folder / file.name)
    print(_NEXT.format(folder=folder))
    return 0
