"""Flipped bits, truncated and exchanged files in checkpoints and published weights.

`python -m tests.chaos.edges.damage` runs it alone. Each place is damaged in a copy of its own; it
counts as detected if nothing is loaded and the error names the file.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from seamflow.errors import SeamflowError

from rollout.server.weights.transport import LocalVersion, TransferError
from rollout.server.weights.transports.shard_stream import ShardStream
from rollout.server.weights.transports.shared_folder import SharedFolder
from services.chassis.errors import ServiceError
from services.lib.weight_files.checked_files import CheckedFiles
from services.weights import version_folders
from tests.lib.rollout.server.weights.shard_senders import Sender, make_version, receiver
from trainer.checkpoint import checkpoint_files, own_files
from trainer.checkpoint.own_files import DamagedError, note_digest

_RANKS = 3
_CHECKPOINT_PLACES = 120
_WEIGHT_PLACES = 80
_CONTROLS = 20


def run(seed: int) -> dict[str, float]:
    """The figures: places damaged, detected and named; controls that loaded damage silently."""
    dice = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = [_in_checkpoint(dice, folder / f"c{i}") for i in range(_CHECKPOINT_PLACES)]
        found += [asyncio.run(_in_weights(dice, folder / f"w{i}")) for i in range(_WEIGHT_PLACES)]
        silent = [_unverified(dice, folder / f"u{i}") for i in range(_CONTROLS)]
    return {
        "damage_places": len(found),
        "damage_missed": len(found) - sum(found),
        "damage_detected_and_named": sum(found),
        "negative_controls": len(silent),
        "negative_controls_failed": sum(silent),
    }


def _in_checkpoint(dice: random.Random, folder: Path) -> bool:
    """Damage one place of a checkpoint; whether a resume sees and names it."""
    with _checkpoint(folder) as checkpoint:
        files = [path for path in checkpoint.iterdir() if path.stat().st_size]
        names = _damage(dice, files)
        try:
            checkpoint_files.newest(folder)
        except DamagedError as error:
            return any(name in str(error) for name in names)
        return False


async def _in_weights(dice: random.Random, folder: Path) -> bool:
    """Damage one place of published weights; whether their path to a server sees and names it."""
    version = make_version(folder / "published")
    names = _damage(dice, [version.folder / file.name for file in version.manifest.files])
    try:
        await dice.choice((_shared, _streamed, _committed))(version, folder)
    except (TransferError, SeamflowError, ServiceError) as error:
        return any(name in str(error) for name in names)
    finally:
        shutil.rmtree(folder)
    return False


async def _shared(version: LocalVersion, folder: Path) -> None:
    async with receiver(Sender(offers=version.folder), folder / "to") as to:
        await SharedFolder(to.context).fetch(to.incoming(version))


async def _streamed(version: LocalVersion, folder: Path) -> None:
    async with receiver(Sender({1: version}), folder / "to") as to:
        await ShardStream(to.context).fetch(to.incoming(version))


async def _committed(version: LocalVersion, folder: Path) -> None:
    """What the weights service does at the commit, with uploads and shared folders alike."""
    for file in version.manifest.files:
        path = version.folder / file.name
        version_folders._verify(path, CheckedFiles(), file, file.name)


def _unverified(dice: random.Random, folder: Path) -> bool:
    """Control: without verification, whether a flipped bit of a tensor is loaded silently."""
    with (
        _checkpoint(folder) as checkpoint,
        mock.patch.object(own_files, "verify", lambda folder: None),
    ):
        path = checkpoint / checkpoint_files.shard_name(dice.randrange(_RANKS), _RANKS)
        before = load_file(path)["parameter.w"].clone()
        _flip(path, 8 * path.stat().st_size - 1 - dice.randrange(8 * 4 * before.numel()))
        found = checkpoint_files.newest(folder)
        return found is not None and not torch.equal(load_file(path)["parameter.w"], before)


@contextmanager
def _checkpoint(folder: Path) -> Iterator[Path]:
    """A checkpoint of three ranks with optimizer state, deleted afterwards."""
    partial = checkpoint_files.begin(folder, 7)
    for rank in range(_RANKS):
        name = checkpoint_files.shard_name(rank, _RANKS)
        generator = torch.Generator().manual_seed(rank)
        names = ("exp_avg.w", "exp_avg_sq.w", "parameter.value_head.w", "parameter.w")
        tensors = {name: torch.randn(257, generator=generator) for name in names}
        save_file(tensors, partial / name)
        note_digest(partial / name, name)
    state = checkpoint_files.Checkpoint(
        run_id="run",
        step=7,
        weight_version=6,
        world_size=_RANKS,
        settings={"seed": 0},
        record={"step": 7},
    )
    yield checkpoint_files.complete(partial, state, keep=1)
    shutil.rmtree(folder)


def _damage(dice: random.Random, files: list[Path]) -> list[str]:
    """Flip a bit, truncate a file, or exchange two; the names of what was damaged."""
    one, other = dice.sample(sorted(files), 2)
    match dice.choice(("flip", "flip", "truncate", "exchange")):
        case "flip":
            _flip(one, dice.randrange(8 * one.stat().st_size))
        case "truncate":
            one.write_bytes(one.read_bytes()[: dice.randrange(one.stat().st_size)])
        case _:
            content = one.read_bytes()
            one.write_bytes(other.read_bytes())
            other.write_bytes(content)
            return [one.name, other.name]
    return [one.name]


def _flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    print(json.dumps(run(parser.parse_args().seed)))
