"""Files of a version that are checked and offered before its commit."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Awaitable
from io import BufferedReader
from pathlib import Path

import grpc.aio
import pytest
from seamflow.errors import NotFoundError, PreconditionError, SeamflowError, StaleEpochError, decode
from seamflow.weights.v1 import weight_service_pb2 as pb

from tests.lib.weights.support import FILES, Trainer, describe, names_in, weights_service, write

BIG = "model-00001-of-00002.safetensors"
FIRST = {BIG: FILES[BIG]}


async def refusal(call: Awaitable[object]) -> SeamflowError:
    """The error of a call that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    return decode(refused.value)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were read to compute their SHA-256."""
    names: list[str] = []
    digest = hashlib.file_digest

    def noted(file: BufferedReader, algorithm: str) -> object:
        names.append(Path(f"/proc/self/fd/{file.fileno()}").readlink().name)
        return digest(file, algorithm)

    monkeypatch.setattr(hashlib, "file_digest", noted)
    return names


async def test_the_commit_reads_no_announced_file(tmp_path: Path, read: list[str]) -> None:
    """A file of the folder is read at its announcement; the others at the commit, as ever."""
    async with weights_service(tmp_path) as stub:
        trainer = Trainer(stub=stub)
        version, folder = await trainer.begun(1)
        write(folder)
        await trainer.announce(version, FIRST)
        await trainer.announce(version, FIRST)
        assert read == [BIG]
        await trainer.commit(version)
        assert sorted(read) == sorted(FILES)
        assert await trainer.fetch(version) == FILES


async def test_an_uploaded_file_is_never_read_again(tmp_path: Path, read: list[str]) -> None:
    """It is hashed while its parts arrive; another process, which has not, reads it."""
    async with weights_service(tmp_path) as stub:
        trainer = Trainer(stub=stub)
        await trainer.begin(1)
        await trainer.upload(trainer.parts(1, FILES, 70_001))
        await trainer.announce(1, FIRST)
        await trainer.commit(1)
        assert read == []
        await trainer.begin(2)
        await trainer.upload([trainer.part(2, BIG, FILES[BIG], 0, 70_001)])
    async with weights_service(tmp_path) as stub:
        trainer = Trainer(stub=stub, epoch=2)
        version = (await trainer.begin(2)).weight_version
        assert await trainer.uploaded(version, FIRST) == {BIG: 70_001}
        await trainer.upload(trainer.parts(version, FIRST, 70_001))
        await trainer.announce(version, FIRST)
        await trainer.commit(version, describe(FIRST))
        assert read == [f"{BIG}.{describe(FIRST)[0].sha256}"]


async def test_an_announced_file_that_is_changed_is_checked_again(tmp_path: Path) -> None:
    """In the folder before the commit: the version stays invisible."""
    async with weights_service(tmp_path) as stub:
        trainer = Trainer(stub=stub)
        version, folder = await trainer.begun(1)
        write(folder)
        await trainer.announce(version, FILES)
        path = Path(folder) / BIG
        path.write_bytes(FILES[BIG][::-1])
        os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
        error = await refusal(trainer.commit(version))
        assert error.reason == "CHECKSUM_MISMATCH"
        assert await trainer.newest() == 0
        write(folder)
        await trainer.commit(version)


async def test_a_damaged_file_is_not_announced(tmp_path: Path) -> None:
    """Nor one that is missing, or of a version that was not begun, or by a stale trainer."""
    async with weights_service(tmp_path) as stub:
        trainer = Trainer(stub=stub)
        version, folder = await trainer.begun(1)
        error = await refusal(trainer.announce(version, FIRST))
        assert (type(error), error.reason) == (PreconditionError, "INCOMPLETE_PUBLISH")
        write(folder, {BIG: FILES[BIG][::-1]})
        error = await refusal(trainer.announce(version, FIRST))
        assert (type(error), error.reason) == (PreconditionError, "CHECKSUM_MISMATCH")
        assert isinstance(await refusal(trainer.fetch(version)), NotFoundError)
        write(folder)
        assert isinstance(await refusal(trainer.announce(version + 1, FIRST)), NotFoundError)
        await trainer.newer().begin(1, "newer")
        assert isinstance(await refusal(trainer.announce(version, FIRST)), StaleEpochError)


async def test_announced_files_are_served_but_their_version_is_not(tmp_path: Path) -> None:
    """FetchShards has them; the newest version is the last committed one."""
    async with weights_service(tmp_path) as stub:
        trainer = Trainer(stub=stub)
        await trainer.begin(1)
        await trainer.upload(trainer.parts(1, FILES))
        await trainer.announce(1, FIRST)
        assert await trainer.fetch(1) == FIRST
        assert await trainer.newest() == 0
        assert names_in(tmp_path / "run" / "policy" / "weight_v000001") == [BIG]
        manifest = pb.GetManifestRequest(run_id="run", weight_version=1)
        assert isinstance(await refusal(stub.GetManifest(manifest)), NotFoundError)
        assert isinstance(await refusal(trainer.fetch(1, "config.json")), NotFoundError)
        await trainer.commit(1)
        await trainer.announce(1, FIRST)
        assert await trainer.fetch(1) == FILES
        other = trainer.announce(1, {"other": b""})
        assert (await refusal(other)).reason == "ALREADY_EXISTS"


async def test_a_restarted_trainer_announces_the_same_upload(tmp_path: Path) -> None:
    """Under another version; the uploaded bytes are still there, and linked into both folders."""
    async with weights_service(tmp_path) as stub:
        before = Trainer(stub=stub)
        await before.begin(1)
        await before.upload(before.parts(1, FILES))
        await before.announce(1, FILES)
        after = before.newer()
        version = (await after.begin(1, "after the restart")).weight_version
        assert await after.uploaded(version, FILES) == {n: len(d) for n, d in FILES.items()}
        await after.announce(version, FIRST)
        await after.commit(version)
        assert await after.fetch(version) == FILES
        assert not (tmp_path / "run" / "policy" / "uploads").exists()


async def test_watchers_that_ask_hear_of_announced_files(tmp_path: Path) -> None:
    """With all files so far, then of the commit; others hear of the commit alone."""
    async with weights_service(tmp_path) as stub:
        trainer = Trainer(stub=stub)
        version, folder = await trainer.begun(1)
        write(folder)
        watch = aiter(
            stub.WatchVersions(
                pb.WatchVersionsRequest(run_id="run", with_announced=True), timeout=9
            )
        )
        plain = aiter(stub.WatchVersions(pb.WatchVersionsRequest(run_id="run"), timeout=9))
        for number, name in enumerate(FILES, 1):
            hearing = asyncio.ensure_future(anext(watch))
            await trainer.announce(version, {name: FILES[name]})
            heard = await hearing
            assert not heard.HasField("manifest")
            assert list(heard.announced.files) == describe(FILES)[:number]
            assert heard.announced.weight_version == version
        await trainer.commit(version)
        for stream in (watch, plain):
            heard = await anext(stream)
            assert heard.manifest.weight_version == version
            assert not heard.HasField("announced")
