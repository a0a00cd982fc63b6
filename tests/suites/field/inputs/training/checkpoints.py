"""What people keep beside checkpoints, and the best one of steps that are undone and made again."""

from __future__ import annotations

import json
import shutil
import tempfile
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import fsspec
from hypothesis import strategies as st
from safetensors.torch import save

from tests.suites.field.kind import Kind
from trainer.checkpoint import checkpoint_files
from trainer.checkpoint.best_checkpoint import best_of
from trainer.object_path import Folder, ObjectPath

SHARD = checkpoint_files.shard_name(0, 1)


@dataclass(frozen=True)
class Theirs:
    """Something of a user's beside checkpoints."""

    name: str
    kind: str
    """"copy" of the newest checkpoint, "part" of it, "notes" in a folder, "file", "link"."""


@dataclass(frozen=True)
class Beside:
    """Checkpoints of a run, what a user keeps there, and whether the place is an object store."""

    theirs: tuple[Theirs, ...]
    keep: int = 1
    objects: bool = False


def _place(objects: bool, scratch: str) -> Folder:
    name = uuid.uuid4().hex
    return ObjectPath(f"memory://{name}/run") if objects else Path(scratch) / name


def _put(path: Folder, content: bytes) -> None:
    if isinstance(path, ObjectPath):
        fsspec.filesystem("memory").pipe_file(path.url, content)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def _write(place: Folder, step: int, keep: int, content: bytes = b"") -> Folder:
    partial = checkpoint_files.begin(place, step)
    _put(partial / SHARD, content or save({}))
    state = checkpoint_files.Checkpoint(
        run_id="r", step=step, weight_version=0, world_size=1, settings={}, record={}
    )
    return checkpoint_files.complete(partial, state, keep)


def _add(place: Folder, newest: Folder, theirs: Theirs) -> None:
    target = place / theirs.name
    match theirs.kind:
        case "copy" | "part":
            for path in newest.iterdir():
                if theirs.kind == "copy" or path.name != ".complete":
                    _put(target / path.name, path.read_bytes())
        case "notes":
            _put(target / "notes.txt", theirs.name.encode())
        case "file":
            _put(target, theirs.name.encode())
        case _:
            if isinstance(target, Path):
                target.symlink_to(str(newest))


def _files(place: Folder) -> Mapping[str, bytes]:
    """Of all files below a folder, not through links."""
    if isinstance(place, ObjectPath):
        store, root = fsspec.filesystem("memory"), place.url.removeprefix("memory:/")
        return {each.partition(root)[2][1:]: store.cat_file(each) for each in store.find(root)}
    files = (path for path in place.rglob("*") if path.is_file() and not path.is_symlink())
    return {str(path.relative_to(place)): path.read_bytes() for path in files}


def _check_beside(given: Beside) -> None:
    """The newest is resumed from, `keep` of ours stay, and all of theirs has its content."""
    with tempfile.TemporaryDirectory() as scratch:
        place = _place(given.objects, scratch)
        first = _write(place, 10, given.keep)
        ours = set(_files(place))
        for theirs in given.theirs:
            _add(place, first, theirs)
        before = {name: text for name, text in _files(place).items() if name not in ours}
        best_of(place).recover(10)
        for step in (20, 30, 40):
            _write(place, step, given.keep)
            found = checkpoint_files.newest(place, lambda *_: None)
            assert found is not None
            assert found[1].step == step
            assert found[0].name == f"step_{step:09d}"
        after = _files(place)
        assert set(before.items()) <= set(after.items()), sorted(before.keys() - after.keys())
        kept = [f"step_{step:09d}" for step in (10, 20, 30, 40)][-given.keep :]
        complete = {n.partition("/")[0] for n in after.keys() - before.keys() if "/" in n}
        assert complete == set(kept), complete


@dataclass(frozen=True)
class Undone:
    """A step that is held, undone as its checkpoint is damaged or gone, and perhaps made again."""

    is_damaged: bool
    is_made_again: bool
    is_kept_before: bool = False
    """An older best checkpoint is there."""
    objects: bool = False


def _check_undone(given: Undone) -> None:
    """The best is of the weights as they are now; or it stays the one before."""
    with tempfile.TemporaryDirectory() as scratch:
        place = _place(given.objects, scratch)
        best = best_of(place)
        _write(place, 10, 9, b"before")
        if given.is_kept_before:
            best.keep(10, {"step": 10})
        step = _write(place, 20, 9, b"undone")
        assert best.hold(20)
        if given.is_damaged:
            _put(step / SHARD, b"damage")
        elif isinstance(step, Path):
            shutil.rmtree(step)
        else:
            for path in [*step.iterdir()]:
                path.unlink()
        found = checkpoint_files.newest(place, lambda *_: None)
        assert found is not None
        assert found[1].step == 10
        best.recover(10)
        if given.is_made_again:
            _write(place, 20, 9, b"again")
            kept = best.keep(20, {"step": 20})
            assert (kept / SHARD).read_bytes() == b"again"
            return
        try:
            best.keep(20, {"step": 20})
        except FileNotFoundError:
            folder = place / "best" if isinstance(place, Path) else place
            named = folder / "best.json"
            assert named.is_file() == given.is_kept_before
            if given.is_kept_before:
                assert json.loads(named.read_bytes())["step"] == 10
        else:
            raise AssertionError("a step that was undone became the best")


_names = st.one_of(
    st.sampled_from(
        ["step_final", "step_latest", "step_notes.txt", "step_", "step_best", "step_٣"]
    ),
    st.integers(0, 99).map(lambda number: f"step_{number}"),
    st.integers(41, 99).map(lambda number: f"step_{number:09d}"),
    st.integers(0, 99).map(lambda number: f"step_{number:010d}"),
    st.integers(0, 40).map(lambda number: f"step_{number:09d}.bak"),
    st.sampled_from(["best.old", "best.partial", "best.candidate_mine", ".partial_mine", "best2"]),
)
_theirs = st.builds(Theirs, _names, st.sampled_from(["copy", "part", "notes", "file", "link"]))
_beside = st.builds(
    Beside,
    st.lists(_theirs, max_size=4, unique_by=lambda each: each.name).map(tuple),
    st.integers(1, 3),
    st.booleans(),
)

KINDS = (
    Kind(
        name="what people keep beside checkpoints",
        check=_check_beside,
        examples=[
            Beside((Theirs(name, kind),), objects=objects)
            for objects in (False, True)
            for name, kind in (
                ("step_final", "copy"),
                ("step_notes.txt", "file"),
                ("step_latest", "link"),
                ("step_000000099", "copy"),
                ("step_000000099", "notes"),
            )
        ],
        generated=_beside,
        short=20,
        long=500,
    ),
    Kind(
        name="best of steps that were undone",
        check=_check_undone,
        examples=[
            Undone(damaged, again, before, objects)
            for damaged in (False, True)
            for again in (False, True)
            for before in (False, True)
            for objects in (False, True)
        ],
    ),
)
