"""A trainer and a weights service without any path in common: weights travel by rpc, once."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load
from seamflow.errors import PreconditionError, StaleEpochError
from seamflow.stubs import async_stub
from seamflow.weights.v1 import weight_service_pb2 as pb
from seamflow.weights.v1.weight_service_pb2_grpc import WeightServiceStub

from bench.rollout.held_weights import held_weights
from services.lib.weight_files.shard_chunks import encode_upload
from services.weights.version_folders import WeightFolders
from tests.lib.trainer.training import Training
from tests.lib.weights.support import Trainer, weights_channel
from tests.system.services.weights.process import WeightsProcess, running
from tests.system.trainer.publish.publishing import SentBytes, big_weights
from trainer.publish.publisher import Publisher
from trainer.publish.weight_folder import write_folder

pytestmark = pytest.mark.timeout(120)
WEIGHTS = "model.safetensors"
NOT_OFFERED = ("--no-offer-folder",)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The weights service's, which the trainer does not know; the trainer's is `there`."""
    made = tmp_path / f"service-{uuid.uuid4().hex}"
    made.mkdir()
    return made


@pytest.fixture
async def service(folder: Path, redis_url: str) -> AsyncIterator[WeightsProcess]:
    """A weights service that offers no folder."""
    async with running(folder, redis_url, *NOT_OFFERED) as process:
        yield process


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> SentBytes:
    """What this process's publishers send."""
    return SentBytes(monkeypatch)


@pytest.fixture
def whole(model: Path, tmp_path: Path) -> dict[str, bytes]:
    """The files that a publish of `big_weights` has."""
    files = write_folder(tmp_path / "whole", model, big_weights())
    return {file.name: (tmp_path / "whole" / file.name).read_bytes() for file in files}


def publisher_of(
    service: WeightsProcess, model: Path, tmp_path: Path, **settings: Any
) -> Publisher:
    """A trainer's, with its own folder."""
    upload = tmp_path / "there" / "upload"
    return Publisher(service.channel, service.trainer.run_id, model, upload, **settings)


async def publish(publisher: Publisher, epoch: int = 1) -> int:
    """Publish `big_weights` as step 1."""
    return await publisher.publish(held_weights(big_weights()), step=1, parent=0, epoch=epoch)


def size_of(files: dict[str, bytes]) -> int:
    """Bytes of all files."""
    return sum(len(data) for data in files.values())


@pytest.mark.parametrize("compress", [False, True])
async def test_weights_travel_without_a_common_path(
    service: WeightsProcess,
    model: Path,
    tmp_path: Path,
    sent: SentBytes,
    whole: dict[str, bytes],
    compress: bool,
) -> None:
    """Every byte is sent once, what is committed is bit-identical, and nothing is left behind."""
    version = await publish(publisher_of(service, model, tmp_path, compress=compress))
    assert await service.trainer.fetch(version) == whole
    assert (sent.num_bytes == size_of(whole)) == (not compress)
    assert sent.num_bytes <= size_of(whole)
    assert list((tmp_path / "there" / "upload").iterdir()) == []


async def test_a_trainer_trains_without_a_common_path(
    service: WeightsProcess, training: Training, sent: SentBytes
) -> None:
    """The real loop: each step's weights are uploaded in its background and committed."""
    training.weights_address = f"127.0.0.1:{service.port}"
    records = await (await training.fill(2)).train(2)
    assert [record["weight_version"] for record in records] == [1, 2]
    reader = replace(service.trainer, run_id=training.client.run_id)
    first, second = [await reader.fetch(version) for version in (1, 2)]
    assert first.keys() == second.keys()
    assert load(first[WEIGHTS]).keys() == load(second[WEIGHTS]).keys()
    assert first[WEIGHTS] != second[WEIGHTS]
    assert sent.num_bytes == size_of(first) + size_of(second)
    assert list((training.checkpoints / "upload").iterdir()) == []


