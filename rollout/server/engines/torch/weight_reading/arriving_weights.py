"""Weights of the next version, read and converted file by file while the rest arrives."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rollout.server.engines.engine import WeightsError
from rollout.server.engines.torch.weight_reading.safetensors_reader import (
    WeightReader,
    weight_files,
)

_Identity = tuple[int, int, int, int]
"""Device, inode, size and time of change: a file that is moved keeps them."""


class ArrivingWeights:
    """At most one version, which nothing uses before `take` has found all its files the same.

    Host memory: the weights, and the tensors of layers that are not complete, which are those of
    two files at most where layers follow each other. Thread-safe; all calls block.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reader: WeightReader | None = None
        self._files: dict[str, _Identity] = {}

    def add(self, begin: Callable[[], WeightReader], files: Sequence[Path]) -> None:
        """Read what is new of `files`, which are all files so far of the next version.

        Begins again if those that were read are not among them. A file that has been moved away is
        left to `take`. Raises `WeightsError`, after which nothing is held.
        """
        with self._lock, suppress(FileNotFoundError):
            if not self._are_among(files):
                self._clear()
            self._reader = self._reader or begin()
            try:
                self._add(self._reader, files)
            except WeightsError:
                self._clear()
                raise

    def take(self, folder: Path) -> Any | None:
        """All of `folder`, its other files read now; None if nothing of it could be read before."""
        with self._lock:
            try:
                files = weight_files(folder)
                if self._reader is None or not self._are_among(files):
                    return None
                self._add(self._reader, files)
                return self._reader.complete(folder)
            except (WeightsError, OSError):
                return None  # who reads it from its beginning can say what is wrong, if anything is
            finally:
                self._clear()

    def clear(self) -> None:
        """Free the memory."""
        with self._lock:
            self._clear()

    def _clear(self) -> None:
        self._reader, self._files = None, {}

    def _add(self, reader: WeightReader, files: Sequence[Path]) -> None:
        for file in files:
            identity = _identity(file)
            if self._files.get(file.name) != identity:
                reader.add(file)
                self._files[file.name] = identity

    def _are_among(self, files: Sequence[Path]) -> bool:
        given = {file.name: _identity(file) for file in files}
        return self._files.items() <= given.items()


def _identity(file: Path) -> _Identity:
    found = file.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
