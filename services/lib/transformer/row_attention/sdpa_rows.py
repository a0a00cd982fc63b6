"""Attention within packed rows by torch's scaled dot-product attention, on any device.

Rows of similar length are computed together, padded to the longest of them.

Shape suffixes: B rows, T tokens of a row, U distinct tokens, H heads, D values of a head.
"""
# ruff: noqa: N803, N806 -- tensors carry shape suffixes

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from services.lib.transformer.packing import Packing
from services.lib.transformer.row_attention.row_kernel import Scores

__all__ = ["sdpa_rows"]

_WIDEST_SHARED = 256
"""Values of a head up to which kernels let query heads share keys; others need them repeated."""


def sdpa_rows(
    query_UHD: Tensor, key_UHD: Tensor, value_UHD: Tensor, rows: Packing, scores: Scores
) -> Tensor:
    """As `RowKernel` asks."""
    outputs = []
    for places_BT in rows.buckets:
        picked = [_rows(each, places_BT) for each in (query_UHD, key_UHD, value_UHD)]
        mask = _window(places_BT, scores.window)
        outputs.append(_attend(*picked, mask, scores.scale).transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, rows.found_U)


def _rows(states_UHD: Tensor, places_BT: Tensor) -> Tensor:
    """To [B, H, T, D]."""
    picked = states_UHD.index_select(0, places_BT.flatten())
    return picked.view(*places_BT.shape, *picked.shape[1:]).transpose(1, 2)


def _window(places_BT: Tensor, width: int | None) -> Tensor | None:
    """Attention mask of a sliding window; None if a token attends to all tokens before it."""
    length = places_BT.shape[1]
    if width is None or length <= width:
        return None
    ones = torch.ones(length, length, dtype=torch.bool, device=places_BT.device)
    return ones.tril().triu(1 - width)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Causal attention, from [B, H, T, D] to the same."""
    sharing = query.shape[1] // key.shape[1]
    may_share = mask is None and key.shape[-1] == value.shape[-1] <= _WIDEST_SHARED
    if sharing > 1 and not may_share:
        key, value = (each.repeat_interleave(sharing, 1) for each in (key, value))
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=sharing > 1 and may_share,
    )
