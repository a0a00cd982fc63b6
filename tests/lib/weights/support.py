"""What the tests of the weights process share: a trainer's side of publishing."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import grpc.aio
import xxhash
from seamflow.stubs import async_stub
from seamflow.weights.v1 import weight_service_pb2 as pb
from seamflow.weights.v1.weight_service_pb2_grpc import WeightServiceStub

from services.chassis.rpc.server import Service, started
from services.lib.weight_files.folder_names import sees
from services.weights.cli import build, service
from services.weights.config import WeightsConfig
from tests.lib.weights.memory_store import memory_store

if TYPE_CHECKING:
    from seamflow.weights.v1.weight_service_pb2_grpc import WeightServiceAsyncStub

FILES = {
    "config.json": b'{"model_type": "tiny"}',
    "model-00001-of-00002.safetensors": bytes(range(256)) * 5000,
    "model-00002-of-00002.safetensors": b"",
}


def describe(files: dict[str, bytes]) -> list[pb.WeightFile]:
    """The manifest entries of files with these contents."""
    return [
        pb.WeightFile(name=name, num_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
        for name, data in files.items()
    ]


def write(folder: str, files: dict[str, bytes] | None = None) -> None:
    """Write the files as a trainer would."""
    for name, data in (FILES if files is None else files).items():
        (Path(folder) / name).write_bytes(data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """Publishes to a weights service."""

    stub: WeightServiceAsyncStub
    """Client of the service."""
    run_id: str = "run"
    """Its run."""
    epoch: int = 1
    """Its fence."""

    def newer(self) -> Trainer:
        """The trainer that takes over."""
        return replace(self, epoch=self.epoch + 1)

    async def begin(self, step: int, key: str | None = None) -> pb.BeginPublishResponse:
        """BeginPublish for `step`, by default keyed by the step."""
        request = pb.BeginPublishRequest(
            run_id=self.run_id,
            step=step,
            parent_weight_version=step - 1,
            epoch=self.epoch,
            request_id=key or f"step-{step}",
        )
        return await self.stub.BeginPublish(request, timeout=10)

    async def folder(self, version: int) -> str:
        """The folder of `version`, as a trainer on the same disk finds it."""
        request = pb.ProbeFolderRequest(run_id=self.run_id, weight_version=version)
        response = await self.stub.ProbeFolder(request, timeout=10)
        assert sees(Path(response.folder), response.probe)
        return response.folder

    async def begun(self, step: int) -> tuple[int, str]:
        """BeginPublish; returns the version and its folder."""
        version = (await self.begin(step)).weight_version
        return version, await self.folder(version)

    async def upload(self, parts: Iterable[pb.UploadShardsRequest]) -> dict[str, int]:
        """UploadShards of these messages; returns the bytes held of each file."""
        response = await self.stub.UploadShards(iter(parts), timeout=10)
        return {file.name: file.num_bytes for file in response.files}

    async def uploaded(self, version: int, files: dict[str, bytes]) -> dict[str, int]:
        """GetUpload: bytes held of each file of which there is anything."""
        request = pb.GetUploadRequest(
            run_id=self.run_id, weight_version=version, files=describe(files)
        )
        response = await self.stub.GetUpload(request, timeout=10)
        return {file.name: file.num_bytes for file in response.files}

    def part(
        self, version: int, name: str, data: bytes, offset: int = 0, end: int | None = None
    ) -> pb.UploadShardsRequest:
        """The bytes of file `name` with content `data` from `offset` to `end`, as one message."""
        piece = data[offset:end]
        return pb.UploadShardsRequest(
            run_id=self.run_id,
            weight_version=version,
            epoch=self.epoch,
            file=describe({name: data})[0],
            offset=offset,
            data=piece,
            checksum=xxhash.xxh3_64_intdigest(piece),
        )

    def parts(
        self, version: int, files: dict[str, bytes], size: int = 1 << 20
    ) -> Iterator[pb.UploadShardsRequest]:
        """All messages of an upload of `files`, in parts of `size` bytes."""
        for name, data in files.items():
            for offset in range(0, len(data) or 1, size):
                yield self.part(version, name, data, offset, offset + size)

    async def announce(self, version: int, files: dict[str, bytes]) -> None:
        """AnnounceFiles of `version`."""
        request = pb.AnnounceFilesRequest(
            run_id=self.run_id, weight_version=version, epoch=self.epoch, files=describe(files)
        )
        await self.stub.AnnounceFiles(request, timeout=10)

    async def commit(
        self, version: int, files: list[pb.WeightFile] | None = None
    ) -> pb.CommitPublishResponse:
        """CommitPublish of `version`, by default with the files of `FILES`."""
        request = pb.CommitPublishRequest(
            run_id=self.run_id,
            weight_version=version,
            epoch=self.epoch,
            files=describe(FILES) if files is None else files,
        )
        return await self.stub.CommitPublish(request, timeout=10)

    async def publish(self, step: int) -> int:
        """All of it; returns the version."""
        version, folder = await self.begun(step)
        write(folder)
        return (await self.commit(version)).manifest.weight_version

    async def publish_uploaded(self, step: int, files: dict[str, bytes]) -> int:
        """All of it, without a shared folder; returns the version."""
        version = (await self.begin(step)).weight_version
        await self.upload(self.parts(version, files))
        await self.commit(version, describe(files))
        return version

    async def newest(self) -> int:
        """The newest committed version; 0 for none."""
        answer = await self.stub.GetManifest(pb.GetManifestRequest(run_id=self.run_id), timeout=10)
        return answer.manifest.weight_version

    async def fetch(self, version: int, *names: str) -> dict[str, bytes]:
        """The files of `version`, put together from their chunks."""
        request = pb.FetchShardsRequest(run_id=self.run_id, weight_version=version, names=names)
        files: dict[str, bytes] = {}
        async for chunk in self.stub.FetchShards(request, timeout=10):
            assert chunk.offset == len(files.get(chunk.name, b""))
            assert len(chunk.data) <= 1024 * 1024
            files[chunk.name] = files.get(chunk.name, b"") + chunk.data
        return files


def in_memory(config: WeightsConfig) -> Service:
    """The weights service on the in-memory oracle."""
    return service(config, memory_store())


@asynccontextmanager
async def weights_service(
    folder: Path, redis_url: str | None = None, keep_versions: int = 4, *, offer: bool = True
) -> AsyncIterator[WeightServiceAsyncStub]:
    """A weights service in this process, and a client of it."""
    async with weights_channel(folder, redis_url, keep_versions, offer=offer) as channel:
        yield async_stub(WeightServiceStub, channel)


@asynccontextmanager
async def weights_channel(
    folder: Path, redis_url: str | None = None, keep_versions: int = 4, *, offer: bool = True
) -> AsyncIterator[grpc.aio.Channel]:
    """A weights service in this process, and a channel to it."""
    config = WeightsConfig(
        folder=folder,
        redis_url=redis_url or "redis://oracle",
        keep_versions=keep_versions,
        offer_folder=offer,
        port=0,
        drain_seconds=1,
    )
    async with (
        build(config) if redis_url else nullcontext(in_memory(config)) as served,
        started(served, config) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        yield channel


def names_in(folder: Path) -> list[str]:
    """Names of everything in `folder`, sorted."""
    return sorted(path.name for path in folder.iterdir())
