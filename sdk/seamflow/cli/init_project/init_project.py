"""`seamflow init FOLDER`: write a commented project that learns, of a tiny model or a real one."""

from __future__ import annotations

import argparse
import json
from importlib.resources import as_file, files
from pathlib import Path
from shutil import copyfile

from seamflow.cli.init_project.language_model import MODELS, model_folder
from seamflow.cli.parser import Verbs
from seamflow.inspect.endpoints import UsageError

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
_NEXT_MODEL = """\
{folder} holds:
  train.toml      the run: model, prompt, reward, what to expect, the settings that matter first
  tasks.jsonl     its tasks, sums; heldout.jsonl has those that it is evaluated on
the model is {model}
train it:
  cd {folder} && seamflow train"""
_MODEL = "{model}"
"""Stands in the template of train.toml."""


def register(verbs: Verbs) -> None:
    init = verbs.add_local("init", "Write a commented project that learns within minutes.", _init)
    init.add_argument("folder", type=Path, metavar="FOLDER", help="a new folder")
    known = "; ".join(f"{name}: {model.about}" for name, model in MODELS.items())
    init.add_argument(
        "--model",
        metavar="MODEL",
        help="train a language model instead of a tiny one: a Hugging Face folder, or a name, of "
        f"which the model is fetched once ({known})",
    )


def _init(given: argparse.Namespace) -> int:
    return init_project(given.folder, given.model)


def init_project(folder: Path, model: str | None = None) -> int:
    """Write a project into the new `folder`, and print what to do next.

    Args:
        model: the language model it trains, a name or a folder; None: a tiny one of its own.

    Raises:
        UsageError: the folder holds files already, or there is no such model.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} exists and is not empty: name a new folder")
    if model is None:
        _copy("template", folder)
        print(_NEXT.format(folder=folder))
        return 0
    found = model_folder(model)
    _copy("model_template", folder)
    _name_model(folder / "train.toml", found)
    print(_NEXT_MODEL.format(folder=folder, model=found))
    return 0


def _copy(template: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with as_file(files("seamflow.cli.init_project") / template) as source:
        for file in sorted(source.iterdir()):
            if file.is_file():
                copyfile(file, folder / file.name)


def _name_model(configuration: Path, model: Path) -> None:
    text = configuration.read_text(encoding="utf-8")
    # A string of JSON is one of TOML too.
    named = json.dumps(str(model), ensure_ascii=False)
    configuration.write_text(text.replace(_MODEL, named, 1), encoding="utf-8")
