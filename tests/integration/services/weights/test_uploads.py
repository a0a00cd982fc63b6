"""Files that reach the weights service without a common path, part by part."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc.aio
import pytest
import zstandard
from seamflow.errors import (
    ExhaustedError,
    InvalidRequestError,
    NotFoundError,
    PreconditionError,
    SeamflowError,
    StaleEpochError,
    decode,
)
from seamflow.weights.v1 import weight_service_pb2 as pb

from services.lib.weight_files.folder_names import write_probe
from services.weights import upload_receiver
from services.weights.keys import Scope
from tests.lib.weights.memory_store import MemoryStore
from tests.lib.weights.support import FILES, Trainer, describe, names_in, weights_service

MIB = 1 << 20
BIG = "model.safetensors"
DATA = os.urandom(3 * MIB + 12_345)


async def refusal(call: Awaitable[object]) -> SeamflowError:
    """The error of a call that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    return decode(refused.value)


async def test_uploaded_files_come_back_whole(tmp_path: Path) -> None:
    """Without any folder: uploaded part by part, committed, and fetched byte for byte."""
    async with weights_service(tmp_path, offer=False) as stub:
        trainer = Trainer(stub=stub)
        version = (await trainer.begin(1)).weight_version
        assert await trainer.uploaded(version, FILES) == {}
        sizes = {name: len(data) for name, data in FILES.items()}
        assert await trainer.upload(trainer.parts(version, FILES, 70_001)) == sizes
        assert await trainer.uploaded(version, FILES) == sizes
        assert await trainer.newest() == 0
        await trainer.commit(version)
        assert await trainer.fetch(version) == FILES
        assert await trainer.uploaded(version, FILES) == sizes


async def test_nothing_is_left_of_uploads_after_a_commit(tmp_path: Path) -> None:
    """Also of a file that no version used."""
    async with weights_service(tmp_path) as stub:
        trainer = Trainer(stub=stub)
        version = (await trainer.begin(1)).weight_version
        await trainer.upload(trainer.parts(version, {"unused": b"1", **FILES}))
        assert len(names_in(tmp_path / "run" / "policy" / "uploads")) == 1 + len(FILES)
        await trainer.commit(version)
        assert names_in(tmp_path / "run" / "policy") == ["weight_v000001"]
        assert names_in(tmp_path / "run" / "policy" / "weight_v000001") == sorted(FILES)


async def test_a_part_is_stored_once_and_gaps_are_refused(tmp_path: Path) -> None:
    """A repeated part changes nothing; a part beyond the end names where to continue."""
    async with weights_service(tmp_path) as stub:
        trainer = Trainer(stub=stub)
        await trainer.begin(1)
        first = trainer.part(1, BIG, DATA, 0, MIB)
        overlap = trainer.part(1, BIG, DATA, 1000, MIB + 1000)
        assert await trainer.upload([first, first, overlap, first]) == {BIG: MIB + 1000}
        error = await refusal(trainer.upload([trainer.part(1, BIG, DATA, 2 * MIB, 3 * MIB)]))
        assert (type(error), error.reason) == (PreconditionError, "OFFSET_GAP")
        assert BIG in str(error)
        assert f"follows {MIB + 1000} bytes" in str(error)
        rest = [trainer.part(1, BIG, DATA, at, at + MIB) for at in (MIB + 1000, 2 * MIB, 3 * MIB)]
        assert await trainer.upload(rest) == {BIG: len(DATA)}
        await trainer.commit(1, describe({BIG: DATA}))
        assert await trainer.fetch(1) == {BIG: DATA}


async def test_the_same_file_is_continued_under_another_version(tmp_path: Path) -> None:
    """A restarted trainer has a new epoch and version; other content of that name begins anew."""
    async with weights_service(tmp_path) as stub:
        before = Trainer(stub=stub)
        await before.begin(1)
        await before.upload([before.part(1, BIG, DATA, 0, MIB)])
        after = Trainer(stub=stub, epoch=2)
        version = (await after.begin(1, "after the restart")).weight_version
        assert version == 2
        assert await after.uploaded(version, {BIG: DATA}) == {BIG: MIB}
        assert await after.uploaded(version, {BIG: DATA[::-1]}) == {}
        await after.upload(
            [after.part(2, BIG, DATA, at, at + MIB) for at in (MIB, 2 * MIB, 3 * MIB)]
        )
        await after.commit(2, describe({BIG: DATA}))
        assert await after.fetch(2) == {BIG: DATA}


