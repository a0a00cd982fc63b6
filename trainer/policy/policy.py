"""The policy on one rank: its shard of the model, its optimizer, and the steps of both.

Shape suffixes: B rows of a micro-batch, T tokens.
"""
# ruff: noqa: N806 -- tensors carry shape suffixes

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from trainer.algorithms.base import Algorithm, PolicyTokens
from trainer.config import TrainerConfig
from trainer.data.micro_batch import MicroBatch
from trainer.model.lora import is_adapter, merged, plain_name, published_name
from trainer.policy.commands import Accumulate
from trainer.policy.forward import VALUE_HEAD, Predicted, forward

__all__ = ["NonFiniteError", "Policy", "learning_rate"]


class NonFiniteError(ArithmeticError):
    """The loss or the gradient is not finite; the weights were not updated."""


class Policy:
    """A sharded model and the AdamW state of its local shards.

    The optimizer has plain local tensors that share storage with the model's DTensors: AdamW is
    elementwise, so the result is the same, without DTensor dispatch per operation and parameter.
    """

    def __init__(
        self, model: nn.Module, algorithm: Algorithm, config: TrainerConfig, *, packed: bool
    ) -> None:
        self.model = model
        self.packed = packed
        self._parameters = dict(model.named_parameters())
        self.shards = {
            name: _shard(parameter)
            for name, parameter in self._parameters.items()
            if parameter.requires_grad
        }
        """The trained parameters, which a checkpoint holds; with an adapter, its parameters."""
        self._algorithm = algorithm
        self._config = config
        self._totals = _Totals()
        self._optimizer = torch.optim.AdamW(
            self._groups(),
            lr=config.optimizer.learning_rate,
            betas=(config.optimizer.beta1, config.optimizer.beta2),
            weight_decay=config.optimizer.weight_decay,
            fused=True,
        )

    def accumulate(self, command: Accumulate) -> None:
        """Add the gradient of a chunk's loss, before division by the denominator. Collective."""
        for batch in command.micro_batches:
            self._totals.add(self._backward(batch, command.weight_version))
        self._totals.num_tokens += command.num_tokens
        self._totals.denominator += command.denominator

    def optimize(self, step: int) -> dict[str, float]:
        """Update the weights with the accumulated gradient; metrics, the same on every rank.

        Collective. A step without a trainable token does not change the weights.

        Raises:
            NonFiniteError: the loss or the gradient norm is not finite.
        """
        totals = self._take_totals()
        if totals.num_tokens == 0:
            return {}
        metrics = self._measured(totals)
        for name in ("loss", "grad_norm"):
            if not math.isfinite(metrics[name]):
                self.model.zero_grad(set_to_none=True)
                raise NonFiniteError(
                    f"{name} of step {step} is {metrics[name]}: the weights were not updated; "
                    "lower optimizer.learning_rate or max_grad_norm, or check the step's rewards"
                )
        metrics["learning_rate"] = learning_rate(self._config, step)
        scale = min(1.0, self._config.optimizer.max_grad_norm / (metrics["grad_norm"] + 1e-6))
        metrics["grad_scale"] = scale
        self._update(scale / totals.denominator, metrics["learning_rate"])
        return metrics

    def discard(self) -> dict[str, float]:
        """Forget the accumulated gradient; its loss and norm, which may be infinite. Collective."""
        totals = self._take_totals()
        metrics = self._measured(totals) if totals.num_tokens else {}
        self.model.zero_grad(set_to_none=True)
        return metrics

    def _take_totals(self) -> _Totals:
        totals, self._totals = self._totals, _Totals()
        return totals

    def _measured(self, totals: _Totals) -> dict[str, float]:
        metrics = totals.reduced()
        metrics["grad_norm"] = self._grad_norm() / totals.denominator
        return metrics

    def published_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors to publish, gathered one at a time. Collective."""
        if self._config.publish.content == "adapter":
            for name in filter(is_adapter, self._parameters):
                yield published_name(name), self._whole(name)
        else:
            yield from self._whole_weights()

    def _whole_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters and buffers by name, without the critic."""
        for name in self._parameters:
            if not (name.startswith(VALUE_HEAD) or is_adapter(name)):
                yield plain_name(name), merged(self.model, name, self._whole)
        persistent = self.model.state_dict()
        for name, buffer in self.model.named_buffers():
            if name in persistent:
                yield plain_name(name), buffer

    def _whole(self, name: str) -> torch.Tensor:
        # Collectives run between devices, also if the shard is offloaded to the host.
        parameter = self._parameters[name].detach().to(self._config.device)
        assert isinstance(parameter, DTensor), "fully_shard makes every parameter a DTensor"
        # On one rank the shard is the whole parameter: skip the collective.
        alone = parameter.device_mesh.size() == 1
        whole: torch.Tensor = parameter.to_local() if alone else parameter.full_tensor()
        return whole

    def state(self) -> dict[str, torch.Tensor]:
        """This rank's shards and optimizer state by name; not copies."""
        tensors = {f"parameter.{name}": shard.detach() for name, shard in self.shards.items()}
        for name, shard in self.shards.items():
            for key, value in self._optimizer.state.get(shard, {}).items():
                tensors[f"{key}.{name}"] = value
        return tensors

    def device_tensors(self) -> Iterator[torch.Tensor]:
        """All tensors on this rank's device between commands, gradients included."""
        for tensor in (*self.state().values(), *self._kept()):
            if tensor.device.type == self._config.device:
                yield tensor

    def _kept(self) -> Iterator[torch.Tensor]:
        for parameter in self._parameters.values():
            yield _local(parameter.detach())
            if parameter.grad is not None:
                yield _local(parameter.grad)

    def load_state(self, tensors: dict[str, torch.Tensor]) -> None:
        """Load the tensors of `state`: parameters in place, optimizer state as copies."""
        for name, shard in self.shards.items():
            shard.detach().copy_(tensors[f"parameter.{name}"])
            if f"exp_avg.{name}" in tensors and shard.numel():
                self._optimizer.state[shard] = {
                    key: tensors[f"{key}.{name}"].to(
                        device=shard.device if key != "step" or shard.is_cuda else "cpu", copy=True
                    )
                    for key in ("step", "exp_avg", "exp_avg_sq")
                }

    def _groups(self) -> list[dict[str, Any]]:
        """Parameter groups: the critic, initialised to 0, has a separate learning rate."""
        groups = []
        for own, scale in ((False, 1.0), (True, self._config.critic_rate_scale)):
            shards = [
                shard
                for name, shard in self.shards.items()
                if name.startswith(VALUE_HEAD) == own and shard.numel()
            ]
            groups += [{"params": shards, "scale": scale}] if shards else []
        return groups

    def _backward(self, batch: MicroBatch, weight_version: int) -> dict[str, torch.Tensor]:
        predicted = forward(self.model, batch, self._config.device, packed=self.packed)
        terms = self._algorithm.loss(self._tokens(batch, predicted, weight_version))
        # FSDP averages gradients over the ranks; the loss is a sum over them.
        (terms.loss * dist.get_world_size()).backward()  # type: ignore[no-untyped-call]
        device = terms.loss.device
        computed = {
            "sequence_tokens": torch.tensor(batch.lengths_B.sum(), device=device),
            "computed_tokens": torch.tensor(predicted.num_tokens, device=device),
        }
        return {"loss": terms.loss.detach(), **computed, **terms.sums}

    def _tokens(self, batch: MicroBatch, predicted: Predicted, weight_version: int) -> PolicyTokens:
        logprobs_BT, device = predicted.logprobs_BT, self._config.device
        dtype = logprobs_BT.dtype
        advantages_B = torch.from_numpy(batch.advantages_B).to(device, dtype)
        weights_B = torch.from_numpy(batch.weights_B).to(device, dtype)
        behaviour_BT = torch.from_numpy(batch.behaviour_logprobs_BT[:, 1:])
        reference_BT = torch.from_numpy(batch.reference_logprobs_BT[:, 1:])
        versions_BT = torch.from_numpy(batch.weight_versions_BT[:, 1:]).to(device)
        turn_rewards_BT = torch.from_numpy(batch.turn_rewards_BT[:, 1:])
        return PolicyTokens(
            logprobs_BT=logprobs_BT,
            values_BT=predicted.values_BT,
            behaviour_logprobs_BT=behaviour_BT.to(device, dtype),
            reference_logprobs_BT=reference_BT.to(device, dtype),
            advantages_BT=advantages_B[:, None].expand_as(logprobs_BT),
            turn_rewards_BT=turn_rewards_BT.to(device, dtype),
            weights_BT=weights_B[:, None].expand_as(logprobs_BT),
            staleness_BT=weight_version - versions_BT,
            loss_mask_BT=torch.from_numpy(batch.loss_mask_BT[:, 1:]).to(device),
            rollouts_B=torch.from_numpy(batch.rollouts_B).to(device),
            groups_B=torch.from_numpy(batch.groups_B).to(device),
        )

    def _grad_norm(self) -> float:
        squares = [
            _local(parameter.grad).double().square().sum()
            for parameter in self._parameters.values()
            if parameter.grad is not None
        ]
        total = torch.stack(squares).sum().to(self._config.device)
        dist.all_reduce(total)
        return math.sqrt(total.item())

    def _update(self, scale: float, learning_rate: float) -> None:
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                self.shards[name].grad = _local(parameter.grad).mul_(scale)
        for group in self._optimizer.param_groups:
            group["lr"] = group["scale"] * learning_rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.model.zero_grad(set_to_none=True)


