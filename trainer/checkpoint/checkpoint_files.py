"""The files of a checkpoint: one safetensors file for each rank, and JSON.

    checkpoint.folder/step_000012/rank_00000_of_00002.safetensors   `Policy.state`, random state
                                  state.json                        `Checkpoint`
                                  checksums.json, .complete         `own_files.py`; written last

A folder is filled under a temporary name and renamed when complete. In an object store
(`object_path.py`) it has its name from the start: with .complete it is complete. What is whose in
the folder of checkpoints, `own_files.py` decides.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

import torch

from services.chassis.errors import ConfigError
from trainer import fsync_files
from trainer.checkpoint import own_files
from trainer.config import Setting
from trainer.fsync_files import open_tensors
from trainer.model.critic import is_critic
from trainer.model.lora import is_adapter
from trainer.object_path import AnyFolder, Folder, ObjectPath
from trainer.policy.policy import Policy


class WrongCheckpoint(ConfigError, ValueError):  # noqa: N818 -- names what it is
    """It is of another run, model or kind of training, or all are damaged: a restart helps not."""


RNG = "rng"
"""Name of the random state in a shard."""
_PARAMETER = "parameter."
_PARTIAL = ".partial_"
_DAMAGED = ".damaged"
"""Name of the marker of a folder of objects that is kept for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The state of a checkpoint apart from its tensors."""

    run_id: str
    step: int
    """Newest optimizer step it covers."""
    weight_version: int
    """Newest published version when it was written."""
    world_size: int
    """Ranks that wrote it."""
    settings: Mapping[str, Setting]
    """`TrainerConfig.reproducibility_settings` of the run."""
    base: str = ""
    """`TrainerConfig.base` of the run: the weights that an adapter is added to."""
    model: str = ""
    """Folder that the run started from; empty: an older release wrote the checkpoint."""
    record: Mapping[str, Any]
    """Record of the step; after a crash its line may be missing in the metrics file."""


def newest(
    folder: AnyFolder, on_damaged: Callable[[own_files.DamagedError, AnyFolder], None] | None = None
) -> tuple[AnyFolder, Checkpoint] | None:
    """The newest complete checkpoint in `folder` whose files are what was written.

    Newer ones that are damaged are kept under another name, and reported to `on_damaged`, with it.
    A copy of a checkpoint under the name of another step is none.

    Raises:
        DamagedError: all are damaged.
    """
    damaged: own_files.DamagedError | None = None
    for step, path in reversed(own_files.steps_in(folder).items()):
        if not own_files.is_complete(path) or own_files.mark_of(path).get("step", step) != step:
            continue
        try:
            _verify(path, (path / fsync_files.COMPLETE).read_bytes())
            return path, read_state(path)
        except own_files.DamagedError as error:
            damaged = error
            if on_damaged is not None:
                on_damaged(error, _set_aside(path))
    if damaged is not None:
        raise damaged
    return None


@lru_cache(maxsize=8)
def _verify(folder: Folder, marker: bytes) -> None:
    own_files.verify(folder)


def _set_aside(folder: AnyFolder) -> AnyFolder:
    """Keep a damaged checkpoint where no trainer looks."""
    if isinstance(folder, ObjectPath):
        (folder / fsync_files.COMPLETE).unlink()
        (folder / _DAMAGED).write_text("")
        return folder
    return own_files.move_aside(folder, "damaged_")


def read_state(folder: Folder) -> Checkpoint:
    """Read a checkpoint of this release or a neighbouring one, whose further fields are ignored.

    Raises:
        ValueError: `folder` is not a complete checkpoint.
    """
    if not (folder / fsync_files.COMPLETE).is_file() or not (folder / own_files.STATE).is_file():
        raise ValueError(
            f"{folder} is not a checkpoint: give a folder such as checkpoints/step_000000040, "
            f"which holds {own_files.STATE} and {fsync_files.COMPLETE}"
        )
    known = {field.name for field in fields(Checkpoint)}
    record = own_files.read_json(folder / own_files.STATE)
    return Checkpoint(**{k: v for k, v in record.items() if k in known})


def read_parameters(folder: Folder) -> dict[str, torch.Tensor]:
    """The whole trained parameters by name, without optimizer state, of any number of ranks."""
    with ExitStack() as stack:
        files = [stack.enter_context(open_tensors(path)) for path in own_files.shards_in(folder)]
        shards = _Shards(files, 0, 1)
        names = sorted(name for name in shards.names if name.startswith(_PARAMETER))
        return {name.removeprefix(_PARAMETER): shards.whole(name) for name in names}


def begin(folder: AnyFolder, step: int) -> AnyFolder:
    """An empty folder for the checkpoint of `step`, which is not complete.

    Raises:
        OSError: in an object store something else has its name.
    """
    for other, leftover in own_files.steps_in(folder).items():
        if own_files.has_step(leftover, other) and not _ended(leftover):
            own_files.delete(leftover)
    partial = folder / own_files.folder_name(
        step, own_files.CHECKPOINT if isinstance(folder, ObjectPath) else _PARTIAL
    )
    if isinstance(partial, Path):
        for old in own_files.steps_in(folder, _PARTIAL).values():  # of a crash
            own_files.delete(old)
        own_files.clear(partial)
        partial.mkdir(parents=True)
    elif own_files.has_step(partial, step):
        own_files.delete(partial)
    elif own_files.is_complete(partial):
        raise OSError(f"{partial} holds the checkpoint of another step: give that another name")
    fsync_files.write_json(partial / own_files.STATE, {"step": step})
    return cast("AnyFolder", partial)


def is_written(folder: Folder, world_size: int) -> bool:
    """Whether `folder` has the shards of all ranks."""
    # Listed, as NFS clients cache that a name does not exist.
    names = {path.name for path in folder.iterdir()}
    return all(shard_name(rank, world_size) in names for rank in range(world_size))


def complete(partial: AnyFolder, checkpoint: Checkpoint, keep: int) -> AnyFolder:
    """Write state.json and checksums, make it visible, delete all but the `keep` newest.

    Raises:
        OSError: a shard is missing.
    """
    if not is_written(partial, checkpoint.world_size):
        raise OSError(f"checkpoint {partial} lacks shards of its {checkpoint.world_size} ranks")
    fsync_files.write_json(partial / own_files.STATE, asdict(checkpoint))
    own_files.seal(partial)
    final = partial
    if not isinstance(partial, ObjectPath):
        final = partial.parent / own_files.folder_name(checkpoint.step)
        if own_files.has_step(final, checkpoint.step):
            own_files.clear(final)
        elif final.is_symlink() or final.exists():
            own_files.move_aside(final, own_files.OTHER)
        partial.rename(final)
        fsync_files.sync(final.parent)
    for old in _complete(final.parent, checkpoint.run_id)[:-keep]:
        own_files.delete(old)
    return final


def _complete(folder: AnyFolder, run_id: str) -> list[AnyFolder]:
    """The run's checkpoints in order, but for those that `BestObject` names."""
    named = {own_files.named_step(folder / name) for name in (own_files.BEST, own_files.CANDIDATE)}
    return [
        path
        for step, path in own_files.steps_in(folder).items()
        if step not in named
        and own_files.is_complete(path)
        and own_files.has_step(path, step, run_id)
    ]