async def test_a_killed_weights_service_gets_only_the_rest(
    folder: Path,
    redis_url: str,
    model: Path,
    tmp_path: Path,
    sent: SentBytes,
    whole: dict[str, bytes],
) -> None:
    """SIGKILL in the middle: after its restart the upload continues from what was stored."""
    killed = threading.Event()

    def hold_back(head: Any, data: bytes) -> None:
        if head.file.name == WEIGHTS and head.offset >= size_of(whole) // 2:
            assert killed.wait(60)

    sent.change = hold_back
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(running(folder, redis_url, *NOT_OFFERED))
        publishing = asyncio.create_task(publish(publisher_of(first, model, tmp_path)))
        while (await _held(first, whole)).get(WEIGHTS, 0) < 4 << 20:
            await asyncio.sleep(0.02)
        first.kill()
        await first.process.wait()
        killed.set()
        again = running(folder, redis_url, *NOT_OFFERED, port=first.port)
        second = await stack.enter_async_context(again)
        version = await publishing
        assert await second.trainer.fetch(version) == whole
    assert sent.num_bytes - size_of(whole) < size_of(whole)


@pytest.mark.long(short="tests/system/trainer/publish/test_uploader.py")
async def test_a_killed_publisher_sends_only_the_rest(
    service: WeightsProcess, model: Path, tmp_path: Path, sent: SentBytes, whole: dict[str, bytes]
) -> None:
    """Its next process, under another epoch and version, continues the same files."""
    del model  # the killed process makes the same one
    there = tmp_path / "killed"
    command = ("-m", "tests.system.trainer.publish.publishing", str(service.port))
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, service.trainer.run_id, str(there), "1"
    )
    held: dict[str, int] = {}
    while held.get(WEIGHTS, 0) < size_of(whole) // 3:
        await asyncio.sleep(0.02)
        assert process.returncode is None
        held = await _held(service, whole)
    process.send_signal(signal.SIGKILL)
    await process.wait()
    held = await _held(service, whole)
    assert held[WEIGHTS] < len(whole[WEIGHTS])
    upload = Publisher(service.channel, service.trainer.run_id, there / "model", there / "upload")
    assert await publish(upload, epoch=2) == 2
    assert await service.trainer.fetch(2) == whole
    assert sent.num_bytes == size_of(whole) - sum(held.values())
    assert sent.num_bytes < len(whole[WEIGHTS])
    assert list((there / "upload").iterdir()) == []


async def _held(service: WeightsProcess, files: dict[str, bytes]) -> dict[str, int]:
    try:
        return await service.trainer.uploaded(1, files)
    except Exception:
        return {}


@pytest.mark.parametrize("sends_again", [True, False])
async def test_a_version_without_a_file_is_never_committed(
    service: WeightsProcess,
    model: Path,
    tmp_path: Path,
    whole: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    *,
    sends_again: bool,
) -> None:
    """A bucket that nobody sent is sent when the commit is refused.

    Negative control: without that, nothing is committed.
    """

    async def nothing(*_: object) -> None:
        pass

    monkeypatch.setattr(Publisher, "_upload_here", nothing)
    if not sends_again:
        monkeypatch.setattr(Publisher, "_bring_again", nothing)
    publishing = publish(publisher_of(service, model, tmp_path))
    if sends_again:
        assert await service.trainer.fetch(await publishing) == whole
    else:
        with pytest.raises(PreconditionError, match=WEIGHTS):
            await publishing
        assert await service.trainer.newest() == 0


async def test_an_older_trainer_is_fenced_in_the_middle_of_its_upload(
    service: WeightsProcess, model: Path, tmp_path: Path, sent: SentBytes
) -> None:
    """It ends with a stale epoch, and its version never becomes visible."""
    loop, newer = asyncio.get_running_loop(), service.trainer.newer()

    def take_over(head: Any, data: bytes) -> None:
        if head.file.name == WEIGHTS and head.offset == 8 << 20:
            begun = asyncio.run_coroutine_threadsafe(newer.begin(1, "newer"), loop)
            assert begun.result(30).weight_version == 2

    sent.change = take_over
    with pytest.raises(StaleEpochError):
        await publish(publisher_of(service, model, tmp_path))
    assert await service.trainer.newest() == 0


