"""Merges a published LoRA adapter into the base model's weights, for any engine.

    W + (alpha / r) B A        A [r, in], B [out, r], Low-Rank Adaptation (arXiv 2106.09685)

W is from the model folder that this server started from, which must equal the trainer's.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.server.engines.engine import WeightsError
from services.lib.weight_files.folder_names import ADAPTER_BASE, COPIED_SUFFIXES, fingerprint

if TYPE_CHECKING:
    from torch import Tensor

MERGED_DIR = "merged"
"""Subfolder of an adapter's folder that the engine loads."""
_SETTINGS = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."


def is_adapter(files: Sequence[Path]) -> bool:
    """Whether files of a version are those of an adapter, which are merged once all are there."""
    return any(file.name in (_SETTINGS, _WEIGHTS) for file in files)


def merge_lora(folder: Path, model: Path) -> Path:
    """Return a folder with all weights: `folder`, or its merged subfolder if it holds an adapter.

    Raises:
        WeightsError: the adapter is unsupported or of another model, or the disk is full.
    """
    if not (folder / _SETTINGS).exists():
        return folder
    merged = folder / MERGED_DIR
    if not merged.exists():
        try:
            _check_base(folder, model)
            _merge(folder, model, merged)
        except OSError as error:
            raise WeightsError(f"{merged}: {error}; check its disk") from error
        except (ValueError, KeyError) as error:
            raise WeightsError(f"{folder}: unknown layout of an adapter: {error}") from error
    return merged


def _check_base(folder: Path, model: Path) -> None:
    expected = json.loads((folder / ADAPTER_BASE).read_text())["fingerprint"]
    if expected != fingerprint(model):
        raise WeightsError(
            f"{folder}: the adapter belongs to other weights than {model}: start trainer and "
            "rollout servers from copies of the same model folder"
        )


def _merge(folder: Path, model: Path, merged: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=f"{MERGED_DIR}.", dir=folder) as name:
        partial = Path(name) / MERGED_DIR
        partial.mkdir()
        for path in model.iterdir():
            if path.is_file() and path.suffix in COPIED_SUFFIXES:
                shutil.copyfile(path, partial / path.name)
        _write_weights(folder, model, partial)
        if not merged.exists():  # a cancelled call may have continued in its thread
            partial.rename(merged)


def _write_weights(folder: Path, model: Path, target: Path) -> None:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file, save_file
    except ImportError as error:
        raise WeightsError(
            f"{folder}: merging an adapter needs torch: install torch in this "
            'server\'s environment, or let the trainer publish = "weights"'
        ) from error
    scale = _scale(folder)
    try:
        parts = load_file(folder / _WEIGHTS)
        for file in sorted(model.glob("*.safetensors")):
            tensors = load_file(file)
            for name in tensors.keys() & _adapted(parts):
                tensors[name] = _sum(tensors[name], _pop(parts, name), scale, f"{folder}: {name}")
            save_file(tensors, target / file.name, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from error
    if parts:
        raise WeightsError(f"{folder}: {model} has no weight for {min(parts)}: it is another model")


def _scale(folder: Path) -> float:
    settings: dict[str, Any] = json.loads((folder / _SETTINGS).read_text())
    special = [key for key in ("use_dora", "use_rslora", "fan_in_fan_out") if settings.get(key)]
    if settings.get("peft_type") != "LORA" or special:
        raise WeightsError(f"{folder}: not a plain LoRA adapter: {special or settings}")
    return float(settings["lora_alpha"]) / int(settings["r"])


def _adapted(parts: Mapping[str, Tensor]) -> set[str]:
    """Names of the model's weights that have an adapter."""
    layers = (name.removeprefix(_PREFIX).rsplit(".lora_", 1)[0] for name in parts)
    return {f"{layer}.weight" for layer in layers}


def _pop(parts: dict[str, Tensor], name: str) -> tuple[Tensor, Tensor]:
    layer = f"{_PREFIX}{name.removesuffix('.weight')}"
    try:
        return parts.pop(f"{layer}.lora_A.weight"), parts.pop(f"{layer}.lora_B.weight")
    except KeyError as error:
        raise WeightsError(f"the adapter has no {error}: it is damaged") from error


def _sum(weight: Tensor, adapter: tuple[Tensor, Tensor], scale: float, what: str) -> Tensor:
    a, b = (part.double() for part in adapter)
    if weight.shape != (len(b), a.shape[1]):
        shapes = f"{len(b)} x {a.shape[1]}, the model's is {list(weight.shape)}"
        raise WeightsError(f"{what}: the adapter is for {shapes}: it is of another model")
    return (weight.double() + scale * (b @ a)).to(weight.dtype)
