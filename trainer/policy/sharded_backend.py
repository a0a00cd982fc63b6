"""Models that are sharded by FSDP2: every rank has a part of each parameter.

With replicas (HSDP), ranks 0 to n-1 have the n parts of the first one, the next n ranks those of
the second, and so on. The ranks of a context group have the same micro-batches, and compute a slice
of the tokens of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from services.lib.transformer.context_group import ContextGroup
from trainer.algorithms.base import Algorithm
from trainer.commands import Accumulate, Predict
from trainer.config import TrainerConfig
from trainer.data.micro_batch import MicroBatch
from trainer.model.critic import CRITIC, is_critic
from trainer.model.load_model import DTYPES, Models, checkpoint_tensors
from trainer.model.lora import delta, is_adapter, plain_name, published_name
from trainer.policy.forward import Predicted, Totals, TrainedRows, forward, policy_loss
from trainer.policy.optimizer import decayed_names
from trainer.policy.policy import Predictions
from trainer.publish.bucket_plan import Source, source_of

_ALL = 0
"""The models compute together: one prediction has log-probs and values."""


class ShardedBackend:
    """Each rank computes its own micro-batches with the gathered weights (`Backend`)."""

    def __init__(
        self,
        models: Models,
        mesh: DeviceMesh,
        algorithm: Algorithm,
        config: TrainerConfig,
        context: ContextGroup | None = None,
    ) -> None:
        self._model, self._critic, self._context = models.policy, models.critic, context
        self._algorithm, self._config = algorithm, config
        self.parameters: Mapping[str, nn.Parameter] = dict(_named(models))
        self.decayed = decayed_names(models.policy, models.critic)
        self.part_number, self.num_parts = mesh.get_local_rank(mesh.ndim - 1), mesh.size(-1)
        self.norm_group: ProcessGroup | None = mesh.get_group(mesh.ndim - 1)
        self.packed, self.routing = models.packed, models.routing
        self.vocabulary_size = int(cast(Any, models.policy).get_input_embeddings().weight.shape[0])

    def counts(self, _name: str) -> bool:
        """Every rank of a replica has its own part."""
        return True

    def saves(self, _name: str) -> bool:
        """The first replica saves."""
        return dist.get_rank() == self.part_number

    def accumulate(
        self, command: Accumulate, totals: Totals, proximal: Predictions
    ) -> dict[str, float]:
        before = proximal.get(_ALL, {})
        for number, batch in enumerate(command.micro_batches):
            totals.add(*self._backward(batch, command.weight_version, before.get(number)))
        return {}

    @torch.no_grad()
    def predict(self, command: Predict) -> Predictions:
        return {_ALL: {n: self._predicted(b) for n, b in enumerate(command.micro_batches)}}

    def complete_gradients(self) -> None:
        """FSDP has done it."""

    def reduced(self, totals: Totals) -> dict[str, float]:
        return totals.reduced()

    def weights_changed(self) -> None:
        """The models compute with the parameters themselves."""

    def own_tensors(self) -> Iterator[torch.Tensor]:
        return iter(())

    def published_sources(self) -> list[Source]:
        dtype, rows = DTYPES[self._config.dtype], self.num_parts
        found = [
            source_of(published, self.parameters[name], dtype, range(rows))
            for name, published in self._published_names().items()
        ]
        return found + [source_of(name, each, dtype, (0,)) for name, each in self._buffers()]

    def published_parts(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What this rank has of them, one at a time; only the first replica has. Collective."""
        if dist.get_rank() == self.part_number:
            for name, published in self._published_names().items():
                yield published, self._merged_part(name)
        if dist.get_rank() == 0:
            yield from self._buffers()

    def checkpoint_tensors(self, published: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if self._config.publish.content == "adapter":
            return published
        return checkpoint_tensors(self._model, published)

    def _published_names(self) -> dict[str, str]:
        """Names of the parameters that are published, and their names then; no critic's."""
        if self._config.publish.content == "adapter":
            return {name: published_name(name) for name in self.parameters if is_adapter(name)}
        return {
            name: plain_name(name)
            for name in self.parameters
            if not (is_critic(name) or is_adapter(name))
        }

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self._config.publish.content == "adapter":
            return
        persistent = self._model.state_dict()
        for name, buffer in self._model.named_buffers():
            if name in persistent:
                yield plain_name(name), buffer

    def _merged_part(self, name: str) -> torch.Tensor:
        """This rank's rows of a parameter, merged with its layer's adapter."""
        parameter = self.parameters[name].detach()
        assert isinstance(parameter, DTensor), "fully_shard makes every parameter a DTensor"
        mine: torch.Tensor = parameter.to_local()
        added = delta(self._model, name, self._whole)
        if added is None:
            return mine
        first = -(-len(added) // self.num_parts) * self.part_number
        return mine.to(added.device) + added[first : first + len(mine)]

    def _whole(self, name: str) -> torch.Tensor:
        # Collectives run between devices, also if the shard is offloaded to the host.
        parameter = self.parameters[name].detach().to(self._config.device)
        assert isinstance(parameter, DTensor), "fully_shard makes every parameter a DTensor"
        # On one rank the shard is the whole parameter: skip the collective.
        alone = parameter.device_mesh.size() == 1
        whole: torch.Tensor = parameter.to_local() if alone else parameter.full_tensor()
        return whole

    def _predicted(self, batch: MicroBatch) -> Predicted:
        return forward(
            self._model,
            batch,
            self._config.device,
            packed=self.packed,
            chunk_tokens=self._config.batch.logit_tokens,
            critic=self._critic,
            context=self._context,
        )

    def _backward(
        self, batch: MicroBatch, weight_version: int, proximal: Predicted | None
    ) -> tuple[dict[str, torch.Tensor], TrainedRows | None]:
        predicted = self._predicted(batch)
        loss, sums, rows = policy_loss(self._algorithm, batch, predicted, weight_version, proximal)
        # FSDP averages gradients over the ranks; the loss is a sum over them. Ranks of a context
        # group have the same loss, and the gradient of their own tokens.
        (loss * dist.get_world_size()).backward()  # type: ignore[no-untyped-call]
        if self._context is None or self._context.number == 0:
            return sums, rows
        return {name: torch.zeros_like(value) for name, value in sums.items()}, None


def _named(models: Models) -> Iterator[tuple[str, nn.Parameter]]:
    """By the names that checkpoints have."""
    yield from models.policy.named_parameters()
    if models.critic is not None:
        for name, parameter in models.critic.named_parameters():
            yield f"{CRITIC}{name}", parameter
