"""The weights service's files as `ShardSender` reads them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from seamflow.weights.v1.weight_service_pb2 import Manifest, WeightFile

from services.chassis.errors import not_found
from services.lib.weight_files.shard_sender import OpenShard
from services.weights import validation
from services.weights.announced_versions import AnnouncedVersions
from services.weights.keys import Scope
from services.weights.redis_store import RedisStore
from services.weights.version_folders import WeightFolders


@dataclass(frozen=True, slots=True)
class _StoredVersion:
    """One committed or announced version."""

    files: Sequence[WeightFile]
    """All files of the version, in the manifest's order; those that are announced so far."""
    scope: Scope
    """Model of the version."""
    weight_version: int
    folders: WeightFolders
    """Opens them."""

    async def open(self, file: WeightFile) -> OpenShard:
        """Open one of the files."""
        return await self.folders.open(self.scope, self.weight_version, file)


class StoredShards:
    """Committed and announced versions, read from their folders."""

    def __init__(
        self, store: RedisStore, folders: WeightFolders, announced: AnnouncedVersions
    ) -> None:
        self._store = store
        self._folders = folders
        self._announced = announced

    @asynccontextmanager
    async def version(
        self, run_id: str, model: str, weight_version: int
    ) -> AsyncIterator[_StoredVersion]:
        """Open a version; raises NOT_FOUND if it is neither committed nor announced here."""
        scope = validation.scope_of(run_id, model)
        manifest = await self.manifest(scope, weight_version)
        with self._folders.reading(scope, weight_version):
            yield _StoredVersion(manifest.files, scope, weight_version, self._folders)

    async def manifest(self, scope: Scope, weight_version: int) -> Manifest:
        """The manifest of a committed version, or the announced files of another; or NOT_FOUND."""
        committed = await self._store.manifest(scope, weight_version)
        manifest = committed or self._announced.get(scope, weight_version)
        if manifest is None:
            raise not_found("weight_version", str(weight_version))
        return manifest
