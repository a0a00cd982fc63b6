"""Published folders are what a rollout engine can load."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from seamflow.channel import connect
from seamflow.weights.v1 import weight_service_pb2 as pb
from seamflow.weights.v1.weight_service_pb2_grpc import (
    WeightServiceServicer,
    add_WeightServiceServicer_to_server,
)
from torch.distributed import HashStore  # type: ignore[attr-defined]
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.rollout.held_weights import held_weights
from services.chassis.config.settings import ServerConfig
from services.chassis.rpc.clients import weights_channel
from services.chassis.rpc.server import Service, started
from services.lib.weight_files.folder_names import own_probe, sees
from services.weights.config import WeightsConfig
from services.weights.servicer import WeightServicer
from tests.lib.weights.support import in_memory
from trainer.commands import WriteBuckets
from trainer.publish import bucket_writer, publisher, weight_folder
from trainer.publish.bucket_plan import plan_buckets, whole_tensors
from trainer.publish.bucket_writer import BucketWriter, Snapshot, WritingRank
from trainer.publish.snapshot_weights import SnapshotWeights


def test_a_published_folder_loads_and_its_checksums_match(model: Path, tmp_path: Path) -> None:
    """Config, tokenizer and changed weights; every file is described; the marker is there."""
    tensors = {name: value.double() + 0.5 for name, value in weights(model).items()}
    files = weight_folder.write_folder(tmp_path / "v", model, tensors)
    manifest = json.loads((tmp_path / "v/manifest.json").read_text())
    assert [entry["name"] for entry in manifest["files"]] == [file.name for file in files]
    for file in files:
        content = (tmp_path / "v" / file.name).read_bytes()
        assert file.num_bytes == len(content)
        assert file.sha256 == hashlib.sha256(content).hexdigest()
    assert (tmp_path / "v/.complete").exists()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "v", local_files_only=True)
    for name, parameter in loaded.named_parameters():
        torch.testing.assert_close(parameter.double(), tensors[name])
        assert parameter.dtype == torch.float64
    assert len(AutoTokenizer.from_pretrained(tmp_path / "v", local_files_only=True)) > 0


def test_large_weights_are_split_over_indexed_files(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a limit of 4 kB the folder has many files, and loads the same."""
    monkeypatch.setattr(weight_folder, "_FILE_BYTES", 4096)
    tensors = weights(model)
    files = weight_folder.write_folder(tmp_path, model, tensors)
    assert sum(file.name.endswith(".safetensors") for file in files) > 1
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, local_files_only=True)
    for name, parameter in loaded.named_parameters():
        torch.testing.assert_close(parameter, tensors[name])


def weights(model: Path) -> dict[str, torch.Tensor]:
    """The tensors of the test model."""
    return load_file(model / "model.safetensors")


class SlowWeights(WeightServiceServicer):
    """A weights service one of whose calls is never answered."""

    def __init__(self, folder: Path, silent: str = "nothing") -> None:
        self.folder, self.silent = folder, silent
        self.on_silence: Callable[[], None] = lambda: None
        self.committed: list[int] = []

    async def _answer(self, call: str) -> None:
        if call == self.silent:
            self.on_silence()
            await asyncio.Event().wait()

    async def BeginPublish(self, request: pb.BeginPublishRequest, context: Any) -> Any:
        """A version per step."""
        await self._answer("BeginPublish")
        return pb.BeginPublishResponse(weight_version=request.step)

    async def ProbeFolder(self, request: pb.ProbeFolderRequest, context: Any) -> Any:
        """A folder per step."""
        await self._answer("ProbeFolder")
        if self.silent == "UploadShards":
            return pb.ProbeFolderResponse()
        folder = self.folder / str(request.weight_version)
        folder.mkdir(exist_ok=True)
        seen = sees(folder, request.written)
        return pb.ProbeFolderResponse(folder=str(folder), probe=own_probe(folder), seen=seen)

    async def GetUpload(self, request: pb.GetUploadRequest, context: Any) -> Any:
        """Nothing is here."""
        return pb.GetUploadResponse()

    async def UploadShards(self, requests: Any, context: Any) -> Any:
        """Reads nothing."""
        await self._answer("UploadShards")

    async def CommitPublish(self, request: pb.CommitPublishRequest, context: Any) -> Any:
        """Remember it."""
        await self._answer("CommitPublish")
        self.committed.append(request.weight_version)
        return pb.CommitPublishResponse()


@asynccontextmanager
async def connected_publisher(
    service: SlowWeights, model: Path, phase_seconds: float
) -> AsyncIterator[publisher.Publisher]:
    """A publisher to this service."""
    offered = Service(servicers=[(add_WeightServiceServicer_to_server, service)])
    async with (
        started(offered, ServerConfig(drain_seconds=0.0)) as port,
        connect(f"127.0.0.1:{port}") as channel,
    ):
        upload = service.folder / "upload"
        yield publisher.Publisher(channel, "run", model, upload, phase_seconds=phase_seconds)


