"""The forward pass over a micro-batch: log-probs and values of its tokens.

Shape suffixes: B rows of a micro-batch, T tokens of a row.
"""
# ruff: noqa: N806, N815 -- tensors carry shape suffixes

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from services.lib.transformer.context_group import ContextGroup
from services.lib.transformer.routers import replaying
from services.lib.transformer.row_rope import row_rope
from trainer.algorithms.base import Algorithm, PolicyTokens
from trainer.data.micro_batch import MicroBatch
from trainer.model.critic import take_values
from trainer.policy.model_input import ModelInput, model_input, predicted
from trainer.policy.totals import TrainedRows, trained_rows


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
        batch: the micro-batch.
        device: of the models.
        packed: whether they compute without padding.
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
        algorithm: computes it.
        batch: the micro-batch.
        predicted: log-probs and values.
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
