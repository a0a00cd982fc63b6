"""What computes attention within packed rows.

Shape suffixes: U distinct tokens, H heads, D values of a head.
"""
# ruff: noqa: N803, N815 -- tensors carry shape suffixes

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

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
