"""Sums over the accumulated part of a step, and what its tokens were trained on, for people.

Shape suffixes: B rows of a micro-batch, T tokens of a row, N trainable tokens of its rows.
"""
# ruff: noqa: N806, N815 -- tensors carry shape suffixes

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from trainer.algorithms.base import LossTerms, PolicyTokens
from trainer.data.micro_batch import MicroBatch


class TrainedRows(NamedTuple):
    """Values of the trainable tokens, one row after the other."""

    sequences_B: NDArray[np.int64]
    num_tokens_B: NDArray[np.int64]
    """Trainable tokens of each row."""
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
        """What was trained on."""
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
