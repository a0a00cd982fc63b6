"""Task sources, one module each."""

from __future__ import annotations

import re
from pathlib import Path

from services.chassis.errors import ConfigError
from services.dataloader.sources.base import Row, Source

__all__ = ["Row", "Source", "open_source"]

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def open_source(tasks: str, *, shuffle: bool, seed: int) -> Source:
    """Open the source that `tasks` names; a file is read once, to index it.

    Raises:
        ConfigError: no such file or function, or an unknown file type.
    """
    if _FUNCTION.fullmatch(tasks):
        from services.dataloader.sources.function import FunctionSource

        if shuffle:
            raise ConfigError("shuffle is set: a function gets the seed and orders its own tasks")
        return FunctionSource.load(tasks, seed=seed)
    path = Path(tasks)
    if path.suffix not in (".jsonl", ".parquet"):
        raise ConfigError(f'tasks {tasks!r}: give a .jsonl or .parquet file, or "module:function"')
    if not path.is_file():
        raise ConfigError(f"tasks: file {path} does not exist")
    if path.suffix == ".parquet":
        from services.dataloader.sources.parquet import ParquetSource

        return ParquetSource(path, shuffle=shuffle, seed=seed)
    from services.dataloader.sources.jsonl import JsonlSource

    return JsonlSource(path, shuffle=shuffle, seed=seed)
