"""Files of a version that rollout servers fetch before its commit, and never load before it."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

import grpc.aio
import pytest
from prometheus_client import REGISTRY
from seamflow.durations import to_duration
from seamflow.rollout.v1 import rollout_server_service_pb2 as rollout_pb
from seamflow.stubs import async_stub
from seamflow.weights.v1 import weight_service_pb2 as pb
from seamflow.weights.v1.weight_service_pb2_grpc import WeightServiceStub

from rollout.server.engine_lifecycle import EngineLifecycle
from rollout.server.weights.weight_cache import FetchedWeights, WeightCache
from services.chassis.rpc.server import started
from services.weights.config import WeightsConfig
from tests.integration.rollout.server.weights.test_weight_cache import Failing, cache_of, for_ever
from tests.lib.rollout.server.client import Client, fake_config, read, serving
from tests.lib.rollout.server.weights.weight_service import TinyWeightService
from tests.lib.weights.support import Trainer, describe, in_memory

FIRST = {"model-00001.safetensors": bytes([1]) * 3_000_000}
ALL = {**FIRST, "model-00002.safetensors": bytes([2]) * 1_000_000}


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A trainer that publishes, and a rollout server that follows."""

    trainer: Trainer
    client: Client
    cache: Path

    def partial(self, version: int) -> list[str]:
        """Names of the complete files of an arriving version."""
        folder = self.cache / f"weight_v{version:06d}.partial"
        return sorted(path.name for path in folder.glob("*.safetensors"))

    async def until_ahead(self, version: int, files: dict[str, bytes]) -> None:
        """Wait until these files were fetched."""
        while self.partial(version) != sorted(files):
            await asyncio.sleep(0.01)

    async def announced(self, step: int, files: dict[str, bytes]) -> int:
        """Begin a version, upload and announce some of its files."""
        version = (await self.trainer.begin(step)).weight_version
        await self.trainer.upload(self.trainer.parts(version, files))
        await self.trainer.announce(version, files)
        return version

    async def committed(self, version: int, files: dict[str, bytes]) -> None:
        """Upload the rest, commit, and wait until the version is served."""
        await self.trainer.upload(self.trainer.parts(version, files))
        await self.trainer.commit(version, describe(files))
        await self.client.serving(version)
        folder = self.cache / f"weight_v{version:06d}"
        for name, data in files.items():
            assert (folder / name).read_bytes() == data


@asynccontextmanager
async def pair(tmp_path: Path, *, offer: bool = False) -> AsyncIterator[Pair]:
    """Both, and the weights service between them."""
    config = WeightsConfig(
        redis_url="redis://oracle",
        port=0,
        folder=tmp_path / "published",
        drain_seconds=0.0,
        offer_folder=offer,
    )
    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(started(in_memory(config), config, "weights"))
        address = f"127.0.0.1:{port}"
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
        cache = tmp_path / "cache"
        server = fake_config(weights=address, cache_folder=cache)
        client = await stack.enter_async_context(serving(server))
        await client.serving(0)
        trainer = Trainer(stub=async_stub(WeightServiceStub, channel))
        yield Pair(trainer=trainer, client=client, cache=cache)


def counted(name: str) -> float:
    """A counter of this process."""
    return REGISTRY.get_sample_value(f"seamflow_{name}") or 0.0


@pytest.mark.parametrize("offer", [True, False])
async def test_the_commit_finds_announced_files_fetched(tmp_path: Path, offer: bool) -> None:
    """By a common folder or by rpc: verified once, and not sent again."""
    async with pair(tmp_path, offer=offer) as both:
        ahead = counted("rollout_server_weight_ahead_bytes_total")
        served = counted("weights_served_bytes_total")
        version = await both.announced(1, FIRST)
        await both.until_ahead(version, FIRST)
        assert (await both.client.info()).weight_version == 0
        assert counted("rollout_server_weight_ahead_bytes_total") == ahead + 3_000_000
        await both.committed(version, ALL)
        assert counted("weights_served_bytes_total") - served == (0 if offer else 4_000_000)
        assert (await read(both.client.generate()))[1] == [version] * 32


