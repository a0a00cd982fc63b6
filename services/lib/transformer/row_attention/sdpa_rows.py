"""Attention within packed rows by torch's scaled dot-product attention, on any device.

Rows of similar length are computed together, padded to the longest of them. A sink is a key before
the first one, with a query whose output is dropped, so that attention stays causal: in one more
dimension each query has its head's sink, that key 1 / scale, and all others 0.

Shape suffixes: B rows, T tokens of a row, U distinct tokens, H heads, D values of a head.
"""
# ruff: noqa: N803, N806, N815 -- tensors carry shape suffixes

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from services.lib.transformer.packing import Packing


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """What a layer does with products of queries and keys before it normalises them."""

    scale: float
    """Factor on them."""
    window: int | None = None
    """A token attends to so many tokens, itself and those before; None: to all before."""
    sinks_H: Tensor | None = None
    """Of each query head, the score of one more key, whose value is 0 (gpt-oss); None: no such."""


class RowKernel(Protocol):
    """Computes attention in which a token attends to itself and those before it in its row."""

    def __call__(
        self, query_UHD: Tensor, key_UHD: Tensor, value_UHD: Tensor, rows: Packing, scores: Scores
    ) -> Tensor:
        """Attend within rows.

        Args:
            query_UHD: of each distinct token.
            key_UHD: the same; it may have fewer heads, each of which as many query heads share.
            value_UHD: with the heads of keys.
            rows: which tokens are a row.
            scores: of the layer.

        Returns:
            Of each token, the values that its query heads attend to, [U, H, D].
        """


_WIDEST_SHARED = 256
"""Values of a head up to which kernels let query heads share keys; others need them repeated."""
_MORE = 8
"""Dimensions that a sink adds: kernels take multiples of 8."""


def sdpa_rows(
    query_UHD: Tensor, key_UHD: Tensor, value_UHD: Tensor, rows: Packing, scores: Scores
) -> Tensor:
    """As `RowKernel` asks."""
    outputs = []
    attend = _attend if scores.sinks_H is None else _attend_with_sinks
    for places_BT in rows.buckets:
        query, key, value = (_rows(each, places_BT) for each in (query_UHD, key_UHD, value_UHD))
        output_BHTD = attend(query, key, value, _window(places_BT, scores.window), scores)
        outputs.append(output_BHTD.transpose(1, 2).flatten(0, 1))
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


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scores: Scores
) -> Tensor:
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
        scale=scores.scale,
        enable_gqa=sharing > 1 and may_share,
    )


def _attend_with_sinks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scores: Scores
) -> Tensor:
    sinks_H = scores.sinks_H
    assert sinks_H is not None
    size = value.shape[-1]
    sink_BHTD = sinks_H[:, None, None].expand(*query.shape[:3], 1)
    query = pad(torch.cat([query, sink_BHTD.to(query.dtype)], -1), (0, _MORE - 1, 1, 0))
    sink_key_TD = key.new_zeros(key.shape[2] + 1, key.shape[3] + _MORE)
    sink_key_TD[0, key.shape[3]] = 1 / scores.scale
    key = pad(key, (0, _MORE, 1, 0)) + sink_key_TD
    value = pad(value, (0, _MORE, 1, 0))
    if mask is not None:
        mask = pad(pad(mask, (0, 0, 1, 0)), (1, 0), value=True)
    return _attend(query, key, value, mask, scores)[:, :, 1:, :size]
