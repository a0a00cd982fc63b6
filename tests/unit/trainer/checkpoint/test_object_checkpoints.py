"""Checkpoints in an object store, here that of fsspec in memory."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from tests.lib.trainer.one_parameter import Weights
from trainer import fsync_files
from trainer.checkpoint import checkpoint_files
from trainer.checkpoint.best_checkpoint import BestObject
from trainer.checkpoint.own_files import DamagedError
from trainer.checkpoint.shard_writer import ShardWriter
from trainer.host_copy import copy_stream
from trainer.object_path import Folder, ObjectPath


@pytest.fixture
def store() -> ObjectPath:
    """An empty folder."""
    return ObjectPath(f"memory://{uuid.uuid4().hex}/run")


@pytest.fixture
def committing(tmp_path: Path) -> ObjectPath:
    """A folder of a store whose objects appear when they are committed, as in S3."""
    return ObjectPath(f"file://{tmp_path}")


class Range(Weights):
    """Rows of a parameter of six, each of two numbers."""

    def __init__(self, part_number: int, num_parts: int) -> None:
        super().__init__(torch.Size((6 // num_parts, 2)), part_number, num_parts)
        first = part_number * 12 // num_parts
        self.shards["w"].copy_(torch.arange(first, first + 12 // num_parts).reshape(-1, 2))


def write(folder: Folder, policy: Weights, rank: int, world_size: int) -> None:
    """The shard of a rank."""
    writer = ShardWriter(copy_stream("cpu"))
    writer.start(policy, folder, checkpoint_files.shard_name(rank, world_size))
    while not writer.written(folder):
        pass


def state(step: int, world_size: int) -> checkpoint_files.Checkpoint:
    """The words of a checkpoint."""
    return checkpoint_files.Checkpoint(
        run_id="r", step=step, weight_version=0, world_size=world_size, settings={}, record={}
    )


def written(store: ObjectPath, step: int, world_size: int = 2, keep: int = 2) -> ObjectPath:
    """A complete checkpoint."""
    partial = checkpoint_files.begin(store, step)
    for rank in range(world_size):
        write(partial, Range(rank, world_size), rank, world_size)
    return checkpoint_files.complete(partial, state(step, world_size), keep)


def steps(store: ObjectPath) -> list[int]:
    """Checkpoints that are there."""
    return sorted(int(path.name.rpartition("_")[2]) for path in store.glob("step_*"))


def test_the_newest_is_found_and_old_ones_go(store: ObjectPath) -> None:
    """What a crash left without its marker is not seen, and is deleted with the next one."""
    assert checkpoint_files.newest(store) is None
    for step in (8, 9, 10):
        written(store, step)
    write(checkpoint_files.begin(store, 11), Range(0, 1), 0, 1)
    assert steps(store) == [9, 10, 11]
    found = checkpoint_files.newest(store)
    assert found is not None
    assert found == (store / "step_000000010", state(10, 2))
    written(store, 12)
    assert steps(store) == [10, 12]
    names = {path.name for path in (store / "step_000000012").iterdir()}
    shards = {checkpoint_files.shard_name(rank, 2) for rank in range(2)}
    assert names == {"state.json", "checksums.json", ".complete", *shards}


@pytest.mark.parametrize(("parts", "part"), [(1, 0), (2, 1), (3, 1), (6, 5)])
def test_each_rank_reads_its_rows_alone(
    store: ObjectPath, parts: int, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever number of ranks wrote them, and no byte of another row."""
    folder, read = written(store, 1), list[int]()
    real = fsync_files._Rows.read

    def counting(rows: Any, first: int, number: int) -> torch.Tensor:
        read.append(number * rows.dtype.itemsize if rows.shape[1:] == (2,) else 0)
        return real(rows, first, number)

    monkeypatch.setattr(fsync_files._Rows, "read", counting)
    policy = Range(part, parts)
    expected = policy.shards["w"].detach().clone()
    checkpoint_files.load_shards(policy, folder, part, parts)
    assert policy.loaded["parameter.w"].equal(expected)
    assert sum(read) == expected.nbytes


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.uint8])
def test_a_streamed_file_is_one_that_safetensors_reads(
    committing: ObjectPath, dtype: torch.dtype
) -> None:
    """Scalars and empty tensors too; and its checksum was given before it was there."""
    from safetensors.torch import load

    tensors = {
        "b": torch.arange(3).to(dtype),
        "a": torch.ones((2, 3)),
        "one": torch.tensor(7.0),
        "none": torch.empty((0, 4), dtype=dtype),
    }
    path, was_there = committing / "x.safetensors", list[bool]()
    fsync_files.upload(path, tensors, lambda _: was_there.append(path.is_file()))
    assert was_there == [False]
    ours, theirs = fsync_files.ObjectTensors(path), load(path.read_bytes())
    assert sorted(ours.keys()) == sorted(theirs) == sorted(tensors)
    for name, tensor in tensors.items():
        assert theirs[name].equal(tensor)
        assert ours.get_tensor(name).equal(tensor)


def test_damage_is_seen_and_the_checkpoint_before_is_used(store: ObjectPath) -> None:
    """The damaged one stays for people, and no trainer looks there again."""
    before, newest = written(store, 1), written(store, 2)
    shard = newest / checkpoint_files.shard_name(1, 2)
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    fsspec.filesystem("memory").pipe_file(shard.url, bytes(data))
    reported = list[tuple[DamagedError, ObjectPath]]()
    found = checkpoint_files.newest(store, lambda *given: reported.append(given))
    assert found is not None
    assert found[0] == before
    assert [(shard.name in str(error), kept) for error, kept in reported] == [(True, newest)]
    checkpoint_files.begin(store, 3)
    assert shard.is_file()


def test_the_best_step_is_kept_while_later_ones_are_deleted(store: ObjectPath) -> None:
    """And one that is being evaluated, until another is."""
    best = BestObject(store)
    written(store, 1, keep=1)
    assert best.hold(1)
    written(store, 2, keep=1)
    assert steps(store) == [1, 2]
    assert best.keep(1, {"value": 0.5}) == store / "step_000000001"
    assert best.hold(2)
    assert not best.hold(7)
    for step in (3, 4):
        written(store, step, keep=1)
    assert steps(store) == [1, 4]
    with pytest.raises(FileNotFoundError, match="no checkpoint of step 3"):
        best.keep(3, {})


def test_without_its_name_the_best_step_is_deleted(store: ObjectPath) -> None:
    """Negative control."""
    written(store, 1, keep=1)
    written(store, 2, keep=1)
    assert steps(store) == [2]


def test_an_upload_that_fails_leaves_nothing(
    committing: ObjectPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half an object would look like a shard."""

    def failing(_: Any) -> Any:
        yield memoryview(b"half")
        raise OSError("connection lost")

    monkeypatch.setattr(fsync_files, "tensor_bytes", failing)
    path = committing / "x.safetensors"
    with pytest.raises(OSError, match="connection lost"):
        fsync_files.upload(path, {}, lambda _: None)
    assert not path.is_file()


def test_a_missing_package_is_named() -> None:
    """With what installs it."""
    for url in ("nothing://bucket/run", "oci://bucket/run"):
        with pytest.raises(ValueError, match=r"needs a package that is missing.*object-store"):
            ObjectPath(url).check()
