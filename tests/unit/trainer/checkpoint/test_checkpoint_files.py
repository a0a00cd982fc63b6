"""A checkpoint is whole or it is not there."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from services.chassis.errors import ConfigError, ExitCode
from tests.lib.trainer.one_parameter import Weights
from trainer import fsync_files
from trainer.checkpoint import checkpoint_files
from trainer.checkpoint.shard_writer import ShardWriter
from trainer.host_copy import copy_stream


def state(step: int) -> checkpoint_files.Checkpoint:
    """A checkpoint's words."""
    return checkpoint_files.Checkpoint(
        run_id="r",
        step=step,
        weight_version=step,
        world_size=1,
        settings={},
        record={},
    )


def begun(folder: Path, step: int) -> Path:
    """A checkpoint of one rank, written and not complete."""
    partial = checkpoint_files.begin(folder, step)
    save_file({}, partial / checkpoint_files.shard_name(0, 1))
    return partial


def test_the_newest_complete_checkpoint_is_found_and_old_ones_go(tmp_path: Path) -> None:
    """Two of three are kept; a partial one of a crash is not seen and not in the way."""
    assert checkpoint_files.newest(tmp_path) is None
    for step in (8, 9, 10):
        checkpoint_files.complete(begun(tmp_path, step), state(step), keep=2)
    begun(tmp_path, 11)
    found = checkpoint_files.newest(tmp_path)
    assert found is not None
    assert found[1] == state(10)
    assert sorted(path.name for path in tmp_path.glob("step_*")) == [
        "step_000000009",
        "step_000000010",
    ]
    checkpoint_files.complete(begun(tmp_path, 12), state(12), keep=2)
    newest = checkpoint_files.newest(tmp_path)
    assert newest is not None
    assert newest[1].step == 12
    assert list(tmp_path.glob(".partial_*")) == []


def test_a_checkpoint_that_lacks_a_shard_is_never_complete(tmp_path: Path) -> None:
    """Whatever anybody says of its ranks."""
    lacking = replace(state(1), world_size=2)
    with pytest.raises(OSError, match="lacks shards of its 2 ranks"):
        checkpoint_files.complete(begun(tmp_path, 1), lacking, keep=1)
    assert checkpoint_files.newest(tmp_path) is None


