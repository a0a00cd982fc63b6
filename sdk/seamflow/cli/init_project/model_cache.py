"""The user's folder of models that `seamflow init --model NAME` has made, each made once."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from seamflow.inspect.endpoints import UsageError
from seamflow.inspect.named_run import note


def cache_folder(variables: Mapping[str, str] = os.environ) -> Path:
    """`seamflow/models` in XDG_CACHE_HOME, or in ~/.cache where that is unset or not absolute."""
    named = Path(variables.get("XDG_CACHE_HOME", ""))
    return (named if named.is_absolute() else Path.home() / ".cache") / "seamflow" / "models"


def cached(name: str, make: Callable[[Path], Path], needed_bytes: int, folder: Path) -> Path:
    """The model `name` in the cache `folder`, made now if it is not there.

    Of processes that want it at once one makes it and the others wait. A model appears by a rename,
    whole; what a killed process left is removed by the next one.

    Args:
        make: given an empty folder to work in, returns the finished model within it.
        needed_bytes: of disk space while it is made.

    Raises:
        UsageError: the disk is full or cannot be written.
    """
    model = folder / name
    if model.is_dir():
        return model
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{name}.lock"):
            if not model.is_dir():
                _make(model, make, needed_bytes)
    except OSError as error:
        raise UsageError(
            f"the model cannot be kept in {folder}: {error}; name another folder with "
            "XDG_CACHE_HOME"
        ) from error
    return model


def _make(model: Path, make: Callable[[Path], Path], needed_bytes: int) -> None:
    part = model.with_name(f"{model.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    free = shutil.disk_usage(model.parent).free
    if free < needed_bytes:
        raise UsageError(
            f"{model.parent} has {free / 1e9:.1f} GB free, and {model.name} needs "
            f"{needed_bytes / 1e9:.1f} GB: free some, or name another folder with XDG_CACHE_HOME"
        )
    part.mkdir()
    try:
        make(part).rename(model)
    finally:
        shutil.rmtree(part, ignore_errors=True)


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold the lock; the kernel lets go of it, however this process ends."""
    with file.open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            note(f"another process makes this model ({file}); waiting for it")
            fcntl.flock(held, fcntl.LOCK_EX)
        yield