def _ended(folder: Folder) -> bool:
    return own_files.is_complete(folder) or (folder / _DAMAGED).is_file()


def load_shards(policy: Policy, folder: Folder, rank: int, world_size: int) -> None:
    """Load this rank's state from `folder`, written by any number of ranks.

    Raises:
        WrongCheckpoint: it is of another model.
    """
    with ExitStack() as stack:
        files = [stack.enter_context(open_tensors(path)) for path in own_files.shards_in(folder)]
        shards = _Shards(files, rank, world_size)
        tensors = dict(_state(policy, shards))
        _check(policy, tensors, shards.names, folder)
        policy.load_state(tensors)
        torch.set_rng_state(shards.rng())


def shard_name(rank: int, world_size: int) -> str:
    return f"rank_{rank:05d}_of_{world_size:05d}.safetensors"


class _Shards:
    """The files of all ranks that wrote a checkpoint, for one rank of those that read it.

    A tensor is whole in one file (of a pipeline), or its chunks are in several.
    """

    def __init__(self, files: list[Any], rank: int, world_size: int) -> None:
        self._files, self._rank, self._world_size = files, rank, world_size
        self._names = [set(file.keys()) for file in files]
        self.names = set().union(*self._names)

    def rng(self) -> torch.Tensor:
        """Random state: of the same rank, or else of the first."""
        return _tensor(self._files[self._rank if self._is_same_size else 0], RNG)

    def whole(self, name: str) -> torch.Tensor:
        """A whole tensor; a number is the same in each file that has it."""
        parts = [
            _tensor(f, name) for f, n in zip(self._files, self._names, strict=True) if name in n
        ]
        return parts[0] if len(parts) == 1 or parts[0].dim() == 0 else torch.cat(parts)

    def part(self, name: str, shape: torch.Size, policy: Policy) -> torch.Tensor:
        """This rank's part of a tensor, as it was written or cut anew; nothing else is read."""
        is_same_cut = policy.num_parts == sum(name in names for names in self._names)
        if is_same_cut and name in self._names[policy.part_number]:
            file = self._files[policy.part_number]
            if tuple(file.get_slice(name).get_shape()) == tuple(shape):
                return _tensor(file, name)
        return self._rows(name, policy)

    def _rows(self, name: str, policy: Policy) -> torch.Tensor:
        """Rows of the files that have some of this rank's."""
        slices = [
            f.get_slice(name) for f, n in zip(self._files, self._names, strict=True) if name in n
        ]
        sizes = [each.get_shape()[0] for each in slices]
        first, last = rows_of_part(policy, sum(sizes))
        parts: list[torch.Tensor] = []
        for entry, size, begin in zip(slices, sizes, accumulate(sizes, initial=0), strict=False):
            lo, hi = min(max(first - begin, 0), size), min(last - begin, size)
            if lo < hi or not parts:  # at least one, for the shape of no rows
                parts.append(entry[lo : max(lo, hi)])
        return torch.cat(parts)

    @property
    def _is_same_size(self) -> bool:
        return len(self._files) == self._world_size


