"""What a micro-batch was trained on, by trainable token: for people who look at a step.

Shape suffixes: B rows of the micro-batch, T tokens of a row, N trainable tokens of its rows.
"""
# ruff: noqa: N806, N815 -- tensors carry shape suffixes

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from trainer.algorithms.base import LossTerms, PolicyTokens
from trainer.data.micro_batch import MicroBatch


class TrainedRows(NamedTuple):
    """Values of the trainable tokens, one row after the other."""

    sequences_B: NDArray[np.int64]
    """As in `MicroBatch`."""
    num_tokens_B: NDArray[np.int64]
    """Trainable tokens of each row."""
    logprob_differences_N: torch.Tensor
    """Log-prob under the weights that the step began with, minus that recorded at sampling."""
    advantages_N: torch.Tensor | None
    """As in `LossTerms`."""


class TokenValues(NamedTuple):
    """Of the trained tokens of a sequence, in order."""

    logprob_differences: NDArray[np.float16]
    """As in `TrainedRows`."""
    advantages: NDArray[np.float16] | None
    """As in `TrainedRows`."""


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
