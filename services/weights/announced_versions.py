"""Versions that are being published: their files that are checked already."""

from __future__ import annotations

from collections.abc import Sequence

from seamflow.weights.v1.weight_service_pb2 import Manifest, WeightFile

from services.weights.keys import Allocation, Scope

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