class Damage:
    """Flips a bit of the part at 4 MiB, a number of times."""

    def __init__(self, times: float, *, checksums: bool = True) -> None:
        self.times, self.checksums = times, checksums

    def __call__(self, head: Any, data: bytes) -> bytes | None:
        """The message, as it arrives."""
        if head.file.name != WEIGHTS or head.offset != 4 << 20 or self.times <= 0:
            return None
        self.times -= 1
        message = encode_upload(head, data)
        if not self.checksums:
            request = pb.UploadShardsRequest.FromString(message)
            request.ClearField("checksum")
            message = request.SerializeToString()
        # The data comes last, or the encoder of the class above puts it before the checksum.
        at = message.index(data[:64]) + 32
        return message[:at] + bytes([message[at] ^ 1]) + message[at + 1 :]


async def test_a_part_damaged_on_its_way_is_sent_again(
    service: WeightsProcess, model: Path, tmp_path: Path, sent: SentBytes, whole: dict[str, bytes]
) -> None:
    """Only what followed it is sent again."""
    sent.change = Damage(2)
    version = await publish(publisher_of(service, model, tmp_path))
    assert await service.trainer.fetch(version) == whole
    assert size_of(whole) < sent.num_bytes < 2 * size_of(whole)


async def test_a_part_that_is_always_damaged_ends_the_upload(
    service: WeightsProcess, model: Path, tmp_path: Path, sent: SentBytes
) -> None:
    """The error names file and offset."""
    sent.change = Damage(float("inf"))
    with pytest.raises(PreconditionError, match=f"'{WEIGHTS}': the part at byte {4 << 20}"):
        await publish(publisher_of(service, model, tmp_path))
    assert await service.trainer.newest() == 0


async def test_without_checksums_the_commit_finds_the_damage(
    service: WeightsProcess, model: Path, tmp_path: Path, sent: SentBytes, whole: dict[str, bytes]
) -> None:
    """Negative control: the damage reaches the SHA-256 of the whole file, which is sent again."""
    sent.change = Damage(1, checksums=False)
    version = await publish(publisher_of(service, model, tmp_path))
    assert await service.trainer.fetch(version) == whole
    assert sent.num_bytes == size_of(whole) + len(whole[WEIGHTS])
    sent.change = Damage(float("inf"), checksums=False)
    with pytest.raises(PreconditionError, match="SHA-256"):
        await publish(publisher_of(service, model, tmp_path), epoch=2)


async def test_a_folder_that_both_see_is_written_to_directly(
    folder: Path, redis_url: str, model: Path, tmp_path: Path, sent: SentBytes
) -> None:
    """No setting names it and nothing is uploaded; a setting of the trainer forgoes it."""
    async with running(folder, redis_url) as service:
        run_id = service.trainer.run_id
        version = await publish(publisher_of(service, model, tmp_path))
        written = folder / "weights" / run_id / "policy" / f"weight_v{version:06d}"
        assert (written / ".complete").exists()
        assert sent.num_parts == 0
        assert sorted(path.name for path in written.glob(".probe*")) == [".probe"]
        assert not (tmp_path / "there").exists()
        upload = tmp_path / "there" / "upload"
        other = Publisher(service.channel, run_id, model, upload, find_folder=False)
        assert await publish(other, epoch=2) == 2
        assert sent.num_parts > 0
        assert await service.trainer.fetch(2) == await service.trainer.fetch(1)


@pytest.mark.parametrize("side", ["the service's probe", "the trainer's probe", "neither"])
async def test_a_folder_of_the_same_path_on_another_disk_is_not_used(
    model: Path, tmp_path: Path, sent: SentBytes, monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    """Each side must see what the other one wrote; else weights are uploaded.

    "neither" is the negative control: without these differences the folder is used.
    """
    if side == "the service's probe":
        other = pb.FolderProbe(name=".probe", content=b"of the disk of another machine")

        async def probe(*_: object) -> pb.FolderProbe:
            return other

        monkeypatch.setattr(WeightFolders, "probe", probe)
    elif side == "the trainer's probe":

        async def sees(*_: object) -> bool:
            return False

        monkeypatch.setattr(WeightFolders, "sees", sees)
    async with weights_channel(tmp_path / "here") as channel:
        upload = tmp_path / "there" / "upload"
        await publish(Publisher(channel, "run", model, upload))
        trainer = Trainer(stub=async_stub(WeightServiceStub, channel))
        assert await trainer.newest() == 1
        files = await trainer.fetch(1)
    assert WEIGHTS in files
    assert (sent.num_bytes == size_of(files)) == (side != "neither")
    assert (sent.num_bytes == 0) == (side == "neither")
