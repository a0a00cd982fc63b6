"""A process that is killed while it writes a checkpoint into a bucket leaves the one before."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.lib.trainer.one_parameter import Weights
from tests.lib.trainer.s3_server import s3_server
from tests.lib.trainer.support import ROOT, environment
from trainer.checkpoint import checkpoint_files, own_files
from trainer.checkpoint.shard_writer import ShardWriter
from trainer.host_copy import copy_stream
from trainer.object_path import ObjectPath

_PART_BYTES = 5 << 20
"""The least that S3 takes."""
_PROGRAM = f"""
import sys, time
from trainer import object_path
from trainer import fsync_files
from trainer.checkpoint import checkpoint_files, own_files
from trainer import fsync_files
from tests.lib.trainer.one_parameter import Weights
from trainer.host_copy import copy_stream
from trainer.checkpoint.shard_writer import ShardWriter

object_path._BLOCK_BYTES = fsync_files._PIECE_BYTES = {_PART_BYTES}
pieces = fsync_files.tensor_bytes

def slow(tensors):
    for number, piece in enumerate(pieces(tensors)):
        if number == 3:
            print("uploading", flush=True)
            time.sleep(60)
        yield piece

fsync_files.tensor_bytes = slow
folder = checkpoint_files.begin(object_path.place(sys.argv[1]), 2)
ShardWriter(copy_stream("cpu")).start(Weights(1 << 22), folder, checkpoint_files.shard_name(0, 1))
"""


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectPath]:
    """A folder in an empty bucket."""
    with s3_server(monkeypatch) as folder:
        yield folder


def write(store: ObjectPath, step: int, *, completed: bool = True) -> None:
    """A checkpoint of one rank; without its end, if it is not completed."""
    folder, writer = checkpoint_files.begin(store, step), ShardWriter(copy_stream("cpu"))
    writer.start(Weights(3), folder, checkpoint_files.shard_name(0, 1))
    while not writer.written(folder):
        pass
    if completed:
        complete(store, step)


def complete(store: ObjectPath, step: int) -> None:
    """The end of a checkpoint."""
    state = checkpoint_files.Checkpoint(
        run_id="r", step=step, weight_version=0, world_size=1, settings={}, record={}
    )
    checkpoint_files.complete(store / own_files.folder_name(step), state, keep=2)


def newest_step(store: ObjectPath) -> int:
    """Of the checkpoint to resume from."""
    found = checkpoint_files.newest(store)
    return 0 if found is None else found[1].step


def test_a_kill_in_mid_upload_leaves_nothing_to_resume_from(store: ObjectPath) -> None:
    """SIGKILL after two parts of four: no shard is there, and the step is written again."""
    write(store, 1)
    with subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(store)],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "uploading\n"
        child.kill()
    assert [path.name for path in (store / "step_000000002").iterdir()] == ["state.json"]
    assert newest_step(store) == 1
    write(store, 2)
    assert newest_step(store) == 2


def test_a_kill_before_the_marker_leaves_nothing_to_resume_from(store: ObjectPath) -> None:
    """All shards are there; *control*: with its end it is the newest."""
    write(store, 1)
    write(store, 2, completed=False)
    assert newest_step(store) == 1
    complete(store, 2)
    assert newest_step(store) == 2
