"""Damage of a checkpoint is seen before anything of it is used."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from trainer import fsync_files
from trainer.checkpoint import checkpoint_files, own_files
from trainer.checkpoint.own_files import DamagedError, note_digest, verify

FILES = (
    "rank_00000_of_00002.safetensors",
    "rank_00001_of_00002.safetensors",
    "state.json",
    "checksums.json",
    ".complete",
)


def written(folder: Path, step: int) -> Path:
    """A checkpoint of two ranks."""
    partial = checkpoint_files.begin(folder, step)
    for rank in range(2):
        name = checkpoint_files.shard_name(rank, 2)
        save_file({"parameter.w": torch.full((9,), float(step + rank))}, partial / name)
        note_digest(partial / name, name)
    state = checkpoint_files.Checkpoint(
        run_id="run", step=step, weight_version=0, world_size=2, settings={}, record={}
    )
    return checkpoint_files.complete(partial, state, keep=9)


def flip(path: Path, bit: int) -> None:
    """One bit."""
    data = bytearray(path.read_bytes())
    data[bit // 8 % len(data)] ^= 1 << bit % 8
    path.write_bytes(data)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["flip", "truncate", "delete"])
def test_damage_of_any_file_is_seen_and_named(tmp_path: Path, name: str, damage: str) -> None:
    """And the checkpoint before is used; the damaged one is kept, under another name."""
    before, newest = written(tmp_path, 1), written(tmp_path, 2)
    reported = list[tuple[str, Path]]()
    match damage:
        case "flip":
            flip(newest / name, 1001)
        case "truncate":
            (newest / name).write_bytes((newest / name).read_bytes()[:-1])
        case _:
            (newest / name).unlink()
    found = checkpoint_files.newest(tmp_path, lambda error, at: reported.append((str(error), at)))
    assert found is not None
    assert found[0] == before
    if (damage, name) == ("delete", ".complete"):
        assert not reported, "it is not complete"
        return
    ((error, kept),) = reported
    assert name in error
    assert kept == tmp_path / f"damaged_{newest.name}"
    assert (kept / "state.json").exists() or name == "state.json"


def test_exchanged_shards_are_seen(tmp_path: Path) -> None:
    """Each file has a checksum of its own."""
    folder = written(tmp_path, 1)
    (folder / FILES[0]).rename(folder / "x")
    (folder / FILES[1]).rename(folder / FILES[0])
    (folder / "x").rename(folder / FILES[1])
    with pytest.raises(DamagedError, match=FILES[0]):
        verify(folder)


def test_when_all_are_damaged_nothing_is_loaded(tmp_path: Path) -> None:
    """Starting again from the model would train everything twice."""
    flip(written(tmp_path, 1) / FILES[0], 77)
    with pytest.raises(DamagedError, match=FILES[0]):
        checkpoint_files.newest(tmp_path)


def test_damage_between_writing_and_sealing_is_seen(tmp_path: Path) -> None:
    """Of a shard, the checksum is that of the bytes its rank wrote."""
    partial = checkpoint_files.begin(tmp_path, 1)
    name = checkpoint_files.shard_name(0, 1)
    save_file({"parameter.w": torch.ones(9)}, partial / name)
    note_digest(partial / name, name)
    flip(partial / name, 999)
    state = checkpoint_files.Checkpoint(
        run_id="run", step=1, weight_version=0, world_size=1, settings={}, record={}
    )
    with pytest.raises(DamagedError, match=name):
        verify(checkpoint_files.complete(partial, state, keep=1))


def test_a_checkpoint_of_the_last_release_is_read(tmp_path: Path) -> None:
    """It has no checksums; a truncated file is named all the same."""
    folder = written(tmp_path, 1)
    (folder / "checksums.json").unlink()
    (folder / fsync_files.COMPLETE).write_text("")
    found = checkpoint_files.newest(tmp_path)
    assert found is not None
    assert found[0] == folder
    (folder / FILES[1]).write_bytes((folder / FILES[1]).read_bytes()[:-3])
    with pytest.raises(DamagedError, match=FILES[1]):
        verify(folder)


def test_without_verification_a_flipped_bit_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: safetensors do not see it."""
    folder = written(tmp_path, 1)
    flip(folder / FILES[0], 8 * (folder / FILES[0]).stat().st_size - 2)
    monkeypatch.setattr(own_files, "verify", lambda folder: None)
    found = checkpoint_files.newest(tmp_path)
    assert found is not None
    loaded = checkpoint_files.read_parameters(folder)["w"]
    assert loaded.tolist() != [1.0] * 9 + [2.0] * 9
