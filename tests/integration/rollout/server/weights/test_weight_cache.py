"""Fetched weights are exactly what was published, or nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio
import pytest
from prometheus_client import REGISTRY
from seamflow.stubs import async_stub
from seamflow.weights.v1 import weight_service_pb2 as pb
from seamflow.weights.v1.weight_service_pb2_grpc import WeightServiceStub

from rollout.server.engines.engine import WeightsError
from rollout.server.weights.transport import (
    DamagedFile,
    Incoming,
    PhaseTimeout,
    SourceLost,
    WeightTransport,
)
from rollout.server.weights.transports import TransportContext, build_transports
from rollout.server.weights.weight_cache import WeightCache
from tests.lib.rollout.server.client import fake_config
from tests.lib.rollout.server.weights.weight_service import TinyWeightService


@asynccontextmanager
async def cache_of(
    weights: TinyWeightService,
    folder: Path,
    *,
    first: WeightTransport | None = None,
    last: WeightTransport | None = None,
    seconds: float = 10.0,
    base: Path | None = None,
) -> AsyncIterator[WeightCache]:
    """A cache in `folder`, fed by `weights`, with other transports before and after the stream."""
    async with (
        weights.serving() as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        stub = async_stub(WeightServiceStub, channel)
        transports = build_transports(
            TransportContext(config=fake_config(), weights=channel, connect=unreachable)
        )
        around = ({"failing": first} if first else {}, transports, {"last": last} if last else {})
        ordered = {name: one for part in around for name, one in part.items()}
        yield WeightCache(
            stub, ordered, folder, run_id="run", model="policy", fetch_seconds=seconds, base=base
        )


def unreachable(address: str) -> grpc.aio.Channel:
    """No other servers in these tests."""
    raise AssertionError(address)


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
    [(_flip, "SHA-256"), (_shorten, "the manifest leaves 5599"), (_escape, "bad file name")],
)
async def test_a_wrong_manifest_makes_no_version(
    weights: TinyWeightService,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lie: Callable[[pb.Manifest], None],
    named: str,
) -> None:
    """Content, size and name are checked; a refused version is none."""
    honest = weights.manifest(7)

    def lying(_weight_version: int) -> pb.Manifest:
        manifest = pb.Manifest.FromString(honest.SerializeToString())
        lie(manifest)
        return manifest

    monkeypatch.setattr(weights, "manifest", lying)
    async with cache_of(weights, tmp_path / "cache") as cache:
        with pytest.raises(WeightsError, match=named):
            await cache.fetch()
    assert not (tmp_path / "cache" / "weight_v000007").exists()


@dataclass
class Failing:
    """A transport with scripted steps, then an error."""

    action: Callable[[Incoming], Awaitable[None]]
    seen: list[int] = field(default_factory=list)

    async def fetch(self, incoming: Incoming) -> None:
        """Fail, one way or another."""
        self.seen.append(incoming.manifest.weight_version)
        await self.action(incoming)
        raise SourceLost("broken", transport="failing", cure="none")


async def nothing(incoming: Incoming) -> None:
    """Fail at once."""


async def for_ever(incoming: Incoming) -> None:
    """Never fail, never end."""
    await asyncio.Event().wait()


@pytest.mark.parametrize("action", [nothing, for_ever])
async def test_the_next_transport_takes_over(
    weights: TinyWeightService,
    tmp_path: Path,
    action: Callable[[Incoming], Awaitable[None]],
) -> None:
    """In the configured order, when one fails and when its deadline passes; each is counted."""
    failing, spare = Failing(action), Failing(nothing)

    def failures() -> float:
        labels = {"transport": "failing", "outcome": "failed"}
        return (
            REGISTRY.get_sample_value("seamflow_rollout_server_weight_fetches_total", labels) or 0.0
        )

    before = failures()
    seconds = 0.2 if action is for_ever else 10.0
    async with cache_of(
        weights, tmp_path / "cache", first=failing, last=spare, seconds=seconds
    ) as cache:
        fetched = await cache.fetch()
    assert fetched is not None
    assert (failing.seen, spare.seen) == ([7], [])
    assert failures() == before + 1
    for path in weights.folders[7].iterdir():
        assert (fetched.folder / path.name).read_bytes() == path.read_bytes()


async def test_without_another_transport_the_deadline_is_named(
    weights: TinyWeightService, tmp_path: Path
) -> None:
    """The error names the transport, the version, the missing files and the cure."""
    async with cache_of(weights, tmp_path / "cache", seconds=0.05) as cache:
        cache._transports = {"slow": Failing(for_ever)}
        with pytest.raises(
            PhaseTimeout, match=r"slow: version 7 .*model\.safetensors; raise weight_f"
        ):
            await cache.fetch()


async def test_what_one_life_received_the_next_goes_on_with(
    weights: TinyWeightService, tmp_path: Path
) -> None:
    """A server killed in mid-transfer asks after its restart for the missing file only."""

    async def bring_one(incoming: Incoming) -> None:
        file = incoming.missing[0]
        incoming.part(file).write_bytes((weights.folders[7] / file.name).read_bytes())
        incoming.complete(file)

    async with cache_of(weights, tmp_path / "cache") as killed:
        killed._transports = {"failing": Failing(bring_one)}
        with pytest.raises(SourceLost):
            await killed.fetch()
    async with cache_of(weights, tmp_path / "cache") as cache:
        await cache.fetch()
    assert weights.fetched == [(7, "model.safetensors")]
    # Control: what was begun for other content is not gone on with.
    async with cache_of(weights, tmp_path / "other") as killed:
        killed._transports = {"failing": Failing(bring_one)}
        with pytest.raises(SourceLost):
            await killed.fetch()
    (weights.folders[7] / "config.json").write_text('{"other": 1}')
    async with cache_of(weights, tmp_path / "other") as cache:
        fetched = await cache.fetch()
    assert fetched is not None
    assert (fetched.folder / "config.json").read_text() == '{"other": 1}'


async def test_what_an_earlier_life_left_is_hashed_before_it_is_used(
    weights: TinyWeightService, tmp_path: Path
) -> None:
    """Bytes that a machine lost with its power are found, and only their file is fetched again."""
    async with cache_of(weights, tmp_path) as cache:
        fetched = await cache.fetch()
    assert fetched is not None
    lost, whole = fetched.folder / "model.safetensors", fetched.folder / "config.json"
    published = lost.read_bytes()
    lost.write_bytes(bytes(len(published)))
    weights.fetched.clear()
    async with cache_of(weights, tmp_path) as unprotected:  # negative control
        unprotected._checked.add(7)
        await unprotected.fetch()
        assert (lost.read_bytes() == published, weights.fetched) == (False, [])
    async with cache_of(weights, tmp_path) as restarted:
        with pytest.raises(DamagedFile, match=lost.name):
            await restarted.fetch()
        await restarted.fetch()
        await restarted.fetch()
    assert (lost.read_bytes(), whole.read_text()) == (published, "{}")
    assert weights.fetched == [(7, lost.name)]


async def test_partial_versions_that_were_overtaken_are_removed(
    weights: TinyWeightService, tmp_path: Path
) -> None:
    """What is older than the loaded version and never came whole takes no disk."""
    async with cache_of(weights, tmp_path) as cache:
        for version in (5, 9):
            (tmp_path / f"weight_v{version:06d}.partial").mkdir()
        cache.prune(loaded=7)
    left = sorted(path.name for path in tmp_path.glob("*.partial"))
    assert left == ["weight_v000009.partial"]


async def test_an_unwritable_folder_is_named(weights: TinyWeightService, tmp_path: Path) -> None:
    """A disk that refuses the files is an error naming the folder, not a crash."""
    (tmp_path / "cache").write_text("a file where the folder should be")
    async with cache_of(weights, tmp_path / "cache") as cache:
        with pytest.raises(WeightsError, match="weight_v000007"):
            await cache.fetch()
