"""The trained parameters of a rank, their gradients, and AdamW's state of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trainer.config import TrainerConfig
from trainer.model.critic import CRITIC, is_critic

_UNDECAYED = ("bias", "layernorm", "rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)")
"""Of names, as `Trainer.get_decay_parameter_names` of transformers has them."""
_STATE = ("step", "exp_avg", "exp_avg_sq")
"""AdamW's, of each parameter."""


class Optimizer:
    """Updates parameters in place.

    The optimizer has plain local tensors that share storage with the models' DTensors: AdamW is
    elementwise, so the result is the same, without DTensor dispatch per operation and parameter.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        config: TrainerConfig,
        decayed: Collection[str],
    ) -> None:
        """Update `parameters`, by name; those of `decayed` decay."""
        self._parameters = dict(parameters)
        self.shards = {
            name: nn.Parameter(_local(parameter.detach()))
            for name, parameter in self._parameters.items()
            if parameter.requires_grad
        }
        """This rank's part of each trained parameter, by name."""
        self._optimizer = torch.optim.AdamW(
            _groups(self.shards, config, decayed),
            lr=config.optimizer.learning_rate,
            betas=(config.optimizer.beta1, config.optimizer.beta2),
            fused=True,
        )

    def tensors(self, saves: Callable[[str], bool] = lambda _: True) -> dict[str, torch.Tensor]:
        """Parameters and AdamW's state as "parameter.NAME", "exp_avg.NAME"; not copies.

        Args:
            saves: whether a parameter, given by name, is asked for.
        """
        shards = {name: shard for name, shard in self.shards.items() if saves(name)}
        tensors = {f"parameter.{name}": shard.detach() for name, shard in shards.items()}
        for name, shard in shards.items():
            for key, value in self._optimizer.state.get(shard, {}).items():
                tensors[f"{key}.{name}"] = value
        return tensors

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load what `tensors` gave: parameters in place, AdamW's state as copies."""
        for name, shard in self.shards.items():
            shard.detach().copy_(tensors[f"parameter.{name}"])
            if f"exp_avg.{name}" in tensors and shard.numel():
                self._optimizer.state[shard] = {
                    key: tensors[f"{key}.{name}"].to(
                        device=shard.device if key != "step" or shard.is_cuda else "cpu", copy=True
                    )
                    for key in _STATE
                }

    def whole_like(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name, and a tensor of shape and type, of each whole trained parameter, without memory."""
        for name, shard in self.shards.items():
            shape = self._parameters[name].shape
            yield name, torch.empty(shape, dtype=shard.dtype, device="meta")

    def squared_norm(self, prefix: str, counts: Callable[[str], bool]) -> torch.Tensor:
        """Of the gradients of one model's parameters that this rank counts; float64, a scalar."""
        squares = [
            _local(parameter.grad).double().square().sum()
            for name, parameter in self._of_model(prefix)
            if counts(name) and parameter.grad is not None
        ]
        return torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)

    def scale_gradients(self, prefix: str, scale: float) -> None:
        """Take the gradients of one model, times `scale`, for the next `update`."""
        for name, parameter in self._of_model(prefix):
            if parameter.grad is not None:
                self.shards[name].grad = _local(parameter.grad).mul_(scale)

    def update(self, learning_rate: float) -> None:
        """Update the parameters; their gradients are then forgotten."""
        for group in self._optimizer.param_groups:
            group["lr"] = group["scale"] * learning_rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.forget_gradients()

    def forget_gradients(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def all_tensors(self) -> Iterator[torch.Tensor]:
        """AdamW's state, parameters and gradients."""
        for shard in self.shards.values():
            yield from self._optimizer.state.get(shard, {}).values()
        for parameter in self._parameters.values():
            yield _local(parameter.detach())
            if parameter.grad is not None:
                yield _local(parameter.grad)

    def _of_model(self, prefix: str) -> Iterator[tuple[str, nn.Parameter]]:
        """The critic's own model has prefix `CRITIC`, the policy's an empty one."""
        for name, parameter in self._parameters.items():
            if name.startswith(CRITIC) == (prefix == CRITIC):
                yield name, parameter


def decayed_names(policy: nn.Module, critic: nn.Module | None) -> Collection[str]:
    """The names of the parameters that decay, by the rule of transformers' Trainer.

    Norms and biases do not.
    """
    from transformers.trainer_pt_utils import get_parameter_names

    models = {"": policy} | ({} if critic is None else {CRITIC: critic})
    return {
        f"{prefix}{name}"
        for prefix, model in models.items()
        for name in get_parameter_names(model, [nn.LayerNorm], _UNDECAYED)  # type: ignore[no-untyped-call]
    }


def _groups(
    shards: Mapping[str, nn.Parameter], config: TrainerConfig, decayed: Collection[str]
) -> list[dict[str, Any]]:
    """Parameter groups: the critic has a separate learning rate."""
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, shard in shards.items():
        scale = config.critic_rate_scale if is_critic(name) else 1.0
        decay = config.optimizer.weight_decay if name in decayed else 0.0
        if shard.numel():
            groups.setdefault((scale, decay), []).append(shard)
    return [
        {"params": params, "scale": scale, "weight_decay": decay}
        for (scale, decay), params in groups.items()
    ]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor that may be sharded."""
    if isinstance(tensor, DTensor):
        part: torch.Tensor = tensor.to_local()
        return part
    return tensor


def learning_rate(config: TrainerConfig, step: int) -> float:
    """Learning rate of optimizer step `step` (from 1): warm-up, then the schedule.

    It is that of transformers' schedules, which count from 0 and begin with a rate of 0: of
    `get_linear_schedule_with_warmup(warmup_steps, num_steps + 1)` at `step`, and without a warm-up
    of `(0, num_steps)` at `step - 1`.
    """
    optimizer = config.optimizer
    if step < optimizer.warmup_steps:
        return optimizer.learning_rate * step / optimizer.warmup_steps
    if optimizer.schedule == "constant":
        return optimizer.learning_rate
    first = max(optimizer.warmup_steps, 1)  # the step of the full rate
    remaining = max(config.num_steps - step + 1, 0) / max(config.num_steps - first + 1, 1)
    share = remaining if optimizer.schedule == "linear" else _half_cosine(remaining)
    return optimizer.learning_rate * (optimizer.final_share + (1 - optimizer.final_share) * share)


def _half_cosine(remaining: float) -> float:
    """From 1, with all remaining, to 0 (SGDR, arXiv 1608.03983, eq. 5)."""
    return (1 - math.cos(math.pi * remaining)) / 2
