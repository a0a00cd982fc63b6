"""How the models are spread over the ranks: what `Policy` asks of it.

`sharded_backend.py` shards them by FSDP2, `trainer/pipeline` cuts them into stages.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Protocol

import torch
from torch import nn
from torch.distributed import ProcessGroup

from services.lib.routed_experts import RoutingShape
from trainer.commands import Accumulate, Predict
from trainer.policy.forward import Predicted
from trainer.policy.totals import Totals
from trainer.publish.bucket_plan import Source

Predictions = Mapping[int, Mapping[int, Predicted]]
"""By model (0: the policy's), then by micro-batch."""


class Backend(Protocol):
    """The models on this rank, and what all ranks compute with them."""

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Of this rank, by the names that checkpoints have; a critic's own begin with `CRITIC`."""

    @property
    def decayed(self) -> Collection[str]:
        """Names of the parameters that decay."""

    @property
    def packed(self) -> bool:
        """Whether sequences are computed without padding."""

    @property
    def vocabulary_size(self) -> int:
        """Rows of the embedding: token ids are below it."""

    @property
    def routing(self) -> RoutingShape | str:
        """How the policy's routers choose, or why they cannot replay recorded experts."""

    @property
    def part_number(self) -> int:
        """Of this rank's part of each tensor, from 0."""

    @property
    def num_parts(self) -> int:
        """Parts of each tensor."""

    @property
    def norm_group(self) -> ProcessGroup | None:
        """Ranks whose counted parameters together are the models; None: all."""

    def counts(self, name: str) -> bool:
        """Whether this rank adds a parameter to the gradient norm: one rank of `norm_group`."""

    def saves(self, name: str) -> bool:
        """Whether this rank has a parameter's part in checkpoints: one rank of all."""

    def accumulate(
        self, command: Accumulate, totals: Totals, proximal: Predictions
    ) -> dict[str, float]:
        """Add the gradient of a chunk's loss, before division by the denominator. Collective.

        Args:
            command: the micro-batches of this rank.
            totals: to which their sums are added.
            proximal: of `predict` for the same mini-batch; empty: the step has one update.

        Returns:
            What rank 0 is to know, such as seconds of a task.
        """

    def predict(self, command: Predict) -> Predictions:
        """What the models predict with the present weights. Collective."""

    def complete_gradients(self) -> None:
        """Add up the gradients that other ranks have for parameters of this one. Collective."""

    def reduced(self, totals: Totals) -> dict[str, float]:
        """Loss and means of the step, the same on every rank. Collective."""

    def weights_changed(self) -> None:
        """Compute with the present weights from now on."""

    def published_sources(self) -> list[Source]:
        """The tensors to publish, and who has which part of them; the same on every rank."""

    def published_parts(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What this rank has of them, one at a time. Collective."""

    def checkpoint_tensors(self, published: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Published tensors by their names in a model folder."""

    def own_tensors(self) -> Iterator[torch.Tensor]:
        """Tensors on this rank's device besides parameters and their gradients."""
