"""The policy on one rank: its part of the models, their optimizer, and the steps of both.

A backend says how the models are spread over the ranks: `sharded_policy.py`, `trainer/pipeline`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from trainer.algorithms.base import Algorithm
from trainer.config import TrainerConfig
from trainer.policy.commands import Accumulate, Predict
from trainer.policy.critic import CRITIC, is_critic
from trainer.policy.forward import Predicted
from trainer.policy.totals import Totals

__all__ = ["NonFiniteError", "Policy", "learning_rate", "local"]

_STATE = ("step", "exp_avg", "exp_avg_sq")
"""AdamW's, of each parameter."""


class NonFiniteError(ArithmeticError):
    """The loss or the gradient is not finite; the weights were not updated."""


class Policy(ABC):
    """The trained parameters on this rank and their AdamW state.

    The optimizer has plain local tensors that share storage with the models' DTensors: AdamW is
    elementwise, so the result is the same, without DTensor dispatch per operation and parameter.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        algorithm: Algorithm,
        config: TrainerConfig,
    ) -> None:
        """Train some parameters.

        Args:
            parameters: of this rank, by the names that checkpoints have; those of a critic's own
                model begin with `CRITIC`.
            algorithm: of the loss.
            config: of the trainer.
        """
        self.packed = False
        """Whether sequences are computed without padding."""
        self.vocabulary_size = 0
        """Rows of the embedding: token ids are below it."""
        self.part_number, self.num_parts = 0, 1
        """Of this rank's part of each tensor, and how many there are."""
        self._parameters = dict(parameters)
        self.shards = {
            name: nn.Parameter(local(parameter.detach()))
            for name, parameter in self._parameters.items()
            if parameter.requires_grad
        }
        """The trained parameters, which a checkpoint holds; with an adapter, its parameters."""
        self._algorithm = algorithm
        self._config = config
        self._prefixes = ("", CRITIC) if config.critic == "model" else ("",)
        self._totals = Totals()
        self._measures: tuple[Totals, dict[str, float]] | None = None
        """Of the gradient to update with."""
        self._norm_group: ProcessGroup | None = None
        """Ranks whose parameters together are the models; None: all."""
        self._proximal: dict[tuple[int, int], dict[int, Predicted]] = {}
        """By mini-batch and model, then by micro-batch: predictions at the start of the step."""
        self._optimizer = torch.optim.AdamW(
            self._groups(),
            lr=config.optimizer.learning_rate,
            betas=(config.optimizer.beta1, config.optimizer.beta2),
            weight_decay=config.optimizer.weight_decay,
            fused=True,
        )

    @abstractmethod
    def accumulate(self, command: Accumulate) -> dict[str, float]:
        """Add the gradient of a chunk's loss, before division by the denominator. Collective."""

    @abstractmethod
    def predict(self, command: Predict) -> None:
        """Keep what the models predict with the present weights. Collective."""

    @abstractmethod
    def published_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors to publish, gathered one at a time. Collective."""

    @abstractmethod
    def checkpoint_tensors(self, gathered: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Published tensors by their names in a model folder."""

    def measure(self, step: int) -> None:
        """Compute loss and gradient norms of the accumulated part; `optimize` follows. Collective.

        Raises:
            NonFiniteError: the loss or a gradient norm is not finite.
        """
        totals = self._take_totals()
        metrics = self._measured(totals) if totals.num_tokens else {}
        for name in ("loss", *(_metric(prefix, "grad_norm") for prefix in self._prefixes)):
            if not math.isfinite(metrics.get(name, 0.0)):
                self._forget_gradients()
                raise NonFiniteError(
                    f"{name} of step {step} is {metrics[name]}: the weights were not updated; "
                    "lower optimizer.learning_rate or max_grad_norm, or check the step's rewards"
                )
        self._measures = totals, metrics

    def optimize(self, step: int) -> dict[str, float]:
        """Update the weights with the accumulated gradient; metrics, the same on every rank.

        Collective, unless `measure` went before. A step without a trainable token does not change
        the weights.

        Raises:
            NonFiniteError: the loss or a gradient norm is not finite.
        """
        if self._measures is None:
            self.measure(step)
        assert self._measures is not None
        (totals, metrics), self._measures = self._measures, None
        if totals.num_tokens == 0:
            return {}
        metrics["learning_rate"] = learning_rate(self._config, step)
        for prefix in self._prefixes:
            norm = metrics[_metric(prefix, "grad_norm")]
            scale = min(1.0, self._config.optimizer.max_grad_norm / (norm + 1e-6))
            metrics[_metric(prefix, "grad_scale")] = scale
            self._set_gradients(prefix, scale / totals.denominator)
        self._update(metrics["learning_rate"])
        return metrics

    def discard(self) -> dict[str, float]:
        """Forget the gradient; its loss and norms, which may be infinite. Collective."""
        totals = self._take_totals()
        metrics = self._measured(totals) if totals.num_tokens else {}
        self._forget_gradients()
        return metrics

    def state(self) -> dict[str, torch.Tensor]:
        """What this rank saves: parameters and optimizer state by name; not copies."""
        return self._state_of(dict(self._saved()))

    def held_state(self) -> dict[str, torch.Tensor]:
        """As `state`, of all that this rank has."""
        return self._state_of(self.shards)

    def whole_like(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name, and a tensor of shape and type, of each whole trained parameter, without memory."""
        for name, shard in self.shards.items():
            shape = self._parameters[name].shape
            yield name, torch.empty(shape, dtype=shard.dtype, device="meta")

    def _state_of(self, shards: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
        tensors = {f"parameter.{name}": shard.detach() for name, shard in shards.items()}
        for name, shard in shards.items():
            for key, value in self._optimizer.state.get(shard, {}).items():
                tensors[f"{key}.{name}"] = value
        return tensors

    def load_state(self, tensors: dict[str, torch.Tensor]) -> None:
        """Load the tensors of `state`: parameters in place, optimizer state as copies."""
        for name, shard in self.shards.items():
            shard.detach().copy_(tensors[f"parameter.{name}"])
            if f"exp_avg.{name}" in tensors and shard.numel():
                self._optimizer.state[shard] = {
                    key: tensors[f"{key}.{name}"].to(
                        device=shard.device if key != "step" or shard.is_cuda else "cpu", copy=True
                    )
                    for key in _STATE
                }

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole tensor of `state`: FSDP cuts dimension 0 as `torch.chunk`."""
        chunks = whole.chunk(self.num_parts)
        return chunks[self.part_number] if self.part_number < len(chunks) else chunks[0][:0]

    def device_tensors(self) -> Iterator[torch.Tensor]:
        """All tensors on this rank's device between commands, gradients included."""
        for tensor in (*self._optimizer_tensors(), *self._kept()):
            if tensor.device.type == self._config.device:
                yield tensor

    def _optimizer_tensors(self) -> Iterator[torch.Tensor]:
        for shard in self.shards.values():
            yield from self._optimizer.state.get(shard, {}).values()

    def _kept(self) -> Iterator[torch.Tensor]:
        for parameter in self._parameters.values():
            yield local(parameter.detach())
            if parameter.grad is not None:
                yield local(parameter.grad)

    def _saved(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that this rank saves."""
        yield from self.shards.items()

    def _groups(self) -> list[dict[str, Any]]:
        """Parameter groups: the critic has a separate learning rate."""
        groups = []
        for critic, scale in ((False, 1.0), (True, self._config.critic_rate_scale)):
            shards = [
                shard
                for name, shard in self.shards.items()
                if is_critic(name) == critic and shard.numel()
            ]
            groups += [{"params": shards, "scale": scale}] if shards else []
        return groups

    def _kept_for(self, command: Predict, model: int) -> dict[int, Predicted]:
        """Where the predictions of a command go."""
        found: dict[int, Predicted] = {}
        self._proximal[command.mini_batch, model] = found
        return found

    def _proximal_of(self, command: Accumulate, model: int) -> Mapping[int, Predicted]:
        """By micro-batch; none if the step has one update."""
        if command.mini_batch is None:
            return {}
        return self._proximal.get((command.mini_batch, model), {})

    def _take_totals(self) -> Totals:
        totals, self._totals = self._totals, Totals()
        return totals

    def _measured(self, totals: Totals) -> dict[str, float]:
        """Loss and means, and the gradient norm of each model. Collective."""
        metrics = self._reduced(totals)
        for prefix in self._prefixes:
            metrics[_metric(prefix, "grad_norm")] = self._grad_norm(prefix) / totals.denominator
        return metrics

    def _reduced(self, totals: Totals) -> dict[str, float]:
        return totals.reduced()

    def _grad_norm(self, prefix: str) -> float:
        squares = [
            local(parameter.grad).double().square().sum()
            for parameter in self._counted(prefix)
            if parameter.grad is not None
        ]
        device = self._config.device
        total = torch.zeros((), dtype=torch.float64, device=device)
        total += torch.stack(squares).sum().to(device) if squares else 0.0
        dist.all_reduce(total, group=self._norm_group)
        return math.sqrt(total.item())

    def _counted(self, prefix: str) -> Iterator[nn.Parameter]:
        """The parameters of a model that this rank adds to its norm."""
        for name, parameter in self._parameters.items():
            if name.startswith(CRITIC) == (prefix == CRITIC):
                yield parameter

    def _set_gradients(self, prefix: str, scale: float) -> None:
        for name, parameter in self._parameters.items():
            if name.startswith(CRITIC) == (prefix == CRITIC) and parameter.grad is not None:
                self.shards[name].grad = local(parameter.grad).mul_(scale)

    def _update(self, learning_rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = group["scale"] * learning_rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._forget_gradients()

    def _forget_gradients(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None


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


def _metric(prefix: str, name: str) -> str:
    """`critic_grad_norm` of the critic's own model."""
    return f"{prefix.replace('.', '_')}{name}"


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor that may be sharded."""
    if isinstance(tensor, DTensor):
        part: torch.Tensor = tensor.to_local()
        return part
    return tensor
