"""A weights service of a few lines over real gRPC: versions are folders, the newest wins."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from seamflow.weights.v1 import weight_service_pb2 as pb
from seamflow.weights.v1.weight_service_pb2_grpc import (
    WeightServiceServicer,
    add_WeightServiceServicer_to_server,
)

from services.chassis.config.settings import ServerConfig
from services.chassis.errors import not_found
from services.chassis.rpc.server import Service, started


@dataclass
class TinyWeightService(WeightServiceServicer):
    """Serves what `publish` was given."""

    folders: dict[int, Path] = field(default_factory=dict)
    corrupt: bool = False
    """Flip a byte of every chunk."""
    fetched: list[tuple[int, str]] = field(default_factory=list)
    """Every file that was asked for."""
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def publish(self, weight_version: int, folder: Path) -> None:
        """Commit `folder` as a version."""
        self.folders[weight_version] = folder
        async with self.changed:
            self.changed.notify_all()

    async def until_fetched(self, times: int) -> None:
        """Wait until files were asked for this many times."""
        async with self.changed:
            await self.changed.wait_for(lambda: len(self.fetched) >= times)

    async def _note(self, fetched: tuple[int, str]) -> None:
        async with self.changed:
            self.fetched.append(fetched)
            self.changed.notify_all()

    def manifest(self, weight_version: int) -> pb.Manifest:
        """Describe a committed version."""
        manifest = pb.Manifest(run_id="run", model="policy", weight_version=weight_version)
        for path in sorted(self.folders[weight_version].iterdir()):
            data = path.read_bytes()
            digest = hashlib.sha256(data).hexdigest()
            manifest.files.add(name=path.name, num_bytes=len(data), sha256=digest)
        return manifest

    async def BeginPublish(self, request: pb.BeginPublishRequest, context: Any) -> Any:
        """Tests publish by `publish`."""
        raise not_found("rpc", "BeginPublish")

    async def CommitPublish(self, request: pb.CommitPublishRequest, context: Any) -> Any:
        """Tests publish by `publish`."""
        raise not_found("rpc", "CommitPublish")

    async def GetManifest(self, request: pb.GetManifestRequest, context: Any) -> Any:
        """The version asked for, or the newest."""
        if not request.HasField("weight_version"):
            if not self.folders:
                return pb.GetManifestResponse()
            return pb.GetManifestResponse(manifest=self.manifest(max(self.folders)))
        if request.weight_version not in self.folders:
            raise not_found("weight version", str(request.weight_version))
        return pb.GetManifestResponse(manifest=self.manifest(request.weight_version))

    async def FetchShards(
        self, request: pb.FetchShardsRequest, context: Any
    ) -> AsyncIterator[pb.FetchShardsResponse]:
        """The files asked for, in chunks."""
        for name in request.names:
            await self._note((request.weight_version, name))
            data = (self.folders[request.weight_version] / name).read_bytes()
            for offset in range(request.offset, len(data), 10_000):
                chunk = data[offset : offset + 10_000]
                if self.corrupt:
                    chunk = bytes([chunk[0] ^ 1]) + chunk[1:]
                yield pb.FetchShardsResponse(name=name, offset=offset, data=chunk)

    async def WatchVersions(
        self, request: pb.WatchVersionsRequest, context: Any
    ) -> AsyncIterator[pb.WatchVersionsResponse]:
        """The newest version, each time it changes."""
        told = request.after_weight_version
        while True:
            async with self.changed:
                while max(self.folders, default=0) <= told:
                    await self.changed.wait()
            told = max(self.folders)
            yield pb.WatchVersionsResponse(manifest=self.manifest(told))

    @asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[int]:
        """Serve on `port`, a free one by default."""
        service = Service(servicers=[(add_WeightServiceServicer_to_server, self)])
        config = ServerConfig(port=port, drain_seconds=0.0)
        async with started(service, config, "tiny_weights") as bound:
            yield bound