async def test_an_older_trainer_is_fenced_within_its_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the next look nothing more is stored, after a newer epoch began."""
    monkeypatch.setattr(upload_receiver, "_FENCE_SECONDS", 0.0)
    async with weights_service(tmp_path) as stub:
        older, newer = Trainer(stub=stub), Trainer(stub=stub, epoch=2)
        await older.begin(1)
        call = stub.UploadShards(timeout=10)
        await call.write(older.part(1, BIG, DATA, 0, MIB))
        async with asyncio.timeout(10):
            while await older.uploaded(1, {BIG: DATA}) != {BIG: MIB}:
                await asyncio.sleep(0.01)
        await newer.begin(1, "newer")
        await call.write(older.part(1, BIG, DATA, MIB, 2 * MIB))
        await call.done_writing()
        assert isinstance(await refusal(call), StaleEpochError)
        assert await older.uploaded(1, {BIG: DATA}) == {BIG: MIB}


async def test_a_stream_asks_the_store_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for each part, but for each version; a new stream of a stale trainer is refused."""
    asked = []
    fence = MemoryStore.fence

    async def counted(store: MemoryStore, scope: Scope, epoch: int, version: int) -> None:
        asked.append(version)
        await fence(store, scope, epoch, version)

    monkeypatch.setattr(MemoryStore, "fence", counted)
    monkeypatch.setattr(upload_receiver, "_FENCE_SECONDS", 3600.0)
    async with weights_service(tmp_path) as stub:
        older, newer = Trainer(stub=stub), Trainer(stub=stub, epoch=2)
        await older.begin(1)
        await older.begin(2)
        await older.upload([*older.parts(1, {BIG: DATA}), *older.parts(2, FILES)])
        assert asked == [1, 2]
        await newer.begin(1, "newer")
        assert isinstance(await refusal(older.upload(older.parts(1, FILES))), StaleEpochError)
        assert isinstance(await refusal(older.commit(1, describe({BIG: DATA}))), StaleEpochError)


