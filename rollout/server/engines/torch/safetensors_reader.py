"""Read a folder of safetensors as one checkpoint, checked against the model before any change."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rollout.server.engines.engine import WeightsError

__all__ = ["Storage", "Storages", "load_checked", "storages", "weight_files"]


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
    """Its shape."""


Storages = Mapping[str, Storage]


def storages(state: Mapping[str, Tensor]) -> Storages:
    """Describe a state dict, so that checkpoints can be checked once it is gone."""
    return {name: Storage(tensor.data_ptr(), tensor.shape) for name, tensor in state.items()}


def load_checked(folder: Path, expected: Storages, dtype: torch.dtype) -> dict[str, Tensor]:
    """Read every tensor of `folder` into memory and check names and shapes.

    Tied names count as one, and any of them may be given. Raises `WeightsError`.
    """
    tensors: dict[str, Tensor] = {}
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt") as opened:
                tensors.update({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118 -- not a dict
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{file}: {error}") from error
    _check_names(folder, tensors, expected)
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            shapes = f"{list(tensor.shape)}, the model's is {list(expected[name].shape)}"
            raise WeightsError(f"{folder}: {name} has shape {shapes}")
        if not tensor.isfinite().all():
            raise WeightsError(f"{folder}: {name} has infinite or NaN values")
    return _with_ties({name: tensor.to(dtype) for name, tensor in tensors.items()}, expected)


def _check_names(folder: Path, tensors: Mapping[str, Tensor], expected: Storages) -> None:
    unexpected = sorted(tensors.keys() - expected.keys())
    if unexpected:
        raise WeightsError(f"{folder}: the model has no {_some(unexpected)}")
    given = {expected[name] for name in tensors}
    missing = sorted(name for name, storage in expected.items() if storage not in given)
    if missing:
        raise WeightsError(f"{folder}: has no {_some(missing)}")


def _with_ties(tensors: Mapping[str, Tensor], expected: Storages) -> dict[str, Tensor]:
    """Give every name of the model its tensor."""
    by_storage = {expected[name]: tensor for name, tensor in tensors.items()}
    return {name: by_storage[storage] for name, storage in expected.items()}


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
