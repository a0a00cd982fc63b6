"""One rank: executes rank 0's commands, in order."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from trainer.algorithms.base import make_algorithm
from trainer.checkpoint import checkpoint_files
from trainer.config import TrainerConfig
from trainer.model.checkpoint_names import checkpoint_tensors
from trainer.policy.commands import (
    Accumulate,
    Command,
    Discard,
    Exit,
    Gather,
    Load,
    Optimize,
    Release,
    Restore,
    Save,
    Written,
)
from trainer.policy.load_model import DTYPES, load_sharded
from trainer.policy.policy import Policy
from trainer.ranks.offload import DeviceState

__all__ = ["Worker"]


class Worker:
    """This rank's policy, and the execution of commands on it. Needs the process group."""

    def __init__(self, config: TrainerConfig) -> None:
        torch.manual_seed(config.seed)
        mesh = init_device_mesh(config.device, (dist.get_world_size(),))
        self.gathered: dict[str, torch.Tensor] = {}
        """On rank 0 after `Gather`: the published tensors by their names in a checkpoint, on the
        host."""
        algorithm = make_algorithm(config)
        model, self.packed = load_sharded(config, mesh, critic=algorithm.critic)
        """Whether sequences are computed without padding."""
        self.vocabulary_size = int(cast(Any, model).get_input_embeddings().weight.shape[0])
        """Rows of the embedding: token ids are below it."""
        self._model = model
        self._publishes_adapter = config.publish.content == "adapter"
        self._policy = Policy(model, algorithm, config, packed=self.packed)
        self._device_state = DeviceState()
        self._shard_writer = checkpoint_files.ShardWriter(*_place())
        self._published_dtype = DTYPES[config.dtype]

    def do(self, command: Command) -> dict[str, float]:
        """Execute one command; its results by name."""
        match command:
            case Accumulate():
                self._policy.accumulate(command)
            case Optimize(step=step):
                return self._policy.optimize(step)
            case Discard():
                return self._policy.discard()
            case Save(folder=folder):
                self._shard_writer.start(self._policy, Path(folder))
            case Written(folder=folder):
                return {"written": float(self._shard_writer.written(Path(folder)))}
            case Load(folder=folder):
                checkpoint_files.load_shards(self._policy, Path(folder), *_place())
            case Gather():
                self._gather()
            case Release():
                return {"num_bytes": self._device_state.release(self._policy.device_tensors())}
            case Restore():
                self._device_state.restore()
            case Exit():
                dist.destroy_process_group()
        return {}

    def _gather(self) -> None:
        self.gathered = {}
        for name, full in self._policy.published_tensors():
            if dist.get_rank() == 0:
                # A copy even on the CPU: the next step must not change the published tensors.
                dtype = self._published_dtype if full.is_floating_point() else full.dtype
                self.gathered[name] = full.to("cpu", dtype, copy=True)
        if self.gathered and not self._publishes_adapter:
            self.gathered = checkpoint_tensors(self._model, self.gathered)


def _place() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()
