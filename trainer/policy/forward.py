"""The forward pass over a micro-batch, the loss of its tokens, and the sums over those of a step.

Shape suffixes: B rows of a micro-batch, T tokens of a row, N trainable tokens of its rows.
"""
# ruff: noqa: N806, N815 -- tensors carry shape suffixes

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

from services.lib.transformer.context_group import ContextGroup
from services.lib.transformer.routers import replaying
from services.lib.transformer.row_rope import row_rope
from trainer.algorithms.base import Algorithm, LossTerms, PolicyTokens
from trainer.data.micro_batch import MicroBatch
from trainer.model.critic import take_values
from trainer.policy.model_input import ModelInput, model_input, predicted


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """The models' output for the tokens of each row."""

    logprobs_BT: torch.Tensor
    """Log-prob of the tokens 1..T-1, after temperature; if packed, 0 for tokens not trainable."""
    values_BT: torch.Tensor | None
    """The critic's value after each of the T tokens; None without a critic."""
    num_tokens: int
    """Tokens computed, padding included."""
    entropies_BT: torch.Tensor | None = None
    """Entropy in nats of the distributions of the same tokens, without gradient; None: not known
    here, as in the loss of a critic's own model."""


def forward(
    model: nn.Module,
    batch: MicroBatch,
    device: str,
    *,
    packed: bool,
    chunk_tokens: int = 1024,
    critic: nn.Module | None = None,
    context: ContextGroup | None = None,
) -> Predicted:
    """Run a forward pass over a micro-batch. Collective if the models are sharded.

    Args:
        model: the policy's, which may have a critic's layer.
        chunk_tokens: tokens whose logits are in memory at a time.
        critic: a model of its own, if the critic is one.
        context: ranks that compute the micro-batch together; they get the same output.
    """
    models = (model,) if critic is None else (model, critic)
    by_row = any(row_rope(each) is not None for each in models)
    given = model_input(batch, device, packed=packed, by_row=by_row, context=context)
    with replaying(given.routed_experts):
        found = predicted(model, given, chunk_tokens, **given.arguments)
    predictions = given.predictions(found)
    values = take_values(model) if critic is None else _values(critic, given)
    return Predicted(
        logprobs_BT=predictions.logprobs_BT,
        entropies_BT=predictions.entropies_BT,
        values_BT=None if values is None else given.values(values),
        num_tokens=given.shape[0] * given.shape[1],
    )


def _values(critic: nn.Module, given: ModelInput) -> torch.Tensor:
    values: torch.Tensor = critic(**given.arguments, **given.output_arguments)
    return values


def policy_loss(
    algorithm: Algorithm,
    batch: MicroBatch,
    predicted: Predicted,
    weight_version: int,
    proximal: Predicted | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor], TrainedRows]:
    """The loss, from which backward starts, the sums to report, and what was trained on.

    Args:
        weight_version: base version of the step.
        proximal: the same under the weights at the start of the step; None: it has one update.
    """
    tokens = _tokens(batch, predicted, weight_version, proximal)
    terms = algorithm.loss(tokens)
    device = terms.loss.device
    computed = {
        "sequence_tokens": torch.tensor(batch.lengths_B.sum(), device=device),
        "computed_tokens": torch.tensor(predicted.num_tokens, device=device),
    }
    sums = {
        "loss": terms.loss.detach(),
        **computed,
        **_entropy(batch, predicted),
        **terms.sums,
    }
    return terms.loss, sums, trained_rows(batch, tokens, terms)


def _entropy(batch: MicroBatch, predicted: Predicted) -> dict[str, torch.Tensor]:
    """Its sum over the trainable tokens, if it is known."""
    if predicted.entropies_BT is None:
        return {}
    mask_BT = torch.from_numpy(batch.loss_mask_BT[:, 1:]).to(predicted.entropies_BT.device)
    return {"entropy": (predicted.entropies_BT * mask_BT).sum()}