def rows_of_part(policy: Policy, size: int) -> tuple[int, int]:
    """First row of this rank's part of a tensor of `size` rows, and the one after its last.

    FSDP cuts dimension 0 as `torch.chunk`.
    """
    rows = -(-size // policy.num_parts)
    first = policy.part_number * rows
    return min(first, size), min(first + rows, size)


def _state(policy: Policy, shards: _Shards) -> Iterator[tuple[str, torch.Tensor]]:
    for name, shard in policy.shards.items():
        for key in ("parameter", "exp_avg", "exp_avg_sq"):
            if (full := f"{key}.{name}") in shards.names:
                yield full, shards.part(full, shard.shape, policy)
        if (full := f"step.{name}") in shards.names:
            yield full, shards.whole(full)


def _tensor(file: Any, name: str) -> torch.Tensor:
    tensor: torch.Tensor = file.get_tensor(name)
    return tensor


def _check(
    policy: Policy, tensors: Mapping[str, torch.Tensor], names: Collection[str], folder: Folder
) -> None:
    for name, shard in policy.shards.items():
        stored = tensors.get(_PARAMETER + name)
        if stored is None and is_critic(name):
            raise WrongCheckpoint(
                f"checkpoint {folder} has no parameter {name} of the critic: it was written by "
                "another algorithm or another critic; set algorithm, critic and critic_model back, "
                "or start a new run from its published weights"
            )
        if stored is None or stored.shape != shard.shape or stored.dtype != shard.dtype:
            found = "nothing" if stored is None else f"{stored.dtype} {tuple(stored.shape)}"
            raise WrongCheckpoint(
                f"checkpoint {folder} holds {found} for parameter {name}, the model has "
                f"{shard.dtype} {tuple(shard.shape)}: its model, dtype, lora.rank or lora.targets "
                "is different; set it back"
            )
    stored_names = {n.removeprefix(_PARAMETER) for n in names if n.startswith(_PARAMETER)}
    unused = sorted(filter(is_adapter, stored_names - policy.shards.keys()))
    if unused:
        raise WrongCheckpoint(
            f"checkpoint {folder} holds {unused[0]}, which the current settings do not train: set "
            "lora.rank and lora.targets back"
        )
