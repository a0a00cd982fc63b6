"""The gradient of a step, whole, as the ranks have it before any division."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from services.lib.transformer import context_group
from tests.lib.trainer.support import make_samples, trainer_config
from trainer.commands import Accumulate
from trainer.config import TrainerConfig
from trainer.data.token_sequence import sequence
from trainer.policy.forward import Totals
from trainer.policy.policy import Backend
from trainer.ranks.process_group import join
from trainer.ranks.worker import Worker
from trainer.step.chunk_commands import ChunkCommands


def save_gradients(jobs: Sequence[dict[str, Any]]) -> None:
    """Write loss, means and gradient of the step that seed 1 gives, to `out` of each job.

    A job has `config`, `model`, `out`, and `doubled` if ranks are to add up the gradient of what
    all have alike.
    """
    ranks = join(_config(jobs[0]))
    for job in jobs:
        config = _config(job)
        worker = Worker(config, ranks.store)
        commands = ChunkCommands(config, ranks.world_size, packed=worker.backend.packed)
        command = commands.of([sequence(each) for each in make_samples(1)], 2)[ranks.rank]
        backward = _doubled if job.get("doubled") else context_group._Gather.backward
        with patch.object(context_group._Gather, "backward", staticmethod(backward)):
            found = _gradient(worker._policy.backend, command)
        if ranks.rank == 0:
            save_file(found, job["out"])
    dist.destroy_process_group()


def _config(job: dict[str, Any]) -> TrainerConfig:
    folder, model = Path("unused"), job["model"]
    return trainer_config(run_id="r", checkpoint__folder=folder, model=model, **job["config"])


def _gradient(backend: Backend, command: Accumulate) -> dict[str, torch.Tensor]:
    for name, parameter in backend.parameters.items():
        # At first they are 0, so that nothing before them has a gradient.
        if name.endswith(("value_head.weight", "lora_B.weight")):
            torch.nn.init.constant_(_local(parameter), 0.1)
    totals = Totals()
    totals.num_tokens, totals.denominator = command.num_tokens, command.denominator
    backend.accumulate(command, totals, {})
    found = {f"metric.{n}": torch.tensor(v) for n, v in backend.reduced(totals).items()}
    grads = {name: each.grad for name, each in backend.parameters.items() if each.requires_grad}
    return found | {name: _whole(grad) for name, grad in grads.items() if grad is not None}


def _doubled(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
    """As if the ranks of a group computed parts of one loss, not each the same."""
    return 2 * grads[0][ctx.number], None, None, None


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).contiguous()
