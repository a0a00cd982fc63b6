"""Sample one token per row, all rows at once.

A seeded row's random number is a function of (seed, position) alone, so a sequence that is
interrupted and continued, here or on another server, draws what it would have drawn.

Shapes: R rows, V vocabulary, N blocks of B tokens.
"""

# ruff: noqa: N803, N806, N815 -- tensors carry their shapes in their names

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

_BLOCK = 128


@dataclass(slots=True)
class SamplingRows:
    """What the rows of one step ask for. Flags let a step skip what no row needs."""

    temperature_R: Tensor
    """float32; 0 is greedy."""
    top_p_R: Tensor
    """float32 in (0, 1]."""
    top_k_R: Tensor
    """int64; at least the vocabulary size means all."""
    min_p_R: Tensor
    """float32 in [0, 1]; 0 keeps all."""
    seed_R: Tensor
    """int64."""
    position_R: Tensor
    """int64; index in the whole sequence of the token that conditions the draw."""
    all_greedy: bool
    """Every row has temperature 0."""
    any_greedy: bool
    """Some row has temperature 0."""
    scaled: bool
    """Some row has a temperature that is neither 0 nor 1."""
    filtered: bool
    """Some row has top-p, top-k or min-p."""


def sample(logits_RV: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
    """Return the sampled ids (int64 [R]) and their log-probs (float32 [R], before any filter)."""
    logits_RV = logits_RV.float()
    if rows.scaled:
        # Greedy rows keep temperature 1: their log-prob is that of the plain distribution.
        temperature_R = torch.where(rows.temperature_R > 0, rows.temperature_R, 1.0)
        logits_RV = logits_RV / temperature_R[:, None]
    largest_R1 = logits_RV.amax(-1, keepdim=True)
    weights_RV = (logits_RV - largest_R1).exp_()
    total_R1 = weights_RV.sum(-1, keepdim=True)
    if rows.all_greedy:
        ids_R = logits_RV.argmax(-1)
    else:
        uniform_R = uniform(rows.seed_R, rows.position_R)
        if rows.filtered:
            ids_R = _draw_filtered(weights_RV / total_R1, uniform_R, rows)
        else:
            ids_R = _invert(weights_RV, uniform_R)
        if rows.any_greedy:
            ids_R = torch.where(rows.temperature_R > 0, ids_R, logits_RV.argmax(-1))
    logits_R1 = logits_RV.gather(1, ids_R[:, None])
    return ids_R, (logits_R1 - largest_R1 - total_R1.log())[:, 0]


def _draw_filtered(probs_RV: Tensor, uniform_R: Tensor, rows: SamplingRows) -> Tensor:
    probs_RV, order_RV = probs_RV.sort(-1, descending=True)
    # A token stays while the tokens before it do not reach top_p: the first one always stays.
    before_RV = probs_RV.cumsum(-1) - probs_RV
    rank_V = torch.arange(probs_RV.shape[1])
    keep_RV = (before_RV < rows.top_p_R[:, None]) & (rank_V < rows.top_k_R[:, None])
    keep_RV &= probs_RV >= rows.min_p_R[:, None] * probs_RV[:, :1]
    place_R = _invert(probs_RV * keep_RV, uniform_R)
    return order_RV.gather(1, place_R[:, None])[:, 0]


def _invert(weights_RV: Tensor, uniform_R: Tensor) -> Tensor:
    """Invert the cumulative distribution of unnormalised weights; weight 0 is never chosen.

    First which block of the vocabulary, then where in it: a running sum, which no processor adds
    up in parallel, is taken of the blocks' sums and of one block, not of the whole vocabulary.
    """
    if rest := -weights_RV.shape[1] % _BLOCK:
        weights_RV = functional.pad(weights_RV, (0, rest))
    weights_RNB = weights_RV.view(len(weights_RV), -1, _BLOCK)
    cumulative_RN = weights_RNB.sum(-1).cumsum(-1)
    threshold_R1 = uniform_R[:, None] * cumulative_RN[:, -1:]
    block_R1 = torch.searchsorted(cumulative_RN, threshold_R1, right=True)
    before_R1 = functional.pad(cumulative_RN, (1, 0)).gather(1, block_R1)
    row_R = torch.arange(len(weights_RV))
    cumulative_RB = weights_RNB[row_R, block_R1[:, 0]].cumsum(-1)
    # Below the block's sum: added up in another order, that may round differently.
    threshold_R1 = torch.minimum(
        threshold_R1 - before_R1, cumulative_RB[:, -1:] * (1 - torch.finfo(torch.float32).eps)
    )
    place_R1 = torch.searchsorted(cumulative_RB, threshold_R1, right=True)
    return (block_R1 * _BLOCK + place_R1)[:, 0]


def uniform(seed_R: Tensor, position_R: Tensor) -> Tensor:
    """Return float32 in [0, 1), a hash (splitmix64) of seed and position.

    It has 23 bits, so that scaled by a total it stays below the total after rounding.
    """
    value_R = seed_R + (position_R + 1) * -0x61C8864680B583EB
    value_R = (value_R ^ _shift(value_R, 30)) * -0x40A7B892E31B1A47
    value_R = (value_R ^ _shift(value_R, 27)) * -0x6B2FB644ECCEEE15
    value_R = value_R ^ _shift(value_R, 31)
    return _shift(value_R, 41).float() * 2.0**-23


def _shift(value_R: Tensor, bits: int) -> Tensor:
    """Shift right without the sign bit, which torch's int64 shift would repeat."""
    return (value_R >> bits) & ((1 << (64 - bits)) - 1)
