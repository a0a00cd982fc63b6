"""Beside checkpoints lie copies, notes and links of people: none is read, counted or deleted."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
from safetensors.torch import save

from trainer.checkpoint import checkpoint_files, own_files
from trainer.object_path import AnyFolder, Folder, ObjectPath

SHARD = checkpoint_files.shard_name(0, 1)


@pytest.fixture(params=["disk", "objects"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    """Where checkpoints are."""
    if request.param == "disk":
        return tmp_path / "checkpoints"
    return ObjectPath(f"memory://{uuid.uuid4().hex}/run")


def put(path: Folder, content: bytes) -> None:
    """A file of somebody."""
    if isinstance(path, ObjectPath):
        fsspec.filesystem("memory").pipe_file(path.url, content)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def written(place: AnyFolder, step: int, keep: int = 1, run_id: str = "r") -> AnyFolder:
    """A complete checkpoint of one rank."""
    partial = checkpoint_files.begin(place, step)
    put(partial / SHARD, save({}))
    state = checkpoint_files.Checkpoint(
        run_id=run_id, step=step, weight_version=0, world_size=1, settings={}, record={}
    )
    return checkpoint_files.complete(partial, state, keep)


def copy(source: Folder, target: Folder) -> None:
    """As people copy a checkpoint."""
    for path in source.iterdir():
        put(target / path.name, path.read_bytes())


def files(place: Folder) -> dict[str, bytes]:
    """All files below a folder."""
    if isinstance(place, ObjectPath):
        store, root = fsspec.filesystem("memory"), place.url.removeprefix("memory://")
        found = {name: store.cat_file(name) for name in store.find(root)}
        return {name.partition(root)[2].strip("/"): text for name, text in found.items()}
    return {
        str(path.relative_to(place)): path.read_bytes()
        for path in place.rglob("*")
        if path.is_file()
    }


THEIRS: dict[str, Callable[[Folder, Folder], None]] = {
    "a copy under a word": lambda place, ours: copy(ours, place / "step_final"),
    "a copy with a later number": lambda place, ours: copy(ours, place / "step_000000099"),
    "a copy with a short number": lambda place, ours: copy(ours, place / "step_7"),
    "a copy with a long number": lambda place, ours: copy(ours, place / "step_0000000001"),
    "a copy with an ending": lambda place, ours: copy(ours, place / f"{ours.name}.bak"),
    "digits of another script": lambda place, ours: copy(ours, place / "step_00000009٩"),
    "notes": lambda place, _: put(place / "step_notes.txt", b"notes"),
    "notes with the name of a step": lambda place, _: put(place / "step_000000098", b"notes"),
    "a folder of notes": lambda place, _: put(place / "step_000000097" / "notes.txt", b"notes"),
    "notes in the next one": lambda place, _: put(place / "step_000000002" / "notes.txt", b"x"),
    "a partial copy": lambda place, _: put(place / "step_000000096" / SHARD, b"shard"),
    "notes of the best": lambda place, _: put(place / "best_notes.json", b"{}"),
    "a list as the best": lambda place, _: put(place / "best.candidate.json", b"[]"),
    "something partial": lambda place, _: put(place / ".partial_notes" / "a.txt", b"a"),
    "a partial one of theirs": lambda place, _: put(place / ".partial_000000009" / "a", b"a"),
}


def moved(place: Folder, name: str) -> str:
    """On a disk the trainer renames what has the very name that it needs."""
    in_the_way = isinstance(place, Path) and name.startswith("step_000000002/")
    return f"other_{name}" if in_the_way else name


@pytest.mark.parametrize("theirs", THEIRS)
def test_what_people_keep_stays_and_is_not_counted(place: Folder, theirs: str) -> None:
    """Ours are written, found and deleted as if it were not there."""
    THEIRS[theirs](place, written(place, 1))
    before = files(place)
    for step in (2, 3):
        assert written(place, step).name == f"step_{step:09d}"
        found = checkpoint_files.newest(place)
        assert found is not None
        assert found[1].step == step
    names = {own_files.STATE, "checksums.json", ".complete", SHARD}
    ours = {f"step_00000000{step}/{name}" for step in (1, 2, 3) for name in names}
    after = files(place)
    assert {name: text for name, text in after.items() if name not in ours} == {
        moved(place, name): text for name, text in before.items() if name not in ours
    }
    assert ours & after.keys() == {name for name in ours if name.startswith("step_000000003")}


def test_links_are_neither_followed_nor_counted(tmp_path: Path) -> None:
    """Under a word, and under the exact name of a step."""
    elsewhere = written(tmp_path / "elsewhere", 5)
    place = tmp_path / "checkpoints"
    first = written(place, 1)
    (place / "step_latest").symlink_to(first)
    (place / "step_000000005").symlink_to(elsewhere)
    (place / ".partial_000000002").symlink_to(elsewhere)
    for step in (2, 3):
        written(place, step)
    found = checkpoint_files.newest(place)
    assert found is not None
    assert found[1].step == 3
    assert own_files.is_complete(elsewhere)
    written(place, 5)
    assert own_files.is_complete(elsewhere)
    assert (place / "other_step_000000005").is_symlink()


def test_a_checkpoint_of_another_run_is_not_deleted(place: Folder) -> None:
    """Nor counted; the control is one of the same run."""
    other, same = written(place, 1, run_id="other"), written(place, 2)
    written(place, 3)
    assert own_files.is_complete(other)
    assert not own_files.is_complete(same)


def test_files_in_a_checkpoint_of_ours_outlive_it(place: Folder) -> None:
    """And are no shards of it."""
    ours = written(place, 1)
    put(ours / "rank_backup.safetensors", b"not a shard")
    assert checkpoint_files.read_parameters(ours) == {}
    written(place, 2)
    assert [path.name for path in ours.iterdir()] == ["rank_backup.safetensors"]


def test_what_a_crash_left_of_ours_is_deleted(place: Folder) -> None:
    """Before the next checkpoint: half written ones, and half deleted ones."""
    half = checkpoint_files.begin(place, 7)
    put(half / "rank_00000_of_00002.partial", b"half")
    deleted = written(place, 6)
    (deleted / ".complete").unlink()
    written(place, 8)
    assert {name.partition("/")[0] for name in files(place)} == {"step_000000008"}


def test_damaged_ones_do_not_replace_each_other(tmp_path: Path) -> None:
    """Each is kept under a name of its own."""
    written(tmp_path, 1, keep=9)
    for content in (b"one", b"two"):
        put(written(tmp_path, 2, keep=9) / SHARD, content)
        assert checkpoint_files.newest(tmp_path, lambda *_: None) is not None
    kept = [tmp_path / f"damaged_step_000000002{end}" for end in ("", ".1")]
    assert [(path / SHARD).read_bytes() for path in kept] == [b"one", b"two"]


def test_a_copy_at_the_name_of_the_next_step(place: Folder) -> None:
    """It gets another name on a disk; in an object store, where nothing is renamed, it is named."""
    copy(written(place, 1), place / "step_000000002")
    if isinstance(place, ObjectPath):
        with pytest.raises(OSError, match="step_000000002 holds the checkpoint of another step"):
            checkpoint_files.begin(place, 2)
        return
    written(place, 2)
    assert own_files.is_complete(place / "other_step_000000002")


def test_without_the_mark_a_copy_would_be_taken_for_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control of the tests above."""
    shutil.copytree(written(tmp_path, 1), tmp_path / "step_000000099")
    monkeypatch.setattr(own_files, "mark_of", lambda _: {})
    monkeypatch.setattr(own_files, "has_step", lambda *_: True)
    found = checkpoint_files.newest(tmp_path)
    assert found is not None
    assert found[0].name == "step_000000099"
    written(tmp_path, 2)
    assert not own_files.is_complete(tmp_path / "step_000000002")
