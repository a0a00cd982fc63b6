"""A policy whose models are sharded by FSDP2: every rank has a part of each parameter.

With replicas (HSDP), ranks 0 to n-1 have the n parts of the first one, the next n ranks those of
the second, and so on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from trainer.algorithms.base import Algorithm
from trainer.config import TrainerConfig
from trainer.data.micro_batch import MicroBatch
from trainer.model.checkpoint_names import checkpoint_tensors
from trainer.model.lora import is_adapter, merged, plain_name, published_name
from trainer.policy.commands import Accumulate, Predict
from trainer.policy.critic import CRITIC, is_critic
from trainer.policy.forward import Predicted, forward
from trainer.policy.load_model import Models
from trainer.policy.policy import Policy
from trainer.policy.policy_loss import policy_loss

__all__ = ["ShardedPolicy"]


class ShardedPolicy(Policy):
    """Each rank computes its own micro-batches with the gathered weights."""

    def __init__(
        self, models: Models, mesh: DeviceMesh, algorithm: Algorithm, config: TrainerConfig
    ) -> None:
        self._model, self._critic = models.policy, models.critic
        parameters = dict(models.policy.named_parameters())
        if models.critic is not None:
            parameters |= {f"{CRITIC}{n}": p for n, p in models.critic.named_parameters()}
        super().__init__(parameters, algorithm, config)
        self.part_number, self.num_parts = mesh.get_local_rank(mesh.ndim - 1), mesh.size(-1)
        self._norm_group = mesh.get_group(mesh.ndim - 1)
        self.packed = models.packed
        self.vocabulary_size = int(cast(Any, models.policy).get_input_embeddings().weight.shape[0])

    def accumulate(self, command: Accumulate) -> dict[str, float]:
        """Add the gradient of a chunk's loss, before division by the denominator. Collective."""
        proximal = self._proximal_of(command, 0)
        for number, batch in enumerate(command.micro_batches):
            self._totals.add(self._backward(batch, command.weight_version, proximal.get(number)))
        self._totals.num_tokens += command.num_tokens
        self._totals.denominator += command.denominator
        return {}

    @torch.no_grad()
    def predict(self, command: Predict) -> None:
        """Keep what the models predict with the present weights. Collective."""
        kept = self._kept_for(command, 0)
        for number, batch in enumerate(command.micro_batches):
            kept[number] = self._predicted(batch)

    def published_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors to publish, gathered one at a time. Collective."""
        if self._config.publish.content == "adapter":
            for name in filter(is_adapter, self._parameters):
                yield published_name(name), self._whole(name)
        else:
            yield from self._whole_weights()

    def checkpoint_tensors(self, gathered: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Published tensors by their names in a model folder."""
        if self._config.publish.content == "adapter":
            return gathered
        return checkpoint_tensors(self._model, gathered)

    def _saved(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The first replica saves."""
        if dist.get_rank() == self.part_number:
            yield from super()._saved()

    def _whole_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters and buffers by name, without the critic."""
        for name in self._parameters:
            if not (is_critic(name) or is_adapter(name)):
                yield plain_name(name), merged(self._model, name, self._whole)
        persistent = self._model.state_dict()
        for name, buffer in self._model.named_buffers():
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

    def _predicted(self, batch: MicroBatch) -> Predicted:
        return forward(
            self._model, batch, self._config.device, packed=self.packed, critic=self._critic
        )

    def _backward(
        self, batch: MicroBatch, weight_version: int, proximal: Predicted | None
    ) -> dict[str, torch.Tensor]:
        predicted = self._predicted(batch)
        loss, sums = policy_loss(self._algorithm, batch, predicted, weight_version, proximal)
        # FSDP averages gradients over the ranks; the loss is a sum over them.
        (loss * dist.get_world_size()).backward()  # type: ignore[no-untyped-call]
        return sums