def damaged(part: pb.UploadShardsRequest) -> pb.UploadShardsRequest:
    """The part with one wrong bit."""
    data = bytearray(part.data)
    data[len(data) // 2] ^= 1
    part.data = bytes(data)
    return part


async def test_a_damaged_part_is_refused(tmp_path: Path) -> None:
    """The error names file and offset, and the parts before it are kept."""
    async with weights_service(tmp_path) as stub:
        trainer = Trainer(stub=stub)
        await trainer.begin(1)
        wrong = damaged(trainer.part(1, BIG, DATA, MIB, 2 * MIB))
        error = await refusal(trainer.upload([trainer.part(1, BIG, DATA, 0, MIB), wrong]))
        assert error.reason == "CHECKSUM_MISMATCH"
        assert f"file '{BIG}': the part at byte {MIB}" in str(error)
        assert await trainer.uploaded(1, {BIG: DATA}) == {BIG: MIB}


async def test_without_checksums_the_commit_refuses_the_file(tmp_path: Path) -> None:
    """Negative control: a damaged part is stored, found by the SHA-256, and sent again."""
    async with weights_service(tmp_path) as stub:
        trainer = Trainer(stub=stub)
        await trainer.begin(1)
        parts = list(trainer.parts(1, {BIG: DATA}))
        damaged(parts[1]).ClearField("checksum")
        assert await trainer.upload(parts) == {BIG: len(DATA)}
        error = await refusal(trainer.commit(1, describe({BIG: DATA})))
        assert error.reason == "CHECKSUM_MISMATCH"
        assert BIG in str(error)
        assert await trainer.uploaded(1, {BIG: DATA}) == {}
        await trainer.upload(trainer.parts(1, {BIG: DATA}))
        await trainer.commit(1, describe({BIG: DATA}))
        assert await trainer.fetch(1) == {BIG: DATA}


async def test_an_unfinished_file_is_not_committed(tmp_path: Path) -> None:
    """The error names the file and what there is of it; so does one for a file never sent."""
    async with weights_service(tmp_path) as stub:
        trainer = Trainer(stub=stub)
        await trainer.begin(1)
        assert (await refusal(trainer.commit(1))).reason == "INCOMPLETE_PUBLISH"
        await trainer.upload([trainer.part(1, BIG, DATA, 0, MIB)])
        error = await refusal(trainer.commit(1, describe({BIG: DATA})))
        assert error.reason == "INCOMPLETE_PUBLISH"
        assert f"file '{BIG}' has {MIB} of {len(DATA)} bytes" in str(error)
        assert await trainer.newest() == 0


async def test_concurrent_commits_of_an_upload_agree(tmp_path: Path) -> None:
    """A repeated commit finds the files that the other one moves."""
    async with weights_service(tmp_path) as stub:
        trainer = Trainer(stub=stub)
        await trainer.begin(1)
        await trainer.upload(trainer.parts(1, {**FILES, BIG: DATA}))
        files = describe({**FILES, BIG: DATA})
        answers = await asyncio.gather(*(trainer.commit(1, files) for _ in range(8)))
        assert all(answer == answers[0] for answer in answers)
        assert await trainer.fetch(1) == {**FILES, BIG: DATA}


async def test_compressed_parts_are_stored_plain(tmp_path: Path) -> None:
    """Zstandard is decoded; a frame of another length is refused as damaged."""
    plain = b"weights" * 1000
    async with weights_service(tmp_path) as stub:
        trainer = Trainer(stub=stub)
        await trainer.begin(1)
        part = trainer.part(1, BIG, plain)
        part.data = zstandard.ZstdCompressor().compress(plain)
        part.ClearField("checksum")
        part.encoding, part.num_bytes = pb.SHARD_ENCODING_ZSTD, len(plain) - 1
        assert (await refusal(trainer.upload([part]))).reason == "CHECKSUM_MISMATCH"
        part.num_bytes = len(plain)
        await trainer.upload([part])
        await trainer.commit(1, describe({BIG: plain}))
        assert await trainer.fetch(1) == {BIG: plain}


WRONG: list[tuple[str, Callable[[pb.UploadShardsRequest], object]]] = [
    ("run_id", lambda part: setattr(part, "run_id", "../x")),
    ("weight_version", lambda part: setattr(part, "weight_version", 0)),
    ("epoch", lambda part: setattr(part, "epoch", 0)),
    ("file.name", lambda part: setattr(part.file, "name", "../x")),
    ("file.name", lambda part: setattr(part.file, "name", ".probe")),
    ("file.sha256", lambda part: setattr(part.file, "sha256", "../../x")),
    ("file.num_bytes", lambda part: setattr(part.file, "num_bytes", -1)),
    ("offset", lambda part: setattr(part, "offset", -1)),
    ("offset", lambda part: setattr(part, "offset", 1)),
    ("data", lambda part: setattr(part, "data", bytes(MIB + 1))),
    ("encoding", lambda part: setattr(part, "encoding", pb.SHARD_ENCODING_DELTA)),
    ("encoding", lambda part: setattr(part, "encoding", 99)),
]


@pytest.mark.parametrize(("field", "spoil"), WRONG)
async def test_wrong_parts_are_refused_by_field(
    tmp_path: Path, field: str, spoil: Callable[[pb.UploadShardsRequest], object]
) -> None:
    """Nothing is stored, and the error begins with the field's name."""
    async with weights_service(tmp_path) as stub:
        trainer = Trainer(stub=stub)
        await trainer.begin(1)
        part = trainer.part(1, BIG, b"whole")
        spoil(part)
        error = await refusal(trainer.upload([part]))
        assert isinstance(error, InvalidRequestError)
        assert str(error).startswith(f"{field} is ")
        assert not (tmp_path / "run" / "policy" / "uploads").exists()


async def test_a_version_must_be_begun(tmp_path: Path) -> None:
    """Parts and probes of a version that was never allocated are not stored."""
    async with weights_service(tmp_path) as stub:
        trainer = Trainer(stub=stub)
        upload = trainer.upload([trainer.part(1, BIG, b"whole")])
        assert isinstance(await refusal(upload), NotFoundError)
        assert isinstance(await refusal(trainer.folder(1)), NotFoundError)
        assert names_in(tmp_path) == []


async def test_a_full_disk_asks_for_a_retry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The upload goes on where it stopped once there is room."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async with weights_service(tmp_path) as stub:
        trainer = Trainer(stub=stub)
        await trainer.begin(1)
        await trainer.upload([trainer.part(1, BIG, DATA, 0, MIB)])
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            error = await refusal(trainer.upload([trainer.part(1, BIG, DATA, MIB, 2 * MIB)]))
        assert isinstance(error, ExhaustedError)
        assert error.retry_after
        assert await trainer.uploaded(1, {BIG: DATA}) == {BIG: MIB}


async def probed(trainer: Trainer, written: pb.FolderProbe) -> bool:
    """Whether the service says it sees this probe in version 1."""
    request = pb.ProbeFolderRequest(run_id="run", weight_version=1, written=written)
    return (await trainer.stub.ProbeFolder(request, timeout=10)).seen


async def test_a_callers_probe_is_seen_only_with_its_content(tmp_path: Path) -> None:
    """A probe written elsewhere, or with another content, is not seen."""
    async with weights_service(tmp_path / "here") as stub:
        trainer = Trainer(stub=stub)
        _, folder = await trainer.begun(1)
        written = write_probe(Path(folder))
        assert await probed(trainer, written)
        other = pb.FolderProbe(name=written.name, content=b"x" * 32)
        assert not await probed(trainer, other)
        (tmp_path / "there").mkdir()
        assert not await probed(trainer, write_probe(tmp_path / "there"))
        linked = pb.FolderProbe(name=".probe-" + "0" * 32, content=b"elsewhere")
        (tmp_path / "elsewhere").write_bytes(linked.content)
        (Path(folder) / linked.name).symlink_to(tmp_path / "elsewhere")
        assert not await probed(trainer, linked)


@pytest.mark.parametrize("name", ["", "config.json", ".probe-x", ".probe-" + "0" * 32 + "/../x"])
async def test_only_probes_can_be_asked_for(tmp_path: Path, name: str) -> None:
    """The rpc cannot be used to guess the content of other files."""
    async with weights_service(tmp_path) as stub:
        trainer = Trainer(stub=stub)
        await trainer.begin(1)
        error = await refusal(probed(trainer, pb.FolderProbe(name=name, content=b"x")))
        assert isinstance(error, InvalidRequestError)
        assert str(error).startswith("written.name is ")


async def test_a_folder_need_not_be_offered(tmp_path: Path) -> None:
    """Without the offer a caller gets neither a path nor a probe."""
    request = pb.ProbeFolderRequest(run_id="run", weight_version=1)
    async with weights_service(tmp_path, offer=False) as stub:
        await Trainer(stub=stub).begin(1)
        assert await stub.ProbeFolder(request, timeout=10) == pb.ProbeFolderResponse()
        assert names_in(tmp_path / "run" / "policy" / "weight_v000001") == []


async def test_the_probe_of_a_folder_stays(tmp_path: Path, redis_url: str) -> None:
    """All replicas name the same one, whoever wrote it first."""
    request = pb.ProbeFolderRequest(run_id="probed", weight_version=1)
    async with (
        weights_service(tmp_path, redis_url) as one,
        weights_service(tmp_path, redis_url) as other,
    ):
        _, folder = await Trainer(stub=one, run_id="probed").begun(1)
        answers = [await stub.ProbeFolder(request, timeout=10) for stub in (one, other, one)]
        assert all(answer == answers[0] for answer in answers)
        assert answers[0].folder == folder
        assert names_in(Path(folder)) == [".probe"]
