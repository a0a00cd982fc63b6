"""The algorithm's loss of a micro-batch, from what the models predict.

Shape suffixes: B rows of a micro-batch, T tokens.
"""
# ruff: noqa: N806 -- tensors carry shape suffixes

from __future__ import annotations

import torch

from trainer.algorithms.base import Algorithm, PolicyTokens
from trainer.data.micro_batch import MicroBatch
from trainer.policy.forward import Predicted
from trainer.policy.totals import TrainedRows, trained_rows


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
