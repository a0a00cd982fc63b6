"""Committed weights, fetched from the weights service and kept on disk.

A version becomes a folder `weight_v000012` in one rename, after the size and checksum of every file
matched its manifest: a folder that exists is complete.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import shutil
from collections.abc import AsyncIterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from seamflow.errors import SeamflowError
from seamflow.retry import retrying
from seamflow.weights.v1 import weight_service_pb2 as pb

from rollout.server.engine import WeightsError
from services.chassis.log import get_logger

if TYPE_CHECKING:
    from seamflow.weights.v1.weight_service_pb2_grpc import WeightServiceAsyncStub

__all__ = ["FetchedWeights", "WeightCache"]

_KEPT = 2
_MANIFEST = "manifest.json"
# Names come from the wire: nothing that could leave the folder or hide in it.
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedWeights:
    """One version on this machine's disk."""

    weight_version: int
    """The version."""
    folder: Path
    """Its files, as published."""


class WeightCache:
    """Fetches versions of one model and keeps the last few."""

    def __init__(
        self, stub: WeightServiceAsyncStub, folder: Path, *, run_id: str, model: str
    ) -> None:
        self._stub = stub
        self._folder = folder
        self._run_id = run_id
        self._model = model
        self._fetching = asyncio.Lock()

    async def fetch(self, weight_version: int | None = None) -> FetchedWeights | None:
        """Return a committed version, by default the newest; None if none is committed yet.

        Waits for an unreachable weights service, so bound it by a deadline. Raises `WeightsError`
        for files that do not match their manifest, `SeamflowError` for what the service refuses.
        """
        request = pb.GetManifestRequest(
            run_id=self._run_id, model=self._model, weight_version=weight_version
        )
        response = await retrying(lambda: self._stub.GetManifest(request), on_retry=self._report)
        if not response.HasField("manifest"):
            return None
        manifest = response.manifest
        folder = self._folder / f"weight_v{manifest.weight_version:06d}"
        async with self._fetching:
            if _described(folder) != _digests(manifest):
                await retrying(lambda: self._download(manifest, folder), on_retry=self._report)
        return FetchedWeights(weight_version=manifest.weight_version, folder=folder)

    def _report(self, error: SeamflowError) -> None:
        get_logger().warning("weights_service_unavailable", error=str(error))

    async def _download(self, manifest: pb.Manifest, folder: Path) -> None:
        partial = folder.with_suffix(f".{os.getpid()}.partial")
        try:
            _remove(partial)
            partial.mkdir(parents=True)
            await self._receive(manifest, partial)
            (partial / _MANIFEST).write_text(json.dumps(_digests(manifest)))
            _remove(folder)
            partial.rename(folder)
        except OSError as error:
            raise WeightsError(f"{folder}: {error.strerror}; free its disk") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    async def _receive(self, manifest: pb.Manifest, folder: Path) -> None:
        for file in manifest.files:
            if not _FILE_NAME.fullmatch(file.name) or file.name == _MANIFEST:
                raise WeightsError(
                    f"version {manifest.weight_version}: bad file name {file.name!r}"
                )
            request = pb.FetchShardsRequest(
                run_id=self._run_id,
                model=self._model,
                weight_version=manifest.weight_version,
                names=[file.name],
            )
            await _write(folder / file.name, file, self._stub.FetchShards(request))

    def prune(self, loaded: int) -> None:
        """Remove all but the newest two versions and `loaded`, which a restore would need."""
        folders = sorted(path for path in self._folder.glob("weight_v*") if not path.suffix)
        for folder in folders[:-_KEPT]:
            if folder.name != f"weight_v{loaded:06d}":
                _remove(folder)


async def _write(
    path: Path, file: pb.WeightFile, chunks: AsyncIterable[pb.FetchShardsResponse]
) -> None:
    """Write one file chunk by chunk. Raises `WeightsError` if it is not what the manifest says."""
    digest, size = hashlib.sha256(), 0
    with path.open("wb") as opened:
        async for chunk in chunks:
            if chunk.name != file.name or chunk.offset != size:
                place = f"{chunk.name} at {chunk.offset}"
                raise WeightsError(f"{file.name}: expected its byte {size}, received {place}")
            digest.update(chunk.data)
            opened.write(chunk.data)
            size += len(chunk.data)
    if size != file.num_bytes:
        raise WeightsError(
            f"{file.name}: received {size} bytes, the manifest says {file.num_bytes}"
        )
    if digest.hexdigest() != file.sha256:
        raise WeightsError(f"{file.name}: its SHA-256 is not the manifest's")


def _digests(manifest: pb.Manifest) -> dict[str, str]:
    return {file.name: file.sha256 for file in manifest.files}


def _described(folder: Path) -> object:
    """Return the digests a folder was fetched with; a version of an earlier run may have others."""
    path = folder / _MANIFEST
    return json.loads(path.read_text()) if path.is_file() else None


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