async def test_a_shared_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the rollout server; the weights service has hashed its parts as they arrived."""
    read_files, digest = list[str](), hashlib.file_digest

    def noted(file: BufferedReader, algorithm: str) -> object:
        read_files.append(Path(f"/proc/self/fd/{file.fileno()}").readlink().name)
        return digest(file, algorithm)

    monkeypatch.setattr(hashlib, "file_digest", noted)
    async with pair(tmp_path, offer=True) as both:
        version = await both.announced(1, FIRST)
        await both.until_ahead(version, FIRST)
        await both.committed(version, ALL)
    assert sorted(read_files) == sorted(ALL)


async def test_announced_files_of_other_content_are_fetched_again(tmp_path: Path) -> None:
    """What counts is the manifest of the commit."""
    name = next(iter(FIRST))
    async with pair(tmp_path) as both:
        version = await both.announced(1, ALL)
        await both.until_ahead(version, ALL)
        await both.committed(version, {**ALL, name: bytes([9]) * 3_000_000})


async def test_a_version_that_is_never_committed_is_dropped(tmp_path: Path) -> None:
    """Once files of a newer one are announced."""
    async with pair(tmp_path) as both:
        lost = await both.announced(1, FIRST)
        await both.until_ahead(lost, FIRST)
        newer = await both.announced(2, FIRST)
        await both.until_ahead(newer, FIRST)
        assert not both.partial(lost)
        await both.committed(newer, ALL)
        assert [path.name for path in both.cache.iterdir()] == [f"weight_v{newer:06d}"]


async def versions_before_the_commit(both: Pair) -> set[int]:
    """Versions that are sampled while files are announced, and no version is committed."""
    version = await both.announced(1, ALL)
    await both.until_ahead(version, ALL)
    sampled = set((await read(both.client.generate()))[1])
    assert await both.trainer.newest() == 0
    return sampled


async def test_nothing_is_loaded_before_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All files are here, and the engine samples with the weights it had."""
    async with pair(tmp_path / "one") as both:
        assert await versions_before_the_commit(both) == {0}

    async def careless(self: EngineLifecycle, announced: pb.Manifest) -> list[Path]:
        """Negative control: load what is announced."""
        arriving = await self._require_cache().fetch_ahead(announced)
        assert arriving is not None
        await self._swap(FetchedWeights(weight_version=1, folder=arriving.folder))
        return []

    monkeypatch.setattr(EngineLifecycle, "fetch_ahead", careless)
    monkeypatch.setattr(WeightCache, "prune", lambda *_, **__: None)
    async with pair(tmp_path / "other") as both:
        assert await versions_before_the_commit(both) == {1}


async def test_a_server_that_holds_a_version_fetches_nothing_ahead(tmp_path: Path) -> None:
    """An evaluation has disk and network to itself; then the server fetches."""
    async with pair(tmp_path) as both:
        await both.committed((await both.trainer.begin(1)).weight_version, FIRST)
        hold = rollout_pb.UpdateWeightsRequest(weight_version=1, hold=to_duration(60.0))
        await both.client.stub.UpdateWeights(hold)
        version = await both.announced(2, ALL)
        for _ in range(5):
            await read(both.client.generate())
        assert not both.partial(version)
        hold.hold.CopyFrom(to_duration(0.0))
        await both.client.stub.UpdateWeights(hold)
        await both.until_ahead(version, ALL)


@pytest.fixture
async def weights(tmp_path: Path) -> TinyWeightService:
    """Version 7 is committed, version 8 is not."""
    service = TinyWeightService()
    for version in (7, 8):
        folder = tmp_path / str(version)
        folder.mkdir()
        for name, data in ALL.items():
            (folder / name).write_bytes(data + bytes([version]))
        service.folders[version] = folder
    return service


async def test_fetching_ahead_gives_way(weights: TinyWeightService, tmp_path: Path) -> None:
    """A version that is wanted now waits for nothing; afterwards fetching ahead goes on."""
    async with cache_of(weights, tmp_path / "cache") as cache:
        usual, stuck = cache._transports, Failing(for_ever)
        cache._transports = {"stuck": stuck}
        ahead = asyncio.ensure_future(cache.fetch_ahead(weights.manifest(8)))
        while not stuck.seen:
            await asyncio.sleep(0.01)
        cache._transports = usual
        fetched = await cache.fetch(7)
        assert fetched is not None
        assert (await ahead) is cache.local(8)
        # One that was overtaken is not fetched.
        assert await cache.fetch_ahead(weights.manifest(7)) is None


async def test_a_part_that_was_interrupted_is_hashed_once(
    weights: TinyWeightService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was verified of a file is continued without reading it; another life reads it."""
    again: list[str] = []
    file_digest = hashlib.file_digest

    def noted(file: BufferedReader, name: str) -> hashlib._Hash:
        again.append(file.name)
        return file_digest(file, name)

    monkeypatch.setattr(hashlib, "file_digest", noted)
    manifest = weights.manifest(8)
    async with cache_of(weights, tmp_path / "cache") as cache:
        ahead = asyncio.ensure_future(cache.fetch_ahead(manifest))
        while not (arriving := cache._incoming.get(8)) or not arriving.verified_bytes:
            await asyncio.sleep(0)
        ahead.cancel()
        await asyncio.gather(ahead, return_exceptions=True)
        async with cache._fetching:
            assert 0 < arriving.verified_bytes < 4_000_002
        await cache.fetch(8)
        assert again == []


async def test_files_that_the_service_forgot_stay(
    weights: TinyWeightService, tmp_path: Path
) -> None:
    """A service that was restarted in mid-publish names the later files alone."""
    manifest = weights.manifest(8)
    parts = [
        pb.Manifest(run_id="run", model="policy", weight_version=8, files=[f])
        for f in manifest.files
    ]
    async with cache_of(weights, tmp_path / "cache") as cache:
        for part in parts:
            await cache.fetch_ahead(part)
        await cache.fetch(8)
    assert sorted(name for _, name in weights.fetched) == sorted(ALL)