class _Totals:
    """Sums over the accumulated part of a step."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.denominator = 0.0
        self._sums: dict[str, torch.Tensor] = {}

    def add(self, sums: Mapping[str, torch.Tensor]) -> None:
        """Add the sums of a micro-batch on this rank."""
        for name, value in sums.items():
            wide = value.double()
            self._sums[name] = self._sums[name] + wide if name in self._sums else wide

    def reduced(self) -> dict[str, float]:
        """Loss, computed tokens and means over tokens, over all ranks. Collective."""
        names = sorted(self._sums)
        totals = torch.stack([self._sums[name] for name in names])
        dist.all_reduce(totals)
        values = dict(zip(names, totals.tolist(), strict=True))
        whole = {
            "loss": values.pop("loss") / self.denominator,
            # Above 1 if sequences share prefixes.
            "packing": values.pop("sequence_tokens") / values["computed_tokens"],
            "computed_tokens": values.pop("computed_tokens"),
        }
        return whole | {name: value / self.num_tokens for name, value in values.items()}


def learning_rate(config: TrainerConfig, step: int) -> float:
    """Learning rate of optimizer step `step` (from 1): warm-up, then the schedule."""
    optimizer = config.optimizer
    if step < optimizer.warmup_steps:
        return optimizer.learning_rate * step / optimizer.warmup_steps
    if optimizer.schedule == "constant":
        return optimizer.learning_rate
    remaining = (config.num_steps - step + 1) / (config.num_steps - optimizer.warmup_steps + 1)
    share = remaining if optimizer.schedule == "linear" else _half_cosine(remaining)
    return optimizer.learning_rate * (optimizer.final_share + (1 - optimizer.final_share) * share)


def _half_cosine(remaining: float) -> float:
    """From 1, with all remaining, to 0 (SGDR, arXiv 1608.03983, eq. 5)."""
    return (1 - math.cos(math.pi * remaining)) / 2


def _shard(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(_local(parameter.detach()))


def _local(tensor: torch.Tensor | None) -> torch.Tensor:
    assert isinstance(tensor, DTensor), "fully_shard makes every parameter a DTensor"
    local: torch.Tensor = tensor.to_local()
    return local
