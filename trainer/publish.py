"""Publish weights in two phases: write a Hugging Face folder durably, then commit its checksums.

BEGUN (version and folder allocated) -> DURABLE (files, manifest.json, .complete) -> COMMITTED
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import grpc.aio
import torch
from seamflow.errors import NotFoundError
from seamflow.weights.v1 import weight_service_pb2 as weight_pb2
from seamflow.weights.v1 import weight_service_pb2_grpc as weight_grpc

from trainer import durable
from trainer.peers import persistently

__all__ = ["Publisher", "write_folder"]

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_MANIFEST = "manifest.json"
_FILE_BYTES = 4 << 30
_COPIED_SUFFIXES = {".json", ".txt", ".model", ".jinja", ".tiktoken"}


class Publisher:
    """The WeightService of one run, and the folder its first model came from."""

    def __init__(self, channel: grpc.aio.Channel, run_id: str, model_folder: Path) -> None:
        # The generated constructor is typed for blocking channels.
        self._stub: weight_grpc.WeightServiceAsyncStub = weight_grpc.WeightServiceStub(channel)  # type: ignore[assignment]
        self._run_id = run_id
        self._model_folder = model_folder

    async def newest(self) -> weight_pb2.Manifest | None:
        """The newest committed version; None if nothing was published yet."""
        request = weight_pb2.GetManifestRequest(run_id=self._run_id)
        try:
            response = await persistently("GetManifest", lambda: self._stub.GetManifest(request))
        except NotFoundError:
            return None
        return response.manifest if response.HasField("manifest") else None

    async def publish(
        self, tensors: Mapping[str, torch.Tensor], *, step: int, parent: int, epoch: int
    ) -> int:
        """Publish the weights that optimizer step `step` made from version `parent`; their version.

        Another epoch is another publish: after a crash the same step may give other weights.
        """
        begin = weight_pb2.BeginPublishRequest(
            run_id=self._run_id,
            step=step,
            parent_weight_version=parent,
            epoch=epoch,
            idempotency_key=f"step-{step}-epoch-{epoch}",
        )
        begun = await persistently("BeginPublish", lambda: self._stub.BeginPublish(begin))
        files = await asyncio.to_thread(
            write_folder, Path(begun.folder), self._model_folder, tensors
        )
        commit = weight_pb2.CommitPublishRequest(
            run_id=self._run_id, weight_version=begun.weight_version, epoch=epoch, files=files
        )
        await persistently("CommitPublish", lambda: self._stub.CommitPublish(commit))
        return int(begun.weight_version)


def write_folder(
    folder: Path, model_folder: Path, tensors: Mapping[str, torch.Tensor]
) -> list[weight_pb2.WeightFile]:
    """Write a complete Hugging Face folder, durable when this returns; its files with checksums."""
    folder.mkdir(parents=True, exist_ok=True)
    _copy_settings(model_folder, folder, next(iter(tensors.values())).dtype)
    _write_weights(folder, tensors)
    paths = sorted(
        path for path in folder.iterdir() if path.name not in (_MANIFEST, durable.COMPLETE)
    )
    files = [_described(path) for path in paths]
    entries = [{"name": f.name, "num_bytes": f.num_bytes, "sha256": f.sha256} for f in files]
    durable.write_json(folder / _MANIFEST, {"files": entries})
    durable.write_marker(folder)
    return files


def _copy_settings(source: Path, target: Path, dtype: torch.dtype) -> None:
    """Configuration and tokenizer, whatever its files are called; no weights, no code."""
    for path in sorted(source.iterdir()):
        weights_index = path.name.endswith(".index.json") or path.name == _MANIFEST
        if path.is_file() and path.suffix in _COPIED_SUFFIXES and not weights_index:
            durable.copy_file(path, target / path.name)
    config = json.loads((source / "config.json").read_text())
    name = "torch_dtype" if "torch_dtype" in config else "dtype"
    config[name] = str(dtype).removeprefix("torch.")
    durable.write_json(target / "config.json", config)


def _write_weights(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    parts = list(_parts(tensors))
    if len(parts) == 1:
        durable.write_tensors(folder / _WEIGHTS, parts[0])
        return
    names = [f"model-{n:05d}-of-{len(parts):05d}.safetensors" for n in range(1, len(parts) + 1)]
    for name, part in zip(names, parts, strict=True):
        durable.write_tensors(folder / name, part)
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": {key: name for name, part in zip(names, parts, strict=True) for key in part},
    }
    durable.write_json(folder / _INDEX, index)


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


def _described(path: Path) -> weight_pb2.WeightFile:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return weight_pb2.WeightFile(name=path.name, num_bytes=path.stat().st_size, sha256=digest)
