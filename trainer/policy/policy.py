"""The policy on one rank: its models, their optimizer, and the steps of both.

A `Backend` says how the models are spread over the ranks: `sharded_backend.py` shards them by
FSDP2, `trainer/pipeline` cuts them into stages.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from services.lib.routed_experts import RoutingShape
from trainer.commands import Accumulate, Predict
from trainer.config import TrainerConfig
from trainer.model.critic import CRITIC
from trainer.policy.forward import Predicted, Totals, TrainedRows
from trainer.policy.optimizer import Optimizer, learning_rate
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


class NonFiniteError(ArithmeticError):
    """The loss or the gradient is not finite; the weights were not updated."""


class Policy:
    """Accumulates gradients, then updates the weights; checkpoints hold its state.

    ACCUMULATING -> (`measure`) MEASURED -> (`optimize`) ACCUMULATING.
    """

    def __init__(self, backend: Backend, config: TrainerConfig) -> None:
        self.backend = backend
        self._config = config
        self._optimizer = Optimizer(backend.parameters, config, backend.decayed)
        self._prefixes = ("", CRITIC) if config.critic == "model" else ("",)
        self._totals = self._new_totals()
        self._rows: list[TrainedRows] = []
        """What the updates of the step trained on."""
        self._measures: tuple[Totals, dict[str, float]] | None = None
        self._predicted: dict[int, tuple[Predict, Predictions]] = {}
        """By mini-batch: its rows, and what the models predicted at the start of the step."""

    @property
    def shards(self) -> dict[str, torch.nn.Parameter]:
        """The trained parameters, which a checkpoint holds; with an adapter, its parameters."""
        return self._optimizer.shards

    @property
    def num_parts(self) -> int:
        """Parts of each tensor of `state`."""
        return self.backend.num_parts

    @property
    def part_number(self) -> int:
        """Of this rank's part, from 0."""
        return self.backend.part_number

    def accumulate(self, command: Accumulate) -> dict[str, float]:
        """Add the gradient of a chunk's loss, before division by the denominator. Collective.

        Raises:
            ValueError: the command is of a mini-batch that this rank has not predicted.
        """
        proximal: Predictions = {}
        if command.mini_batch is not None:
            command, proximal = self._of_predicted(command, command.mini_batch)
        found = self.backend.accumulate(command, self._totals, proximal)
        self._totals.num_tokens += command.num_tokens
        self._totals.denominator += command.denominator
        return found

    def predict(self, command: Predict) -> None:
        """Keep what the models predict with the present weights. Collective."""
        self._predicted[command.mini_batch] = command, self.backend.predict(command)

    def measure(self, step: int) -> None:
        """Compute loss and gradient norms of the accumulated part; `optimize` follows. Collective.

        Raises:
            NonFiniteError: the loss or a gradient norm is not finite.
        """
        totals = self._take_totals()
        metrics = self._measured(totals) if totals.num_tokens else {}
        for name in ("loss", *(_metric(prefix, "grad_norm") for prefix in self._prefixes)):
            if not math.isfinite(metrics.get(name, 0.0)):
                self._optimizer.forget_gradients()
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
            self._optimizer.scale_gradients(prefix, scale / totals.denominator)
        self._optimizer.update(metrics["learning_rate"])
        self._rows += totals.rows
        self.backend.weights_changed()
        return metrics

    def take_rows(self) -> list[TrainedRows]:
        """What the updates since the last call trained on."""
        rows, self._rows = self._rows, []
        return rows

    def discard(self) -> dict[str, float]:
        """Forget the gradient; its loss and norms, which may be infinite. Collective."""
        totals = self._take_totals()
        metrics = self._measured(totals) if totals.num_tokens else {}
        self._optimizer.forget_gradients()
        return metrics

    def state(self) -> dict[str, torch.Tensor]:
        """What this rank saves: parameters and optimizer state by name; not copies."""
        return self._optimizer.tensors(self.backend.saves)

    def held_state(self) -> dict[str, torch.Tensor]:
        """As `state`, of all that this rank has."""
        return self._optimizer.tensors()

    def whole_like(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._optimizer.whole_like()

    def load_state(self, tensors: dict[str, torch.Tensor]) -> None:
        """Load the tensors of `state`: parameters in place, optimizer state as copies."""
        self._optimizer.load(tensors)
        self.backend.weights_changed()

    def device_tensors(self) -> Iterator[torch.Tensor]:
        """All tensors on this rank's device between commands, gradients included."""
        for tensor in (*self._optimizer.all_tensors(), *self.backend.own_tensors()):
            if tensor.device.type == self._config.device:
                yield tensor

    def _of_predicted(self, command: Accumulate, mini_batch: int) -> tuple[Accumulate, Predictions]:
        """The command with the rows of its `Predict`, and what was predicted for them."""
        if mini_batch not in self._predicted:
            raise ValueError(
                f"mini-batch {mini_batch} has not been predicted on this rank, which has "
                f"{sorted(self._predicted)}: give it `Predict` before `Accumulate`"
            )
        predict, predictions = self._predicted[mini_batch]
        return replace(command, micro_batches=predict.micro_batches), predictions

    def _take_totals(self) -> Totals:
        totals, self._totals = self._totals, self._new_totals()
        return totals

    def _new_totals(self) -> Totals:
        return Totals(keeps_rows=self._config.tracking.recorded_steps > 0)

    def _measured(self, totals: Totals) -> dict[str, float]:
        """Loss and means, and the gradient norm of each model. Collective."""
        self.backend.complete_gradients()
        metrics = self.backend.reduced(totals)
        for prefix in self._prefixes:
            metrics[_metric(prefix, "grad_norm")] = self._grad_norm(prefix) / totals.denominator
        return metrics

    def _grad_norm(self, prefix: str) -> float:
        """Over all ranks. Collective."""
        total = torch.zeros((), dtype=torch.float64, device=self._config.device)
        total += self._optimizer.squared_norm(prefix, self.backend.counts).to(total.device)
        dist.all_reduce(total, group=self.backend.norm_group)
        return math.sqrt(total.item())


def _metric(prefix: str, name: str) -> str:
    """`critic_grad_norm` of the critic's own model."""
    return f"{prefix.replace('.', '_')}{name}"
