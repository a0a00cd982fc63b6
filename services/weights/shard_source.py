"""The weights service's files as `ShardSender` reads them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from seamflow.weights.v1.weight_service_pb2 import Manifest, WeightFile

from services.chassis.errors import not_found
from services.lib.weight_files.shard_sender import OpenShard
from services.weights import validation
from services.weights.keys import Scope
from services.weights.redis_store import Allocation, RedisStore
from services.weights.version_folders import WeightFolders

_KEPT = 2
"""Versions of a model that are published at a time; older ones were given up by their trainer."""


class AnnouncedVersions:
    """Files announced to this replica, until their version or a newer one is committed."""

    def __init__(self) -> None:
        self._manifests: dict[Scope, dict[int, Manifest]] = {}

    def add(
        self, scope: Scope, version: int, allocation: Allocation, files: Sequence[WeightFile]
    ) -> None:
        """Add files to `version`; one of the same name takes the place of the earlier one."""
        versions = self._manifests.setdefault(scope, {})
        earlier = versions.get(version)
        by_name = {file.name: file for file in [*(earlier.files if earlier else ()), *files]}
        versions[version] = Manifest(
            run_id=scope.run_id,
            model=scope.model,
            weight_version=version,
            step=allocation.step,
            parent_weight_version=allocation.parent,
            files=by_name.values(),
        )
        for old in sorted(versions)[:-_KEPT]:
            del versions[old]

    def get(self, scope: Scope, version: int) -> Manifest | None:
        """The files of `version` so far; None: there are none. It is never changed."""
        return self._manifests.get(scope, {}).get(version)

    def newest(self, scope: Scope, above: int) -> Manifest | None:
        """The files so far of the newest version above `above`."""
        version = max(self._manifests.get(scope, ()), default=0)
        return self.get(scope, version) if version > above else None

    def forget(self, scope: Scope, committed: int) -> None:
        """Forget `committed` and older versions."""
        versions = self._manifests.pop(scope, {})
        if newer := {n: manifest for n, manifest in versions.items() if n > committed}:
            self._manifests[scope] = newer


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
