"""Task sources, one module each."""

from __future__ import annotations

import re
from pathlib import Path

from seamflow.credentials import Credentials

from services.chassis.config.sources import nearest
from services.chassis.errors import ConfigError
from services.lib.tasks.task_rows import Row, Source

__all__ = ["Row", "Source", "is_function", "open_source"]

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def open_source(
    tasks: str,
    *,
    shuffle: bool,
    seed: int,
    credentials: Credentials | None = None,
    start_seconds: float = 60.0,
    num_heldout: int = 0,
) -> Source:
    """Open the source that `tasks` names; a file is read once, to index it.

    `credentials` and `start_seconds`, the longest wait for it, are for an environment's server,
    whose last `num_heldout` tasks are left out.

    Raises:
        ConfigError: no such file, function, dataset or environment, or an unknown file type.
        DependencyUnavailable: the environment's server does not answer.
    """
    if tasks.startswith("environment://"):
        from services.lib.tasks.sources.environment import EnvironmentSource

        address = tasks.removeprefix("environment://")
        found = EnvironmentSource.read(
            address, credentials or Credentials(), start_seconds, num_heldout
        )
        return found.ordered(shuffle=shuffle, seed=seed)
    if tasks.startswith("hf://"):
        from services.lib.tasks.sources.arrow_rows import HuggingFaceSource

        return HuggingFaceSource(tasks, shuffle=shuffle, seed=seed)
    if is_function(tasks):
        from services.lib.tasks.sources.jsonl import FunctionSource

        if shuffle:
            raise ConfigError("shuffle is set: a function gets the seed and orders its own tasks")
        return FunctionSource.load(tasks, seed=seed)
    path = Path(tasks)
    if path.suffix not in (".jsonl", ".parquet"):
        raise ConfigError(
            f'tasks {tasks!r}: give a .jsonl or .parquet file, "module:function", hf://DATASET or '
            "environment://HOST:PORT"
        )
    check_file(path)
    if path.suffix == ".parquet":
        from services.lib.tasks.sources.arrow_rows import ParquetSource

        return ParquetSource(path, shuffle=shuffle, seed=seed)
    from services.lib.tasks.sources.jsonl import JsonlSource

    return JsonlSource(path, shuffle=shuffle, seed=seed)


def check_file(path: Path) -> None:
    """Raise `ConfigError` if there is no such file of tasks; it names the one most like it."""
    if not path.is_file():
        folder = path.absolute().parent
        near = nearest(path.name, (each.name for each in folder.glob(f"*{path.suffix}")))
        raise ConfigError(f"tasks: {path.name!r} does not exist in {folder}{near}")


def is_function(tasks: str) -> bool:
    """Whether `tasks` names a function, whose tasks may have no end."""
    return _FUNCTION.fullmatch(tasks) is not None
