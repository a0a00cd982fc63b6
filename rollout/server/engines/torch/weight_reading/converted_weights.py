"""Weights whose checkpoint names and splits them otherwise than the modules of the model.

A Mixtral's experts are three tensors each in its checkpoint, and one parameter of its modules.
transformers joins them; a folder with the names of the modules it reads too.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM

from rollout.server.engines.engine import WeightsError
from rollout.server.engines.torch.weight_reading.safetensors_reader import (
    Storages,
    is_finite,
    weight_files,
)
from services.lib.transformer.load_causal import dequantized

_LOADING = threading.Lock()
"""Held while transformers loads a model, which changes state that all threads share."""


def has_module_names(folder: Path, expected: Storages) -> bool:
    """Whether a checkpoint has the names of the model's state dict, or all of them and more.

    Raises `WeightsError`: a file cannot be read.
    """
    names: set[str] = set()
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt") as opened:
                names.update(opened.keys())
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{file}: {error}") from error
    given = {storage for name, storage in expected.items() if name in names}
    return names <= expected.keys() or given == set(expected.values())


def load_converted(folder: Path, expected: Storages, dtype: torch.dtype) -> dict[str, Tensor]:
    """As `CheckedTensors`, through transformers. Raises `WeightsError`."""
    weight_files(folder)
    with _LOADING:
        state, missing, unexpected = _load(folder)
    if missing:
        raise WeightsError(f"{folder}: has no {', '.join(sorted(missing)[:3])}")
    if unexpected:
        raise WeightsError(f"{folder}: the model has no {', '.join(sorted(unexpected)[:3])}")
    for name, tensor in state.items():
        if name not in expected or tensor.shape != expected[name].shape:
            raise WeightsError(f"{folder}: {name} is not of this model, or has another shape")
        if not is_finite(tensor):
            raise WeightsError(f"{folder}: {name} has infinite or NaN values")
    return {name: _as(tensor, dtype) for name, tensor in state.items()}


def _load(folder: Path) -> tuple[dict[str, Tensor], set[str], set[str]]:
    """The state dict, the names that the folder lacks, and those that the model lacks."""
    try:
        # float32, which is the default: for any other type transformers changes the default of all
        # threads while it loads.
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            **dequantized(folder),
        )
    except (SafetensorError, OSError, ValueError, RuntimeError, KeyError) as error:
        raise WeightsError(f"{folder}: {' '.join(str(error).split())}") from error
    model, found = loaded
    return model.state_dict(), set(found["missing_keys"]), set(found["unexpected_keys"])


def _as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