@pytest.mark.parametrize(
    ("silent", "error"),
    [
        ("BeginPublish", publisher.PublishPostponed),
        ("ProbeFolder", publisher.PublishPostponed),
        ("UploadShards", publisher.PublishPostponed),
        ("writing", publisher.PublishPostponed),
        ("CommitPublish", publisher.CommitUnknown),
        ("nothing", None),
    ],
)
async def test_every_phase_of_a_publish_has_a_deadline(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    silent: str,
    error: type[publisher.PublishTimeout] | None,
) -> None:
    """The error names the phase, its deadline and the cure; only the commit leaves a doubt."""
    service, written = SlowWeights(tmp_path, silent), threading.Event()
    loop = asyncio.get_running_loop()
    now = loop.time

    def pass_the_deadline() -> None:
        # Only once a phase hangs, so that those before it have as long as they need.
        monkeypatch.setattr(loop, "time", lambda: now() + 600.0)

    def write(*given: Any, **named: Any) -> pb.WeightFile:
        if silent == "writing":
            loop.call_soon_threadsafe(pass_the_deadline)
            written.wait(30)
        return weight_folder.write_weights(*given, **named)

    service.on_silence = pass_the_deadline
    monkeypatch.setattr(bucket_writer, "write_weights", write)
    async with connected_publisher(service, model, 600.0) as trainer:
        publishing = trainer.publish(held_weights(weights(model)), step=1, parent=0, epoch=1)
        if error is None:
            assert await publishing == 1
        else:
            with pytest.raises(error, match=f"{silent}.* not done after 600 s; ") as raised:
                await publishing
            assert raised.value.cure
        written.set()
    assert service.committed == ([1] if error is None else [])


@pytest.mark.parametrize("deletes", [True, False])
async def test_a_version_that_does_not_fit_leaves_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, deletes: bool
) -> None:
    """Neither half a version, which would keep the disk full, nor a commit; the next one is whole.

    Negative control: without the deletion the half stays.
    """
    service, begun = SlowWeights(tmp_path), list[Path]()

    def half(path: Path, *_: object, **__: object) -> pb.WeightFile:
        path.write_bytes(b"half")
        begun.append(path.parent)
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    async with connected_publisher(service, model, 60.0) as trainer:
        with monkeypatch.context() as patched:
            patched.setattr(bucket_writer, "write_weights", half)
            if not deletes:
                patched.setattr("shutil.rmtree", lambda *_, **__: None)
            with pytest.raises(OSError, match="No space left on device"):
                await trainer.publish(held_weights(weights(model)), step=1, parent=0, epoch=1)
        assert begun[0].exists() is not deletes
        assert service.committed == []
        if deletes:
            await trainer.publish(held_weights(weights(model)), step=2, parent=0, epoch=1)
            assert len(service.committed) == 1


async def test_while_a_write_hangs_no_other_begins(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A publish postponed in the meantime is never written: the next write is the newest weights.

    So no two threads write at the same time, not even into different folders.
    """
    service, going_on = SlowWeights(tmp_path), threading.Event()
    begun: list[str] = []
    tensors, store = weights(model), HashStore()
    plan = plan_buckets(whole_tensors(tensors), dict, 1 << 30)
    writer = BucketWriter(WritingRank(number=0, seconds=60.0), store)

    def slow(path: Path, *given: Any, **named: Any) -> pb.WeightFile:
        begun.append(path.parent.name)
        assert going_on.wait(30)
        return weight_folder.write_weights(path, *given, **named)

    async def give(order: WriteBuckets) -> None:
        writer.start(order)

    def newest() -> SnapshotWeights:
        writer.hold(Snapshot(plan=plan, parts=tensors, convert=dict))
        return SnapshotWeights(plan, store, give)

    monkeypatch.setattr(bucket_writer, "write_weights", slow)
    async with connected_publisher(service, model, 0.2) as trainer:
        while not begun:
            with pytest.raises(publisher.PublishPostponed):
                await trainer.publish(newest(), step=1, parent=0, epoch=1)
        for step in (2, 3):
            with pytest.raises(publisher.PublishPostponed):
                await trainer.publish(newest(), step=step, parent=0, epoch=1)
        assert begun == ["1"]
        going_on.set()
        while not service.committed:
            with suppress(publisher.PublishTimeout):
                await trainer.publish(newest(), step=4, parent=0, epoch=1)
    assert (set(begun), set(service.committed)) == ({"1", "4"}, {4})


@pytest.mark.parametrize("connections", [1, 3])
async def test_files_are_uploaded_over_as_many_connections_as_are_set(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, connections: int
) -> None:
    """The service counts them, of as many streams at once, and holds every byte."""
    together, streams = asyncio.Barrier(connections), list[str]()
    upload = WeightServicer.UploadShards

    async def counted(self: WeightServicer, requests: Any, context: Any) -> Any:
        streams.append(context.peer())
        if 1 < len(streams) <= 1 + connections:  # the first stream has the settings
            await together.wait()
        return await upload(self, requests, context)

    monkeypatch.setattr(WeightServicer, "UploadShards", counted)
    config, tensors = WeightsConfig(folder=tmp_path, redis_url="redis://oracle"), weights(model)
    async with (
        started(in_memory(config), ServerConfig(drain_seconds=0.0)) as port,
        weights_channel(ServerConfig(), f"127.0.0.1:{port}", connections) as channel,
    ):
        trainer = publisher.Publisher(
            channel, "run", model, tmp_path / "up", find_folder=False, uploads=connections
        )
        await trainer.publish(held_weights(tensors, bucket_bytes=1), step=1, parent=0, epoch=1)
    assert len(set(streams[1:])) == connections
    found = dict[str, torch.Tensor]()
    for file in tmp_path.glob("run/policy/weight_v000001/*.safetensors"):
        found |= load_file(file)
    torch.testing.assert_close(found, tensors, rtol=0, atol=0)
