"""The folder of a weight version, as the trainer writes it: a Hugging Face model, or an adapter.

weight_v000012/config.json, tokenizer ...       weight_v000012/adapter_config.json, base.json
               model.safetensors, or several                   adapter_model.safetensors
               manifest.json                                   manifest.json
               .complete                                       .complete
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from seamflow.weights.v1 import weight_service_pb2 as weight_pb2

from services.lib.model_files.quantization import QUANTIZATION_FILES, without_quantization
from services.lib.weight_files.folder_names import ADAPTER_BASE, COPIED_SUFFIXES, fingerprint
from trainer import fsync_files
from trainer.config import Setting

__all__ = ["weight_digests", "write_folder"]

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_ADAPTER_SETTINGS, _ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_MANIFEST = "manifest.json"
_OF_WEIGHTS = frozenset({_MANIFEST, *QUANTIZATION_FILES})
"""Files about the weights of a folder, which are others in the next."""
_FILE_BYTES = 4 << 30


def write_folder(
    folder: Path,
    model_folder: Path,
    tensors: Mapping[str, torch.Tensor],
    adapter: Mapping[str, Setting] | None = None,
    durable: bool = True,
) -> list[weight_pb2.WeightFile]:
    """Write a complete folder; its files with checksums.

    Args:
        folder: to create.
        model_folder: with configuration and tokenizer.
        tensors: by name.
        adapter: settings, if the tensors are an adapter; None: they are whole weights.
        durable: make the files durable and mark the folder complete; False: it is only read by this
            process, which uploads the files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if adapter is None:
        _copy_settings(model_folder, folder, next(iter(tensors.values())).dtype)
        _write_weights(folder, tensors)
    else:
        _write_adapter(folder, model_folder, tensors, adapter)
    # Hidden files are the probes of a folder shared with the weights service.
    paths = [path for path in sorted(folder.iterdir()) if path.name[0] != "."]
    files = [_described(path) for path in paths if path.name != _MANIFEST]
    if durable:
        for file in files:
            fsync_files.sync(folder / file.name)
        entries = [{"name": f.name, "num_bytes": f.num_bytes, "sha256": f.sha256} for f in files]
        fsync_files.write_json(folder / _MANIFEST, {"files": entries})
        fsync_files.write_marker(folder)
    return files


def weight_digests(tensors: Mapping[str, torch.Tensor], *, adapter: bool) -> dict[str, str]:
    """SHA-256 of each file of tensors that `write_folder` would write, by name; nothing is written.

    Args:
        tensors: by name.
        adapter: they are an adapter.
    """
    files = [(_ADAPTER_WEIGHTS, tensors)] if adapter else _weight_files(tensors)
    return {name: fsync_files.tensors_digest(part) for name, part in files}


def _write_adapter(
    folder: Path,
    model_folder: Path,
    tensors: Mapping[str, torch.Tensor],
    settings: Mapping[str, Setting],
) -> None:
    layers = {name.rpartition(".lora_")[0].rpartition(".")[2] for name in tensors}
    _write_json(folder / _ADAPTER_SETTINGS, {**settings, "target_modules": sorted(layers)})
    _write_json(folder / ADAPTER_BASE, {"fingerprint": fingerprint(model_folder)})
    fsync_files.save_tensors(folder / _ADAPTER_WEIGHTS, tensors)


def _copy_settings(source: Path, target: Path, dtype: torch.dtype) -> None:
    """Copy configuration and tokenizer files; no weights, no code."""
    for path in sorted(source.iterdir()):
        of_weights = path.name.endswith(".index.json") or path.name in _OF_WEIGHTS
        if path.is_file() and path.suffix in COPIED_SUFFIXES and not of_weights:
            shutil.copyfile(path, target / path.name)
    config = without_quantization(json.loads((source / "config.json").read_text()))
    name = "torch_dtype" if "torch_dtype" in config else "dtype"
    config[name] = str(dtype).removeprefix("torch.")
    _write_json(target / "config.json", config)


def _write_weights(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    files = _weight_files(tensors)
    for name, part in files:
        fsync_files.save_tensors(folder / name, part)
    if len(files) == 1:
        return
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": {key: name for name, part in files for key in part},
    }
    _write_json(folder / _INDEX, index)


def _weight_files(tensors: Mapping[str, torch.Tensor]) -> list[tuple[str, dict[str, torch.Tensor]]]:
    """Name and tensors of each file."""
    parts = list(_parts(tensors))
    if len(parts) == 1:
        return [(_WEIGHTS, parts[0])]
    names = (f"model-{n:05d}-of-{len(parts):05d}.safetensors" for n in range(1, len(parts) + 1))
    return list(zip(names, parts, strict=True))


def _parts(tensors: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    part: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if part and size + tensor.nbytes > _FILE_BYTES:
            yield part
            part, size = {}, 0
        part[name] = tensor
        size += tensor.nbytes
    yield part


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1))


def _described(path: Path) -> weight_pb2.WeightFile:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return weight_pb2.WeightFile(name=path.name, num_bytes=path.stat().st_size, sha256=digest)