def test_each_save_reports_only_its_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that failed goes on saying so, though the one after it went well."""
    writer, write = ShardWriter(copy_stream("cpu")), fsync_files.write_tensors
    bad, good = tmp_path / "bad", tmp_path / "good"
    for folder in (bad, good):
        folder.mkdir()

    def full(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        if path.parent == bad:
            raise OSError("no space left")
        write(path, tensors)

    monkeypatch.setattr(fsync_files, "write_tensors", full)
    for folder in (bad, good):
        writer.start(Weights(3), folder, checkpoint_files.shard_name(0, 1))
    while not writer.written(good):
        pass
    for _ in range(2):
        with pytest.raises(OSError, match="no space left"):
            writer.written(bad)
    assert checkpoint_files.is_written(good, 1)
    assert not checkpoint_files.is_written(bad, 1)


def test_a_write_that_fails_between_two_looks_is_not_taken_as_written(tmp_path: Path) -> None:
    """It is still going on at the first look, and has failed at the next one."""

    class Failing(Future[None]):
        def done(self) -> bool:
            if not super().done():
                self.set_exception(OSError("no space left"))
                return False
            return True

    writer = ShardWriter(copy_stream("cpu"))
    writer._writes[tmp_path] = Failing()
    assert not writer.written(tmp_path)
    with pytest.raises(OSError, match="no space left"):
        writer.written(tmp_path)


@pytest.mark.parametrize("is_sealed", [False, True])
def test_a_checkpoint_that_does_not_fit_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_sealed: bool
) -> None:
    """The disk is full after half a shard; what is there is not taken for a checkpoint.

    Negative control: sealed as if it were whole, it is.
    """
    checkpoint_files.complete(begun(tmp_path, 1), state(1), keep=2)
    write = fsync_files.write_tensors

    def half(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        write(path, tensors)
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size // 2)
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    writer, folder = ShardWriter(copy_stream("cpu")), checkpoint_files.begin(tmp_path, 2)
    with monkeypatch.context() as patched:
        patched.setattr(fsync_files, "write_tensors", half)
        writer.start(Weights(3), folder, checkpoint_files.shard_name(0, 1))
        with pytest.raises(OSError, match="No space left on device"):
            while not writer.written(folder):
                pass
    if is_sealed:
        next(folder.iterdir()).rename(folder / checkpoint_files.shard_name(0, 1))
        checkpoint_files.complete(folder, state(2), keep=2)
    else:
        with pytest.raises(OSError, match="lacks shards"):
            checkpoint_files.complete(folder, state(2), keep=2)
    found = checkpoint_files.newest(tmp_path)
    assert found is not None
    assert found[1].step == 1 + is_sealed
    checkpoint_files.complete(begun(tmp_path, 3), state(3), keep=2)
    assert list(tmp_path.glob(".partial_*")) == [], "the next one has the room"


def test_another_models_checkpoint_is_rejected(tmp_path: Path) -> None:
    """The message names the parameter and both shapes; a restart would fail the same way."""
    tensors = {"parameter.w": torch.zeros(3), "rng": torch.get_rng_state()}
    save_file(tensors, tmp_path / "rank_00000_of_00001.safetensors")
    with pytest.raises(ConfigError, match=r"\(3,\) for parameter w, the model has .*\(4,\)"):
        checkpoint_files.load_shards(Weights(4), tmp_path, 0, 1)
    assert ConfigError.exit_code == ExitCode.CONFIG  # the launcher gives it no further start


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_shards_of_any_world_size_are_cut_anew(tmp_path: Path, world_size: int) -> None:
    """Seven rows written by two ranks, read by others: each gets the chunk that FSDP gives it."""
    whole = torch.arange(14.0).reshape(7, 2)
    for rank, part in enumerate(whole.chunk(2)):
        tensors = {"parameter.w": part.contiguous(), "rng": torch.get_rng_state()}
        save_file(tensors, tmp_path / f"rank_{rank:05d}_of_00002.safetensors")
    chunks = [*whole.chunk(world_size), *[whole[:0]] * world_size][:world_size]
    for rank, chunk in enumerate(chunks):
        policy = Weights(chunk.shape, rank, world_size)
        checkpoint_files.load_shards(policy, tmp_path, rank, world_size)
        assert policy.loaded["parameter.w"].equal(chunk)


class CountedFile:
    """A file of tensors, and the rows of parameters that were read from it."""

    def __init__(self, path: Path, rows: list[int], **how: Any) -> None:
        self._file: Any = safe_open(path, **how)
        self._rows = rows

    def __enter__(self) -> CountedFile:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def keys(self) -> list[str]:
        """Of all tensors."""
        return list(self._file.keys())

    def get_tensor(self, name: str) -> torch.Tensor:
        """All rows."""
        found: torch.Tensor = self._file.get_tensor(name)
        self._rows.append(len(found) if name.startswith("parameter.") else 0)
        return found

    def get_slice(self, name: str) -> Any:
        """Rows that are counted when they are read."""
        return CountedSlice(self._file.get_slice(name), self._rows)


class CountedSlice:
    """Rows of a tensor."""

    def __init__(self, entry: Any, rows: list[int]) -> None:
        self._entry, self._rows = entry, rows

    def get_shape(self) -> list[int]:
        """Of the whole."""
        return list(self._entry.get_shape())

    def __getitem__(self, key: slice) -> torch.Tensor:
        found: torch.Tensor = self._entry[key]
        self._rows.append(len(found))
        return found


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_a_rank_reads_its_own_rows_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    """Of the files of two ranks, whatever the new number of ranks."""
    whole, rows = torch.arange(14.0).reshape(7, 2), list[int]()
    for rank, part in enumerate(whole.chunk(2)):
        tensors = {"parameter.w": part.contiguous(), "rng": torch.get_rng_state()}
        save_file(tensors, tmp_path / f"rank_{rank:05d}_of_00002.safetensors")
    monkeypatch.setattr(fsync_files, "safe_open", partial(CountedFile, rows=rows))
    for rank in range(world_size):
        rows.clear()
        shape = torch.Size([len(range(*rows_of(rank, world_size))), 2])
        checkpoint_files.load_shards(Weights(shape, rank, world_size), tmp_path, rank, world_size)
        assert sum(rows) == shape[0]


def rows_of(rank: int, world_size: int) -> tuple[int, int]:
    """First row of seven, and the one after the last."""
    rows = -(-7 // world_size)
    return min(rank * rows, 7), min((rank + 1) * rows, 7)
