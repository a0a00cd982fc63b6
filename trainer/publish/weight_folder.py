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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from seamflow.weights.v1 import weight_service_pb2 as weight_pb2

from services.lib.model_files.json_file import read_object
from services.lib.model_files.quantization import QUANTIZATION_FILES, without_quantization
from services.lib.weight_files.folder_names import (
    ADAPTER_BASE,
    COPIED_SUFFIXES,
    fingerprint,
    folder_name,
    versions_in,
)
from trainer import fsync_files
from trainer.config import Setting
from trainer.model.lora import layer_names
from trainer.publish.bucket_plan import BucketPlan, plan_buckets, whole_tensors

_CONFIG, _TOKENIZER = "config.json", "tokenizer_config.json"
_TEMPLATE = "chat_template.jinja"
_INDEX = "model.safetensors.index.json"
_ADAPTER_SETTINGS = "adapter_config.json"
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
    """Write a complete folder of tensors that this process has; its files with checksums.

    Args:
        folder: to create.
        model_folder: with configuration and tokenizer.
        tensors: by the names in a model folder.
        adapter: settings, if the tensors are an adapter; None: they are whole weights.
        durable: make the files durable and mark the folder complete.
    """
    plan = plan_buckets(whole_tensors(tensors), dict, _FILE_BYTES, adapter=adapter is not None)
    files = write_settings(folder, model_folder, plan, adapter)
    for bucket in plan.buckets:
        part = {source.name: tensors[source.name] for source in bucket.sources}
        files.append(write_weights(folder / bucket.file, part, durable=durable))
    if durable:
        seal(folder, files)
    return files


def write_settings(
    folder: Path, model_folder: Path, plan: BucketPlan, adapter: Mapping[str, Setting] | None
) -> list[weight_pb2.WeightFile]:
    """Write all files of a folder but the weights; see `write_folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    if adapter is None:
        names = [*_copy_settings(model_folder, folder, plan.sources[0].dtype)]
        if plan.index is not None:
            _write_json(folder / _INDEX, plan.index)
            names.append(_INDEX)
    else:
        names = [*_write_adapter(folder, model_folder, plan, adapter)]
    return [_described(folder / name) for name in names]


def write_weights(
    path: Path, tensors: Mapping[str, torch.Tensor], *, durable: bool
) -> weight_pb2.WeightFile:
    """Write a file of tensors, whose checksum is computed meanwhile; it appears when it is whole.

    Raises:
        OSError: it cannot be written.
    """
    unnamed = path.with_name(f".{path.name}.partial")
    try:
        digest = fsync_files.save_tensors(unnamed, tensors)
        if durable:
            fsync_files.sync(unnamed)
        unnamed.rename(path)
    except OSError:
        unnamed.unlink(missing_ok=True)  # it would keep a full disk full
        raise
    size = path.stat().st_size
    return weight_pb2.WeightFile(name=path.name, num_bytes=size, sha256=digest)


def seal(folder: Path, files: Sequence[weight_pb2.WeightFile]) -> None:
    """Make a folder durable whose weights are, and mark it complete."""
    for file in files:
        fsync_files.sync(folder / file.name)
    entries = [{"name": f.name, "num_bytes": f.num_bytes, "sha256": f.sha256} for f in files]
    fsync_files.write_json(folder / _MANIFEST, {"files": entries})
    fsync_files.write_marker(folder)


def forget_versions(folder: Path, version: int) -> None:
    """Delete what this and earlier versions left in `folder`; a newer trainer's is newer."""
    for old in versions_in(folder):
        if old <= version:
            shutil.rmtree(folder / folder_name(old), ignore_errors=True)


def _write_adapter(
    folder: Path, model_folder: Path, plan: BucketPlan, settings: Mapping[str, Setting]
) -> Iterator[str]:
    layers = layer_names(source.name for source in plan.sources)
    _write_json(folder / _ADAPTER_SETTINGS, {**settings, "target_modules": layers})
    yield _ADAPTER_SETTINGS
    _write_json(folder / ADAPTER_BASE, {"fingerprint": fingerprint(model_folder)})
    yield ADAPTER_BASE


def _copy_settings(source: Path, target: Path, dtype: torch.dtype) -> Iterator[str]:
    """Copy configuration and tokenizer files; no weights, no code. Their names."""
    templates = _named_templates(source)
    for path in sorted(source.iterdir()):
        of_weights = path.name.endswith(".index.json") or path.name in _OF_WEIGHTS
        if templates and path.name in (_TEMPLATE, _TOKENIZER):
            continue
        if path.is_file() and path.suffix in COPIED_SUFFIXES and not of_weights:
            shutil.copyfile(path, target / path.name)
            if path.name != _CONFIG:
                yield path.name
    if templates:
        settings = read_object(source, _TOKENIZER)
        _write_json(target / _TOKENIZER, {**settings, "chat_template": templates})
        yield _TOKENIZER
    config = without_quantization(json.loads((source / _CONFIG).read_text()))
    name = "torch_dtype" if "torch_dtype" in config else "dtype"
    config[name] = str(dtype).removeprefix("torch.")
    _write_json(target / _CONFIG, config)
    yield _CONFIG


def _named_templates(source: Path) -> list[dict[str, str]]:
    """Several chat templates as tokenizer_config.json has them; a folder of a version is flat."""
    found = {path.stem: path for path in sorted(source.glob("additional_chat_templates/*.jinja"))}
    if found and (source / _TEMPLATE).is_file():
        found = {"default": source / _TEMPLATE, **found}
    return [
        {"name": name, "template": path.read_text(encoding="utf-8")} for name, path in found.items()
    ]


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1))


def _described(path: Path) -> weight_pb2.WeightFile:
    data = path.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    return weight_pb2.WeightFile(name=path.name, num_bytes=len(data), sha256=digest)
