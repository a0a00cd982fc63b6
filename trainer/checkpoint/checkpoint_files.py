"""Checkpoints that a run resumes from: one safetensors file for each rank, and JSON.

    checkpoint_folder/step_000012/rank_00000_of_00002.safetensors   `Policy.state`, random state
                                  state.json                        `Checkpoint`
                                  .complete                         written last

A folder is filled under a temporary name and renamed when complete: one called step_* is whole.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from trainer import fsync_files
from trainer.config import Setting
from trainer.model.lora import is_adapter
from trainer.policy.forward import VALUE_HEAD
from trainer.policy.policy import Policy

__all__ = [
    "Checkpoint",
    "ShardWriter",
    "begin",
    "complete",
    "is_written",
    "load_shards",
    "newest",
    "shard_name",
]

_STATE = "state.json"
_RNG = "rng"
_REMEMBERED = 8
"""Saves that may still be asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What a checkpoint says besides its tensors."""

    run_id: str
    """Training job."""
    step: int
    """Newest optimizer step it covers."""
    weight_version: int
    """Newest version that was published when it was written."""
    world_size: int
    """Ranks that wrote it."""
    mathematics: Mapping[str, Setting]
    """`TrainerConfig.mathematics` of the run."""
    base: str = ""
    """`TrainerConfig.base` of the run: the weights that an adapter is added to."""
    record: Mapping[str, Any]
    """Step record as far as it went: the metrics file may lack its line after a crash."""


def newest(folder: Path) -> tuple[Path, Checkpoint] | None:
    """The newest complete checkpoint in `folder`."""
    found = sorted(path for path in folder.glob("step_*") if (path / fsync_files.COMPLETE).exists())
    if not found:
        return None
    return found[-1], Checkpoint(**json.loads((found[-1] / _STATE).read_text()))


def begin(folder: Path, step: int) -> Path:
    """An empty temporary folder for the checkpoint of `step`."""
    for left in folder.glob(".partial_*"):  # by a crash
        shutil.rmtree(left)
    partial = folder / f".partial_{step:09d}"
    partial.mkdir(parents=True)
    return partial


class ShardWriter:
    """Writes this rank's state in a thread of its own, from a copy on the host."""

    def __init__(self, rank: int, world_size: int) -> None:
        """Nothing is under way."""
        self._name = shard_name(rank, world_size)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._begun: dict[Path, Future[None]] = {}

    def begin(self, policy: Policy, folder: Path) -> None:
        """Copy the state, once no other copy is left: the host has room for one."""
        wait(self._begun.values())
        for done in list(self._begun)[:-_REMEMBERED]:
            del self._begun[done]
        tensors = {
            name: tensor.to("cpu", copy=True).contiguous()
            for name, tensor in policy.state().items()
        }
        tensors[_RNG] = torch.get_rng_state()
        self._begun[folder] = self._executor.submit(_write_shard, folder / self._name, tensors)

    def written(self, folder: Path) -> bool:
        """Whether what was begun in `folder` is durable. Raises `OSError` if it cannot be."""
        done = self._begun[folder].done()
        if done:
            self._begun[folder].result()
        return done


def _write_shard(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """A shard that has its name is durable."""
    partial = path.with_suffix(".partial")
    fsync_files.write_tensors(partial, tensors)
    partial.rename(path)


def is_written(folder: Path, world_size: int) -> bool:
    """Whether the shards of all ranks are there."""
    # Listed: what was asked for by name and was not there is not there for long, on NFS.
    names = {path.name for path in folder.iterdir()}
    return all(shard_name(rank, world_size) in names for rank in range(world_size))


def complete(partial: Path, checkpoint: Checkpoint, keep: int) -> Path:
    """Write what the ranks did not, rename the folder, delete all but the `keep` newest.

    Raises:
        OSError: a shard is missing.
    """
    if not is_written(partial, checkpoint.world_size):
        raise OSError(f"checkpoint {partial} lacks shards of its {checkpoint.world_size} ranks")
    fsync_files.write_json(partial / _STATE, asdict(checkpoint))
    fsync_files.write_marker(partial)
    final = partial.parent / f"step_{checkpoint.step:09d}"
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    fsync_files.sync(final.parent)
    for old in sorted(final.parent.glob("step_*"))[:-keep]:
        shutil.rmtree(old)
    return final


def load_shards(policy: Policy, folder: Path, rank: int, world_size: int) -> None:
    """Take over the state in `folder`, whatever the number of ranks that wrote it.

    Raises:
        ValueError: the checkpoint is of another model.
    """
    paths = sorted(folder.glob("rank_*.safetensors"))
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(path, framework="pt")) for path in paths]
        # A rank whose shard is empty has no optimizer state for it; rank 0 always has.
        names = files[rank if len(files) == world_size else 0].keys()
        tensors = {name: _resharded(files, name, rank, world_size) for name in names}
    rng = tensors.pop(_RNG)
    _check(policy, tensors, folder)
    policy.load_state(tensors)
    torch.set_rng_state(rng)


def shard_name(rank: int, world_size: int) -> str:
    return f"rank_{rank:05d}_of_{world_size:05d}.safetensors"


def _resharded(files: list[Any], name: str, rank: int, world_size: int) -> torch.Tensor:
    """This rank's part of a tensor; FSDP shards dimension 0 as `torch.chunk` does."""
    if len(files) == world_size:
        return _tensor(files[rank], name)
    parts = [_tensor(file, name) for file in files if name in file.keys()]  # noqa: SIM118 -- not a dict
    if name == _RNG or parts[0].dim() == 0:
        return parts[0]
    chunks = torch.cat(parts).chunk(world_size)
    return chunks[rank] if rank < len(chunks) else chunks[0][:0]


def _tensor(file: Any, name: str) -> torch.Tensor:
    tensor: torch.Tensor = file.get_tensor(name)
    return tensor


def _check(policy: Policy, tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    for name, shard in policy.shards.items():
        stored = tensors.get(f"parameter.{name}")
        if stored is None and name.startswith(VALUE_HEAD):
            raise ValueError(
                f"checkpoint {folder} has no critic: it was written by another algorithm; set "
                "algorithm back, or begin a new run from the weights it published"
            )
        if stored is None or stored.shape != shard.shape or stored.dtype != shard.dtype:
            found = "nothing" if stored is None else f"{stored.dtype} {tuple(stored.shape)}"
            raise ValueError(
                f"checkpoint {folder} holds {found} for parameter {name}, the model has "
                f"{shard.dtype} {tuple(shard.shape)}: it is of another model, another dtype, or "
                "another lora_rank or lora_targets: set them back"
            )
    stored_names = {name.partition(".")[2] for name in tensors if name.startswith("parameter.")}
    unused = sorted(filter(is_adapter, stored_names - policy.shards.keys()))
    if unused:
        raise ValueError(
            f"checkpoint {folder} holds {unused[0]}, which is not trained now: set lora_rank and "
            "lora_targets back"
        )
