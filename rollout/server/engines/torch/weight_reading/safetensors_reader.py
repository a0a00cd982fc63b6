"""Read a folder of safetensors as one checkpoint, checked against the model before any change."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rollout.server.engines.engine import WeightsError


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of `folder`. Raises `WeightsError` if one or all are missing."""
    if not folder.is_dir():
        raise WeightsError(f"{folder}: no such folder")
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise WeightsError(f"{folder}: no *.safetensors file")
        return files
    files = sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
    for file in files:
        if not file.exists():
            raise WeightsError(f"{folder}: {index.name} names {file.name}, which is missing")
    return files


@dataclass(frozen=True, slots=True)
class Storage:
    """What a name of a model's state dict stands for; tied names stand for the same."""

    number: int
    """Equal for names that share their memory."""
    shape: torch.Size


Storages = Mapping[str, Storage]


def storages(state: Mapping[str, Tensor]) -> Storages:
    """Describe a state dict, so that checkpoints can be checked once it is gone."""
    return {name: Storage(tensor.data_ptr(), tensor.shape) for name, tensor in state.items()}


class WeightReader(Protocol):
    """Reads one version, file by file; a file or version that is refused raises `WeightsError`."""

    def add(self, file: Path) -> None:
        """Read a file; of one that is refused nothing is kept."""
        ...

    def complete(self, folder: Path) -> Any:
        """What a model can use, once all files of `folder` are read."""
        ...


def read_folder(reader: WeightReader, folder: Path) -> Any:
    """Read all files of `folder`. Raises `WeightsError`."""
    for file in weight_files(folder):
        reader.add(file)
    return reader.complete(folder)


class CheckedTensors:
    """A `WeightReader` that checks names, shapes and numbers, and gives every name its tensor.

    Tied names count as one, and any of them may be given.
    """

    def __init__(self, expected: Storages, dtype: torch.dtype) -> None:
        """`expected` are the model's names; tensors are converted to `dtype`."""
        self.held: dict[str, Tensor] = {}
        """What is read; who takes a tensor out has it for itself."""
        self._expected, self._dtype = expected, dtype
        self._given: set[Storage] = set()

    def add(self, file: Path) -> None:
        """Read a file."""
        try:
            with safe_open(file, framework="pt") as opened:
                names = list(opened.keys())
                self._check_names(file, names)
                read = {name: self._checked(file, name, opened.get_tensor(name)) for name in names}
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{file}: {error}") from error
        self.held.update(read)
        self._given.update(self._expected[name] for name in read)

    def complete(self, folder: Path) -> dict[str, Tensor]:
        """Every name of the model with its tensor, but for those that were taken out."""
        expected = self._expected
        if missing := sorted(name for name, one in expected.items() if one not in self._given):
            raise WeightsError(f"{folder}: has no {_some(missing)}")
        by_storage = {expected[name]: tensor for name, tensor in self.held.items()}
        return {n: by_storage[one] for n, one in expected.items() if one in by_storage}

    def _check_names(self, file: Path, names: list[str]) -> None:
        if unexpected := sorted(set(names) - self._expected.keys()):
            raise WeightsError(f"{file}: the model has no {_some(unexpected)}")

    def _checked(self, file: Path, name: str, tensor: Tensor) -> Tensor:
        expected = self._expected[name]
        if tensor.shape != expected.shape:
            shapes = f"{list(tensor.shape)}, the model's is {list(expected.shape)}"
            raise WeightsError(f"{file}: {name} has shape {shapes}")
        if not is_finite(tensor):
            raise WeightsError(f"{file}: {name} has infinite or NaN values")
        return tensor.to(self._dtype)


def is_finite(tensor: Tensor) -> bool:
    """Whether a tensor has no infinite and no NaN value.

    Its extremes tell, as one NaN makes both NaN: on the CPU twenty times as fast as `isfinite`, and
    without a copy.
    """
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    return all(extreme.isfinite() for extreme in tensor.aminmax())


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
