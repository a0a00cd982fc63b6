"""Packed rows: sequences without padding, with each shared prefix computed once.

    rows      A B C        tokens U   A B C D E        what is computed
              A B D E      positions  0 1 2 2 3
    places    0 1 2
              0 1 3 4

All layers of a transformer except attention work on single tokens, and compute each distinct token
once. Attention gathers the rows again (`row_attention`). The gradient of a shared token is the sum
over its rows, as without sharing: Tree Training (arXiv 2511.00413) restores it by scaling, here
autograd computes it.

Shape suffixes: B rows of a micro-batch, T tokens of a row (padded on the right), U distinct tokens,
J tokens of all rows.
"""
# ruff: noqa: N803, N806, N815 -- tensors carry shape suffixes

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from services.lib.transformer.context_group import ContextGroup
from services.lib.transformer.token_rows import shared_tokens, similar_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedRows:
    """Rows one after the other; tensors are on the device."""

    places_J: torch.Tensor
    """Index in U of each token of each row."""
    ends: torch.Tensor
    """0, then the index in J after each row, int32, [B + 1]."""
    longest: int
    """Tokens of the longest row."""
    found_U: torch.Tensor
    """Index in J of each distinct token."""

    @classmethod
    def of(
        cls,
        places_BT: NDArray[np.int64],
        lengths_B: NDArray[np.int64],
        num_tokens: int,
        device: str,
    ) -> Self:
        places_J = places_BT[np.arange(places_BT.shape[1]) < lengths_B[:, None]]
        found_U = np.zeros(num_tokens, np.int64)
        found_U[places_J] = np.arange(len(places_J))
        ends = np.concatenate([[0], lengths_B.cumsum()]).astype(np.int32)
        return cls(
            places_J=torch.from_numpy(places_J).to(device),
            ends=torch.from_numpy(ends).to(device),
            longest=int(lengths_B.max()),
            found_U=torch.from_numpy(found_U).to(device),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """The mapping from the tokens of rows to distinct tokens; tensors are on the device."""

    token_ids_U: torch.Tensor
    """Vocabulary ids, int64."""
    positions_U: torch.Tensor
    """Position of each distinct token in its rows, int64."""
    places_BT: torch.Tensor
    """Index in U of each token of a row; 0 on padding."""
    buckets: tuple[torch.Tensor, ...]
    """`places` of rows of similar length, longest rows first, each cut to its longest row."""
    found_U: torch.Tensor
    """Index of each distinct token in the concatenated buckets."""
    joined: JoinedRows
    """The rows without padding, one after the other."""
    context: ContextGroup | None = None
    """The ranks that compute the distinct tokens together, each a slice; None: one rank alone."""

    @classmethod
    def of(
        cls,
        token_ids_BT: NDArray[np.int32],
        lengths_B: NDArray[np.int64],
        device: str,
        context: ContextGroup | None = None,
    ) -> Self:
        places_BT, num_tokens = _places(token_ids_BT, lengths_B)
        buckets = [
            places_BT[rows, : lengths_B[rows[0]]] for rows in similar_rows(lengths_B.tolist())
        ]
        ends_BT = np.arange(token_ids_BT.shape[1]) < lengths_B[:, None]
        token_ids_U, positions_U = np.zeros(num_tokens, np.int64), np.zeros(num_tokens, np.int64)
        token_ids_U[places_BT[ends_BT]] = token_ids_BT[ends_BT]
        positions_U[places_BT[ends_BT]] = np.nonzero(ends_BT)[1]
        return cls(
            token_ids_U=torch.from_numpy(token_ids_U).to(device),
            positions_U=torch.from_numpy(positions_U).to(device),
            places_BT=torch.from_numpy(places_BT).to(device),
            buckets=tuple(torch.from_numpy(bucket).to(device) for bucket in buckets),
            found_U=torch.from_numpy(_found(buckets, positions_U)).to(device),
            joined=JoinedRows.of(places_BT, lengths_B, num_tokens, device),
            context=context,
        )

    @property
    def arguments(self) -> dict[str, Any]:
        """Of the forward pass of a model that accepts `rows`; its tokens are those of this rank."""
        return {
            "input_ids": self._own(self.token_ids_U)[None],
            "position_ids": self._own(self.positions_U)[None],
            "rows": self,
            "use_cache": False,
        }

    def _own(self, tokens_U: torch.Tensor) -> torch.Tensor:
        return tokens_U if self.context is None else self.context.own_tokens(tokens_U)


def _places(
    token_ids_BT: NDArray[np.int32], lengths_B: NDArray[np.int64]
) -> tuple[NDArray[np.int64], int]:
    """The index in U of each token of a row, and the size of U.

    In lexicographic order, a row has the longest common prefix with its predecessor; the tokens
    after it are new.
    """
    places_BT = np.zeros(token_ids_BT.shape, np.int64)
    num_tokens, before = 0, (np.zeros(0, np.int32), np.zeros(0, np.int64))
    for row in sorted(
        range(len(lengths_B)), key=lambda row: token_ids_BT[row, : lengths_B[row]].tolist()
    ):
        ids_T = token_ids_BT[row, : lengths_B[row]]
        shared = shared_tokens(before[0], ids_T)
        fresh = len(ids_T) - shared
        places_BT[row, :shared] = before[1][:shared]
        places_BT[row, shared : len(ids_T)] = np.arange(num_tokens, num_tokens + fresh)
        num_tokens += fresh
        before = ids_T, places_BT[row, : len(ids_T)]
    return places_BT, num_tokens


def _found(buckets: list[NDArray[np.int64]], positions_U: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each distinct token, one index in the concatenated buckets that is not padding."""
    places = np.concatenate([bucket.ravel() for bucket in buckets])
    columns = np.concatenate([np.tile(np.arange(b.shape[1]), len(b)) for b in buckets])
    # Padding is place 0, which stands in column 0 of its rows.
    real = np.nonzero(columns == positions_U[places])[0]
    found_U = np.zeros(len(positions_U), np.int64)
    found_U[places[real]] = real
    return found_U
