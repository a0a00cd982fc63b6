"""The weights service's files as `ShardSender` reads them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from seamflow.weights.v1.weight_service_pb2 import WeightFile

from services.chassis.errors import not_found
from services.lib.weight_files.shard_sender import OpenShard
from services.weights import validation
from services.weights.store_interface import Store
from services.weights.version_folders import WeightFolders

__all__ = ["StoredShards"]


@dataclass(frozen=True, slots=True)
class _StoredVersion:
    """One committed version."""

    files: Sequence[WeightFile]
    """All files of the version, in the manifest's order."""
    folder: Path
    """Folder of the version."""
    folders: WeightFolders
    """Opens them."""

    async def open(self, file: WeightFile) -> OpenShard:
        """Open one of the files."""
        return await self.folders.open(self.folder, file)


class StoredShards:
    """Committed versions, read from their folders."""

    def __init__(self, store: Store, folders: WeightFolders) -> None:
        self._store = store
        self._folders = folders

    @asynccontextmanager
    async def version(
        self, run_id: str, model: str, weight_version: int
    ) -> AsyncIterator[_StoredVersion]:
        """Open a committed version; raises NOT_FOUND if there is none."""
        scope = validation.scope_of(run_id, model)
        manifest = await self._store.manifest(scope, weight_version)
        if manifest is None:
            raise not_found("weight_version", str(weight_version))
        with self._folders.reading(scope, weight_version) as folder:
            yield _StoredVersion(manifest.files, folder, self._folders)
