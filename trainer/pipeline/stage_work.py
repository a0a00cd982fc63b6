"""Stages at work on the micro-batches of a command: what they keep from forward to backward.

Shape suffixes: B rows of a micro-batch, T tokens.
"""
# ruff: noqa: N806 -- tensors carry shape suffixes

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from trainer.algorithms.base import Algorithm
from trainer.data.micro_batch import MicroBatch
from trainer.model.critic import take_values
from trainer.pipeline.fused_schedule.problem import FORWARD
from trainer.pipeline.interpreter import Shape
from trainer.pipeline.stage import Stage
from trainer.policy.forward import Predicted, Totals, policy_loss
from trainer.policy.model_input import ModelInput


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """What the last stages compute the loss from."""

    algorithm: Algorithm
    batches: Sequence[MicroBatch]
    weight_version: int
    """Base version of the step."""
    totals: Totals
    """Gets the sums to report."""
    proximal: Mapping[int, Predicted]
    """By micro-batch: predictions at the start of the step; none if it has one update."""
    kept: dict[int, Predicted] = field(default_factory=dict)
    """Gets the predictions, by micro-batch, where no loss is computed."""


class HiddenStates:
    """A stage whose hidden states another one needs."""

    def __init__(self, stage: Stage, inputs: Sequence[ModelInput]) -> None:
        self._stage, self._inputs = stage, inputs
        self._kept: dict[int, tuple[torch.Tensor | None, torch.Tensor]] = {}

    def incoming(self, kind: int, micro_batch: int) -> Shape:
        """Hidden states, or their gradient."""
        return (*self._inputs[micro_batch].shape, self._stage.hidden_size), self._stage.dtype

    def forward(self, micro_batch: int, given: torch.Tensor | None) -> torch.Tensor | None:
        """The hidden states after this stage."""
        leaf, output = self._computed(micro_batch, given)
        self._kept[micro_batch] = leaf, output
        return output.detach()

    def backward(self, micro_batch: int, given: torch.Tensor | None) -> torch.Tensor | None:
        """The gradient of the hidden states before this stage."""
        leaf, output = self._kept.pop(micro_batch)
        torch.autograd.backward(output, given)
        return None if leaf is None else leaf.grad

    def _computed(
        self, micro_batch: int, given: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        leaf = None if given is None else given.requires_grad_()
        return leaf, self._stage(self._inputs[micro_batch], leaf)


class PolicyLoss(HiddenStates):
    """The policy's last stage: the loss. Its backward gets the values of a critic's own model."""

    def __init__(self, stage: Stage, inputs: Sequence[ModelInput], loss: Loss) -> None:
        super().__init__(stage, inputs)
        self._policy, self._loss = stage.model, loss
        self._values: dict[int, torch.Tensor | None] = {}
        self._entropies: dict[int, torch.Tensor] = {}

    def incoming(self, kind: int, micro_batch: int) -> Shape:
        """Hidden states, or values."""
        if kind == FORWARD:
            return super().incoming(kind, micro_batch)
        shape = self._loss.batches[micro_batch].token_ids_BT.shape
        return shape, torch.promote_types(self._stage.dtype, torch.float32)

    def forward(self, micro_batch: int, given: torch.Tensor | None) -> torch.Tensor | None:
        """Keep the log-probs of the tokens, and the values of a critic that is a layer."""
        leaf, found = self._computed(micro_batch, given)
        tokens, values = self._inputs[micro_batch], take_values(self._policy)
        predictions = tokens.predictions(found)
        self._kept[micro_batch] = leaf, predictions.logprobs_BT
        self._entropies[micro_batch] = predictions.entropies_BT
        self._values[micro_batch] = None if values is None else tokens.values(values)
        return None

    def backward(self, micro_batch: int, given: torch.Tensor | None) -> torch.Tensor | None:
        """From the loss."""
        leaf, logprobs_BT = self._kept.pop(micro_batch)
        own, shape = self._values.pop(micro_batch), self._inputs[micro_batch].shape
        predicted = Predicted(
            logprobs_BT=logprobs_BT,
            entropies_BT=self._entropies.pop(micro_batch),
            values_BT=own if given is None else given,
            num_tokens=shape[0] * shape[1],
        )
        batch, loss = self._loss.batches[micro_batch], self._loss
        proximal = loss.proximal.get(micro_batch)
        value, sums, rows = policy_loss(
            loss.algorithm, batch, predicted, loss.weight_version, proximal
        )
        value.backward()  # type: ignore[no-untyped-call]
        loss.totals.add(sums, rows)
        return None if leaf is None else leaf.grad


class CriticLoss(HiddenStates):
    """The last stage of a critic's own model: values, and the part of the loss that they are in.

    That part does not depend on the policy's log-probs (`check_separable`), so the critic need not
    wait for the policy: the recorded ones stand for them.
    """

    def __init__(self, stage: Stage, inputs: Sequence[ModelInput], loss: Loss) -> None:
        super().__init__(stage, inputs)
        self._loss = loss

    def forward(self, micro_batch: int, given: torch.Tensor | None) -> torch.Tensor | None:
        """The values after each token."""
        leaf, values = self._computed(micro_batch, given)
        values_BT = self._inputs[micro_batch].values(values)
        self._kept[micro_batch] = leaf, values_BT
        return values_BT.detach()

    def backward(self, micro_batch: int, given: torch.Tensor | None) -> torch.Tensor | None:
        """From the loss."""
        leaf, values_BT = self._kept.pop(micro_batch)
        batch, loss = self._loss.batches[micro_batch], self._loss
        recorded_BT = torch.from_numpy(batch.behaviour_logprobs_BT[:, 1:]).to(values_BT)
        predicted = Predicted(logprobs_BT=recorded_BT, values_BT=values_BT, num_tokens=0)
        proximal = loss.proximal.get(micro_batch)
        value, *_ = policy_loss(loss.algorithm, batch, predicted, loss.weight_version, proximal)
        value.backward()  # type: ignore[no-untyped-call]
        return None if leaf is None else leaf.grad


class StatesAlone(HiddenStates):
    """Hidden states that no gradient will be taken of."""

    @torch.no_grad()
    def forward(self, micro_batch: int, given: torch.Tensor | None) -> torch.Tensor | None:
        """The hidden states after this stage."""
        states: torch.Tensor = self._stage(self._inputs[micro_batch], given)
        return states


class PolicyPrediction(PolicyLoss):
    """The policy's last stage; it keeps what is predicted."""

    @torch.no_grad()
    def forward(self, micro_batch: int, given: torch.Tensor | None) -> torch.Tensor | None:
        """Keep the log-probs."""
        return super().forward(micro_batch, given)

    def backward(self, micro_batch: int, given: torch.Tensor | None) -> torch.Tensor | None:
        """Keep the values with them."""
        _, logprobs_BT = self._kept.pop(micro_batch)
        own, _ = self._values.pop(micro_batch), self._entropies.pop(micro_batch)
        self._loss.kept[micro_batch] = Predicted(
            logprobs_BT=logprobs_BT, values_BT=own if given is None else given, num_tokens=0
        )
        return None


class CriticPrediction(CriticLoss):
    """The last stage of a critic's own model; it keeps its values."""

    @torch.no_grad()
    def forward(self, micro_batch: int, given: torch.Tensor | None) -> torch.Tensor | None:
        """The values after each token."""
        values_BT = super().forward(micro_batch, given)
        self._kept.pop(micro_batch)
        assert values_BT is not None, "a critic gives values"
        # Its part of the loss does not depend on log-probs.
        self._loss.kept[micro_batch] = Predicted(
            logprobs_BT=torch.zeros_like(values_BT[:, 1:]), values_BT=values_BT, num_tokens=0
        )
        return values_BT