def _tokens(
    batch: MicroBatch, predicted: Predicted, weight_version: int, proximal: Predicted | None
) -> PolicyTokens:
    logprobs_BT = predicted.logprobs_BT
    device, dtype = logprobs_BT.device, logprobs_BT.dtype
    advantages_B = torch.from_numpy(batch.advantages_B).to(device, dtype)
    weights_B = torch.from_numpy(batch.weights_B).to(device, dtype)
    behaviour_BT = torch.from_numpy(batch.behaviour_logprobs_BT[:, 1:])
    reference_BT = torch.from_numpy(batch.reference_logprobs_BT[:, 1:])
    versions_BT = torch.from_numpy(batch.weight_versions_BT[:, 1:]).to(device)
    turn_rewards_BT = torch.from_numpy(batch.turn_rewards_BT[:, 1:])
    return PolicyTokens(
        logprobs_BT=logprobs_BT,
        values_BT=_before(predicted),
        proximal_logprobs_BT=None if proximal is None else proximal.logprobs_BT,
        proximal_values_BT=None if proximal is None else _before(proximal),
        end_values_B=_after_last(batch, predicted if proximal is None else proximal),
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


def _before(predicted: Predicted) -> torch.Tensor | None:
    """Values before the tokens 1..T-1, [B, T - 1]."""
    return None if predicted.values_BT is None else predicted.values_BT[:, :-1]


def _after_last(batch: MicroBatch, predicted: Predicted) -> torch.Tensor | None:
    """Values after the last tokens of rows that were cut off, else 0, [B]; None if none was."""
    if predicted.values_BT is None or not batch.bootstrap_B.any():
        return None
    values_BT = predicted.values_BT.detach()
    last_B = torch.from_numpy(batch.lengths_B - 1).to(values_BT.device)
    values_B = values_BT.gather(1, last_B[:, None])[:, 0]
    return values_B * torch.from_numpy(batch.bootstrap_B).to(values_B)


class TrainedRows(NamedTuple):
    """Values of the trainable tokens, one row after the other."""

    sequences_B: NDArray[np.int64]
    num_tokens_B: NDArray[np.int64]
    logprob_differences_N: torch.Tensor
    """Log-prob under the weights that the step began with, minus that recorded at sampling."""
    advantages_N: torch.Tensor | None
    """As in `LossTerms`."""


class TokenValues(NamedTuple):
    """Of the trained tokens of a sequence, in order."""

    logprob_differences: NDArray[np.float16]
    advantages: NDArray[np.float16] | None


def trained_rows(batch: MicroBatch, tokens: PolicyTokens, terms: LossTerms) -> TrainedRows:
    """The values of a micro-batch, on its device: nothing waits for them."""
    mask_BT = batch.loss_mask_BT[:, 1:]
    device = tokens.logprobs_BT.device
    # Counted on the host: a device would be waited for.
    row_N, place_N = (torch.from_numpy(each).to(device) for each in mask_BT.nonzero())
    began_BT = tokens.proximal_logprobs_BT
    logprobs_BT = tokens.logprobs_BT if began_BT is None else began_BT
    sampled_N = tokens.behaviour_logprobs_BT[row_N, place_N]
    advantages_BT = terms.advantages_BT
    return TrainedRows(
        sequences_B=batch.sequences_B,
        num_tokens_B=mask_BT.sum(1),
        logprob_differences_N=logprobs_BT.detach()[row_N, place_N] - sampled_N,
        advantages_N=None if advantages_BT is None else advantages_BT.detach()[row_N, place_N],
    )


class Totals:
    """Of this rank's micro-batches."""

    def __init__(self, *, keeps_rows: bool = False) -> None:
        """`keeps_rows`: whether `rows` are wanted."""
        self._keeps_rows = keeps_rows
        self.rows: list[TrainedRows] = []
        self.num_tokens = 0
        """Trainable tokens, over all ranks."""
        self.denominator = 0.0
        """Of the step's loss, over all ranks."""
        self._sums: dict[str, torch.Tensor] = {}

    def add(self, sums: Mapping[str, torch.Tensor], rows: TrainedRows | None = None) -> None:
        """Add the sums of a micro-batch on this rank, and its rows."""
        if self._keeps_rows and rows is not None:
            self.rows.append(rows)
        for name, value in sums.items():
            wide = value.double()
            self._sums[name] = self._sums[name] + wide if name in self._sums else wide

    def reduced(self) -> dict[str, float]:
        """Loss, computed tokens and means over tokens, over all ranks. Collective."""
        names = sorted(self._sums)
        totals = torch.stack([self._sums[name] for name in names])
        dist.all_reduce(totals)
        return self._means(dict(zip(names, totals.tolist(), strict=True)))

    def alone(self) -> dict[str, float]:
        """The same of this rank, which had all micro-batches."""
        return self._means({name: value.item() for name, value in self._sums.items()})

    def _means(self, values: dict[str, float]) -> dict[str, float]:
        whole = {
            "loss": values.pop("loss") / self.denominator,
            # Above 1 if sequences share prefixes.
            "packing": values.pop("sequence_tokens") / values["computed_tokens"],
            "computed_tokens": values.pop("computed_tokens"),
        }
        return whole | {name: value / self.num_tokens for name, value in values.items()}
