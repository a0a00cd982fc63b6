"""What trainers and rollout servers get from the weights service."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import grpc
import pytest
import xxhash
from seamflow.weights.v1 import weight_service_pb2 as pb

from services.chassis.errors import ServiceError
from services.weights.keys import Scope
from services.weights.version_feed import VersionFeed
from services.weights.version_folders import WeightFolders
from tests.lib.weights.memory_store import memory_store
from tests.lib.weights.support import FILES, Trainer, describe, names_in, weights_service, write

FAILED = grpc.StatusCode.FAILED_PRECONDITION
INVALID = grpc.StatusCode.INVALID_ARGUMENT


async def test_published_files_come_back_whole(tmp_path: Path) -> None:
    """A committed version is the newest, and its files are streamed byte for byte."""
    async with weights_service(tmp_path) as stub:
        trainer = Trainer(stub=stub)
        assert await trainer.newest() == 0
        version, folder = await trainer.begun(1)
        assert Path(folder) == tmp_path / "run" / "policy" / "weight_v000001"
        write(folder)
        assert await trainer.newest() == 0
        manifest = (await trainer.commit(version)).manifest
        assert (manifest.step, manifest.parent_weight_version, manifest.model) == (1, 0, "policy")
        assert await trainer.newest() == 1
        assert await trainer.fetch(1) == FILES
        assert await trainer.fetch(1, "config.json") == {"config.json": FILES["config.json"]}


async def test_a_repeated_commit_answers_the_same(tmp_path: Path) -> None:
    """A retried commit gives the same manifest; other files under the version are an error."""
    async with weights_service(tmp_path) as stub:
        trainer = Trainer(stub=stub)
        _, folder = await trainer.begun(1)
        write(folder)
        first = await trainer.commit(1)
        assert await trainer.commit(1) == first
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await trainer.commit(1, describe({"other": b""}))
        assert refused.value.code() is grpc.StatusCode.ALREADY_EXISTS


async def test_a_flipped_bit_is_an_error_naming_the_file(tmp_path: Path) -> None:
    """One wrong bit keeps the version invisible; putting it right lets it through."""
    name = "model-00001-of-00002.safetensors"
    async with weights_service(tmp_path) as stub:
        trainer = Trainer(stub=stub)
        _, folder = await trainer.begun(1)
        spoiled = bytearray(FILES[name])
        spoiled[123_456] ^= 1
        write(folder, {**FILES, name: bytes(spoiled)})
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await trainer.commit(1)
        assert refused.value.code() is FAILED
        assert name in (refused.value.details() or "")
        assert await trainer.newest() == 0
        write(folder)
        await trainer.commit(1)
        assert await trainer.newest() == 1


async def test_missing_short_and_linked_files_are_errors(tmp_path: Path) -> None:
    """A file that is absent, of another size or not a plain file is an error."""
    async with weights_service(tmp_path) as stub:
        trainer = Trainer(stub=stub)
        folder = Path((await trainer.begun(1))[1])
        write(str(folder))
        file = folder / "config.json"

        async def refusal() -> str:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await trainer.commit(1)
            assert refused.value.code() is FAILED
            return refused.value.details() or ""

        file.write_bytes(b"short")
        assert "has 5 bytes" in await refusal()
        file.unlink()
        assert "missing" in await refusal()
        file.symlink_to("/etc/hostname")
        assert "not a regular file" in await refusal()
        file.unlink()
        os.mkfifo(file)
        assert "not a regular file" in await refusal()


@pytest.mark.parametrize(
    "name", ["", "..", "../x", "a/b", "/etc/passwd", ".hidden", "a\\b", "a\0b"]
)
async def test_names_that_could_leave_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    """File names are plain, and the error names the field."""
    async with weights_service(tmp_path) as stub:
        trainer = Trainer(stub=stub)
        await trainer.begin(1)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await trainer.commit(1, [pb.WeightFile(name=name, sha256="0" * 64)])
        assert refused.value.code() is INVALID
        assert "files[0].name" in (refused.value.details() or "")


@pytest.mark.parametrize("run_id", ["", "..", "a/b", "{x}", "x" * 129])
async def test_run_names_that_could_leave_the_root_are_refused(tmp_path: Path, run_id: str) -> None:
    """Runs become folders and keys, so they are plain too."""
    async with weights_service(tmp_path) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await Trainer(stub=stub, run_id=run_id).begin(1)
        assert refused.value.code() is INVALID
        assert names_in(tmp_path) == []


@pytest.mark.parametrize(
    "request_",
    [
        pb.BeginPublishRequest(run_id="run", step=1, epoch=1),
        pb.BeginPublishRequest(run_id="run", step=1, request_id="k"),
        pb.BeginPublishRequest(run_id="run", step=-1, epoch=1, request_id="k"),
    ],
)
async def test_incomplete_begins_are_refused(
    tmp_path: Path, request_: pb.BeginPublishRequest
) -> None:
    """A key, an epoch and a step that is not negative are required."""
    async with weights_service(tmp_path) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.BeginPublish(request_, timeout=10)
        assert refused.value.code() is INVALID


async def test_a_file_lost_after_the_commit_is_data_loss(tmp_path: Path) -> None:
    """Readers get an error naming the missing or truncated file, instead of fewer bytes."""
    async with weights_service(tmp_path) as stub:
        trainer = Trainer(stub=stub)
        await trainer.publish(1)
        file = tmp_path / "run" / "policy" / "weight_v000001" / "config.json"
        file.write_bytes(b"x")
        with pytest.raises(grpc.aio.AioRpcError) as cut:
            await trainer.fetch(1)
        file.unlink()
        with pytest.raises(grpc.aio.AioRpcError) as gone:
            await trainer.fetch(1)
        for refused in (cut, gone):
            assert refused.value.code() is grpc.StatusCode.DATA_LOSS
            assert "config.json" in (refused.value.details() or "")


async def test_unknown_versions_and_files_are_not_found(tmp_path: Path) -> None:
    """Requests for unknown versions and files fail with NOT_FOUND."""
    async with weights_service(tmp_path) as stub:
        trainer = Trainer(stub=stub)
        await trainer.publish(1)
        for version, names in ((2, ()), (1, ("nothing",))):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await trainer.fetch(version, *names)
            assert refused.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_file_is_sent_from_any_of_its_bytes(tmp_path: Path) -> None:
    """A reader that was cut off asks for the rest, each chunk with its checksum."""
    name = "model-00001-of-00002.safetensors"
    async with weights_service(tmp_path) as stub:
        await Trainer(stub=stub).publish(1)
        request = pb.FetchShardsRequest(run_id="run", weight_version=1, names=[name], offset=70_001)
        chunks = [chunk async for chunk in stub.FetchShards(request, timeout=10)]
        assert b"".join(chunk.data for chunk in chunks) == FILES[name][70_001:]
        assert (chunks[0].offset, chunks[1].offset) == (70_001, 70_001 + 1024 * 1024)
        for chunk in chunks:
            assert xxhash.xxh3_64_intdigest(chunk.data) == chunk.checksum
        for wrong in (
            pb.FetchShardsRequest(run_id="run", weight_version=1, names=[name], offset=2_000_000),
            pb.FetchShardsRequest(run_id="run", weight_version=1, offset=1),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                async for _ in stub.FetchShards(wrong, timeout=10):
                    pass
            assert refused.value.code() is INVALID


async def test_sources_form_relay_trees(tmp_path: Path) -> None:
    """Each file is fetched from the service by one known server, by the others from another one."""
    servers = [f"host-{number}:1" for number in range(3)]
    async with weights_service(tmp_path) as stub:
        await Trainer(stub=stub).publish(1)

        async def sources(address: str) -> dict[str, str]:
            request = pb.RequestSourcesRequest(run_id="run", weight_version=1, address=address)
            response = await stub.RequestSources(request, timeout=10)
            return {source.name: source.address for source in response.files}

        assert set((await sources("")).values()) == {""}
        for server in servers:
            await stub.RequestSources(
                pb.RequestSourcesRequest(run_id="run", address=server), timeout=10
            )
        told = {server: await sources(server) for server in servers}
        for name in FILES:
            assert sorted(bool(told[server][name]) for server in servers) == [False, True, True]
            assert all(told[server][name] != server for server in servers)
        assert set((await sources("")).values()) == {""}


async def test_old_versions_are_deleted_and_the_newest_kept(tmp_path: Path) -> None:
    """After a commit only the newest keep_versions are on disk; holes go with the old ones."""
    async with weights_service(tmp_path, keep_versions=2) as stub:
        trainer = Trainer(stub=stub)
        await trainer.publish(1)
        await trainer.begin(2, "never committed")
        for step in (2, 3, 4):
            await trainer.publish(step)
        assert names_in(tmp_path / "run" / "policy") == ["weight_v000004", "weight_v000005"]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await trainer.fetch(1)
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_version_being_read_is_not_deleted(tmp_path: Path) -> None:
    """A slow reader of an old version gets all of it; its files go once it is done."""
    folders, scope = WeightFolders(tmp_path), Scope(run_id="run", model="policy")
    await folders.make(scope, 1)
    with folders.reading(scope, 1):
        await folders.prune(scope, 2)
        assert folders.path(scope, 1).is_dir()
    await folders.prune(scope, 2)
    assert not folders.path(scope, 1).exists()


async def test_a_store_that_lost_data_does_not_reuse_versions(tmp_path: Path) -> None:
    """A restart on an empty store counts on from the folders on disk."""
    async with weights_service(tmp_path) as stub:
        assert await Trainer(stub=stub).publish(1) == 1
    async with weights_service(tmp_path) as stub:
        assert (await Trainer(stub=stub).begin(2)).weight_version == 2


async def test_watchers_receive_commits_of_all_replicas(tmp_path: Path, redis_url: str) -> None:
    """A watcher hears the newest version at once, then later ones, also from another replica."""
    async with (
        weights_service(tmp_path, redis_url) as here,
        weights_service(tmp_path, redis_url) as there,
    ):
        trainer = Trainer(stub=there, run_id="watched")
        await trainer.publish(1)
        await trainer.publish(2)
        watch = here.WatchVersions(pb.WatchVersionsRequest(run_id="watched"), timeout=10)
        assert (await anext(aiter(watch))).manifest.weight_version == 2
        await trainer.publish(3)
        assert (await anext(aiter(watch))).manifest.weight_version == 3
        resumed = here.WatchVersions(
            pb.WatchVersionsRequest(run_id="watched", after_weight_version=2), timeout=10
        )
        assert (await anext(aiter(resumed))).manifest.weight_version == 3


async def test_a_drain_ends_watches() -> None:
    """A draining replica ends its watches with UNAVAILABLE, so that clients reconnect."""
    feed = VersionFeed(memory_store(), poll_seconds=0.02)
    waiting = asyncio.ensure_future(feed.newer(Scope(run_id="run", model="policy"), 0))
    await asyncio.sleep(0)
    await feed.close()
    with pytest.raises(ServiceError) as ended:
        await waiting
    assert ended.value.code is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.ENOSPC, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (errno.EROFS, grpc.StatusCode.UNAVAILABLE),
    ],
)
async def test_a_full_or_broken_disk_has_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: grpc.StatusCode
) -> None:
    """The operating system's error reaches the trainer, with a retryable or permanent code."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    async with weights_service(tmp_path) as stub:
        monkeypatch.setattr(Path, "mkdir", fail)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await Trainer(stub=stub).begin(1)
    assert refused.value.code() is code
    assert os.strerror(number) in (refused.value.details() or "")
