"""One rank: executes rank 0's commands, in order."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from services.lib.routed_experts import RoutingShape
from trainer.algorithms.base import make_algorithm
from trainer.checkpoint import checkpoint_files
from trainer.checkpoint.host_copy import copy_stream
from trainer.checkpoint.shard_writer import ShardWriter
from trainer.config import TrainerConfig
from trainer.data.computations import Accumulate, Predict
from trainer.model.context_ranks import context_group
from trainer.model.load_model import DTYPES
from trainer.model.load_sharded import load_sharded, ranks_mesh
from trainer.object_path import place
from trainer.pipeline.pipeline_backend import PipelineBackend
from trainer.policy.backend import Backend
from trainer.policy.policy import Policy
from trainer.policy.sharded_backend import ShardedBackend
from trainer.ranks.commands import (
    Command,
    Discard,
    Exit,
    Form,
    Gather,
    Load,
    Measure,
    Optimize,
    Release,
    Restore,
    Save,
    Written,
)
from trainer.ranks.offload import DeviceState
from trainer.ranks.state_transfer import transfer

__all__ = ["Worker"]

_KEEPS_STATE = (Accumulate, Predict, Measure, Discard, Save, Written, Gather)
"""Commands that change nothing that a checkpoint holds."""


class Worker:
    """This rank's policy, and the execution of commands on it. Needs the process group."""

    def __init__(
        self, config: TrainerConfig, store: Store | None = None, *, waits: bool = False
    ) -> None:
        """Load the models. Collective.

        Args:
            config: of the trainer.
            store: of the commands, in which the ranks of a pipeline say that they failed.
            waits: for a `Form`, to load the models then.
        """
        torch.manual_seed(config.seed)
        self._config, self._store = config, store
        self.gathered: dict[str, torch.Tensor] = {}
        """On rank 0 after `Gather`: the published tensors by their names in a checkpoint, on the
        host."""
        self._loaded = None if waits else _policy(config, store, config.replicas)
        self._held: dict[str, torch.Tensor] = {}
        """State in the process group before, until the present one carries out a command."""
        self._device_state = DeviceState()
        self._shard_writer = ShardWriter(copy_stream(config.device))
        self._published_dtype = DTYPES[config.dtype]

    @property
    def packed(self) -> bool:
        """Whether sequences are computed without padding."""
        return self._policy.backend.packed

    @property
    def vocabulary_size(self) -> int:
        """Rows of the embedding: token ids are below it."""
        return self._policy.backend.vocabulary_size

    @property
    def routing(self) -> RoutingShape | str:
        """How the routers of the model choose, or why they cannot replay recorded experts."""
        return self._policy.backend.routing

    @property
    def _policy(self) -> Policy:
        assert self._loaded is not None, "waits for a process group"
        return self._loaded

    def do(self, command: Command) -> dict[str, float]:
        """Execute one command; its results by name."""
        if not isinstance(command, Form):
            self._held = {}
        if not isinstance(command, _KEEPS_STATE):
            self._shard_writer.hold_back()
        match command:
            case Accumulate():
                return self._policy.accumulate(command)
            case Predict():
                self._policy.predict(command)
            case Measure(step=step):
                self._policy.measure(step)
            case Optimize(step=step):
                return self._policy.optimize(step)
            case Discard():
                return self._policy.discard()
            case Save(folder=folder):
                name = checkpoint_files.shard_name(*_place())
                self._shard_writer.start(self._policy, place(folder), name)
            case Written(folder=folder):
                return {"written": float(self._shard_writer.written(place(folder)))}
            case Load(folder=folder):
                checkpoint_files.load_shards(self._policy, place(folder), *_place())
            case Form():
                self._take_over(command)
            case Gather():
                self._gather()
            case Release():
                return {"num_bytes": self._device_state.release(self._policy.device_tensors())}
            case Restore():
                self._device_state.restore()
            case Exit():
                dist.destroy_process_group()
        return {}

    def _take_over(self, form: Form) -> None:
        """Load the models on the new group, and the state that its members hold."""
        if self._loaded is not None and not self._held:
            self._held = self._loaded.held_state()
        policy = _policy(self._config, self._store, form.replicas)
        transfer(policy, self._held, form.sources, self._config.device)
        self._loaded = policy

    def _gather(self) -> None:
        self.gathered = {}
        for name, full in self._policy.backend.published_tensors():
            if dist.get_rank() == 0:
                # A copy even on the CPU: the next step must not change the published tensors.
                dtype = self._published_dtype if full.is_floating_point() else full.dtype
                self.gathered[name] = full.to("cpu", dtype, copy=True)
        if self.gathered:
            self.gathered = self._policy.backend.checkpoint_tensors(self.gathered)


def _policy(config: TrainerConfig, store: Store | None, replicas: int) -> Policy:
    return Policy(_backend(config, store, replicas), config)


def _backend(config: TrainerConfig, store: Store | None, replicas: int) -> Backend:
    algorithm = make_algorithm(config)
    if config.backend == "pipeline":
        return PipelineBackend(config, algorithm, store)
    mesh = ranks_mesh(config.device, replicas)
    models = load_sharded(config, mesh, critic=algorithm.critic)
    return ShardedBackend(models, mesh, algorithm, config, context_group(config.context_parallel))


def _place() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()
