"""What it costs to train on rows of tokens, in FLOPs of a forward and backward pass.

Shape suffixes: N rows, T tokens of a row.
"""
# ruff: noqa: N803, N806 -- arrays carry shape suffixes

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCost:
    """The cost of rows, from that of a token and of a pair of tokens in a model.

    Example: RowCost(token_flops=6.0 * 4e9, pairs=((0, 3.5 * 4 * 32 * 128 * 36),))
    """

    token_flops: float
    """Of a token in all layers but the output layer, without attention to other tokens."""
    output_flops: float = 0.0
    """Of the output layer for a token."""
    pairs: tuple[tuple[int, float], ...] = ()
    """(window, FLOPs): of a token and one it attends to, over all layers whose tokens attend to
    themselves and those before within `window` tokens; 0: to all before."""

    def of_tokens(self, num_tokens: int, num_outputs: int) -> float:
        """FLOPs of tokens, some of which pass the output layer, without attention."""
        return self.token_flops * num_tokens + self.output_flops * num_outputs

    def attention(self, lengths_N: NDArray[np.int64]) -> NDArray[np.float64]:
        """FLOPs of attention of each row, [N], as if it shared no prefix: it is computed again."""
        lengths_N = np.asarray(lengths_N, np.float64)
        found_N = np.zeros(lengths_N.shape, np.float64)
        for window, flops in self.pairs:
            # The first tokens of a row see less than a window, all others just that.
            first_N = np.minimum(lengths_N, window) if window else lengths_N
            found_N += flops * (first_N * (first_N + 1) / 2 + (lengths_N - first_N) * window)
        return found_N


LINEAR = RowCost(token_flops=1.0)
"""Of a model that is not known: rows cost what they have tokens, and the unit is a token."""
