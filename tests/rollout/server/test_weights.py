"""Fetched weights are exactly what was published, or nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from seamflow.weights.v1 import weight_service_pb2 as pb
from seamflow.weights.v1.weight_service_pb2_grpc import WeightServiceStub

from rollout.server.engine import WeightsError
from rollout.server.weights import WeightCache
from tests.rollout.server.weight_service import TinyWeightService


@asynccontextmanager
async def cache_of(weights: TinyWeightService, folder: Path) -> AsyncIterator[WeightCache]:
    """A cache in `folder`, fed by `weights`."""
    async with (
        weights.serving() as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        stub: Any = WeightServiceStub(channel)
        yield WeightCache(stub, folder, run_id="run", model="policy")


@pytest.fixture
async def weights(tmp_path: Path) -> TinyWeightService:
    """Version 7 with two files, one of several chunks."""
    folder = tmp_path / "published"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 100)
    (folder / "config.json").write_text("{}")
    service = TinyWeightService()
    await service.publish(7, folder)
    return service


async def test_fetched_files_equal_the_published(
    weights: TinyWeightService, tmp_path: Path
) -> None:
    """Every file arrives byte for byte under the version's name."""
    async with cache_of(weights, tmp_path / "cache") as cache:
        fetched = await cache.fetch()
    assert fetched is not None
    assert (fetched.weight_version, fetched.folder.name) == (7, "weight_v000007")
    for path in weights.folders[7].iterdir():
        assert (fetched.folder / path.name).read_bytes() == path.read_bytes()


async def test_nothing_committed_is_none(tmp_path: Path) -> None:
    """Before the first commit there is nothing to fetch."""
    async with cache_of(TinyWeightService(), tmp_path) as cache:
        assert await cache.fetch() is None


async def test_a_version_is_fetched_once_unless_its_content_differs(
    weights: TinyWeightService, tmp_path: Path
) -> None:
    """A complete folder is used again; one left by another run with other bytes is replaced."""
    async with cache_of(weights, tmp_path / "cache") as cache:
        await cache.fetch()
        await cache.fetch(7)
        assert len(weights.fetched) == 2
        (weights.folders[7] / "config.json").write_text('{"other": 1}')
        fetched = await cache.fetch()
    assert fetched is not None
    assert len(weights.fetched) == 4
    assert (fetched.folder / "config.json").read_text() == '{"other": 1}'


def _flip(manifest: pb.Manifest) -> None:
    manifest.files[1].sha256 = "0" * 64


def _shorten(manifest: pb.Manifest) -> None:
    manifest.files[1].num_bytes -= 1


def _escape(manifest: pb.Manifest) -> None:
    manifest.files[1].name = "../model.safetensors"


@pytest.mark.parametrize(
    ("lie", "named"),
    [(_flip, "SHA-256"), (_shorten, "25600 bytes"), (_escape, "bad file name")],
)
async def test_a_wrong_manifest_leaves_nothing_behind(
    weights: TinyWeightService,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lie: Callable[[pb.Manifest], None],
    named: str,
) -> None:
    """Content, size and name are checked; a refused version leaves no folder, whole or partial."""
    honest = weights.manifest(7)

    def lying(_weight_version: int) -> pb.Manifest:
        manifest = pb.Manifest.FromString(honest.SerializeToString())
        lie(manifest)
        return manifest

    monkeypatch.setattr(weights, "manifest", lying)
    async with cache_of(weights, tmp_path / "cache") as cache:
        with pytest.raises(WeightsError, match=named):
            await cache.fetch()
    assert list((tmp_path / "cache").iterdir()) == []


async def test_an_unwritable_folder_is_named(weights: TinyWeightService, tmp_path: Path) -> None:
    """A disk that refuses the files is an error naming the folder, not a crash."""
    (tmp_path / "cache").write_text("a file where the folder should be")
    async with cache_of(weights, tmp_path / "cache") as cache:
        with pytest.raises(WeightsError, match="weight_v000007"):
            await cache.fetch()
