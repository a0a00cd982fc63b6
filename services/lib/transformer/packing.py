"""Packed rows: sequences without padding, with each shared prefix computed once.

    rows      A B C        tokens U   A B C D E        what is computed
              A B D E      positions  0 1 2 2 3
    places    0 1 2
              0 1 3 4

All layers of a transformer except attention work on single tokens, and compute each distinct token
once. Attention gathers the rows again, rows of similar length together. The gradient of a shared
token is the sum over its rows, as without sharing: Tree Training (arXiv 2511.00413) restores it by
scaling, here autograd computes it.

Shape suffixes: B rows of a micro-batch, T tokens of a row (padded on the right), U distinct tokens,
H heads, D values of a head.
"""
# ruff: noqa: N803, N806, N815 -- tensors carry shape suffixes

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from services.chassis.log import get_logger
from services.lib.transformer.row_rope import row_rope
from services.lib.transformer.shared_prefix import shared_tokens
from services.lib.transformer.similar_rows import similar_rows

__all__ = ["Packing", "can_pack", "claims_to_pack", "use_rows"]

_ATTENTION = "seamflow_rows"
_LAYERS = {"full_attention", "sliding_attention"}
_TOLERANCE = 1e-3
"""Of log-probs, in float32."""
_ROUNDINGS = 16
"""Of log-probs in a coarser type, in units of its precision."""


Outputs = Callable[..., torch.Tensor]


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

    @classmethod
    def of(cls, token_ids_BT: NDArray[np.int32], lengths_B: NDArray[np.int64], device: str) -> Self:
        """Pack rows with these lengths."""
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
        )

    @property
    def arguments(self) -> dict[str, Any]:
        """Of the forward pass of a model that accepts `rows`."""
        return {
            "input_ids": self.token_ids_U[None],
            "position_ids": self.positions_U[None],
            "rows": self,
            "use_cache": False,
        }


def can_pack(
    model: nn.Module,
    outputs: Outputs | None = None,
    *,
    device: str | None = None,
    precision: torch.dtype | None = None,
) -> bool:
    """Whether the model gives the same results packed as padded; if so, it accepts `rows`.

    Models with recurrent layers or custom attention do not, nor those whose rotary frequencies
    depend on the length of a row. What a model declares is verified on two short rows.

    Args:
        model: of any head, if `outputs` is given, else a causal language model.
        outputs: from the arguments of a pass, with `logits_to_keep` if it is packed, to what the
            model says of its tokens; default: the log-probs of a language model.
        device: of its inputs; None: of its parameters.
        precision: type that it computes in; None: that of its parameters.
    """
    if outputs is None and "logits_to_keep" not in signature(model.forward).parameters:
        return False
    if not claims_to_pack(model):
        return False
    outputs = outputs or partial(_logprobs, model)
    device = device or str(next(model.parameters()).device)
    expected, before = _try_padded(outputs, device), model.config._attn_implementation  # type: ignore[union-attr]
    try:
        use_rows(model)
        error = (_try_packed(outputs, device) - expected).abs().max().item()
    except Exception as problem:  # any error: fall back to padded rows
        get_logger().warning("packing_failed", reason=f"{type(problem).__name__}: {problem}")
        error = float("nan")
    packs: bool = error <= max(_TOLERANCE, _ROUNDINGS * torch.finfo(precision or _dtype(model)).eps)
    if not packs:
        get_logger().warning("packing_disabled", model=type(model).__name__, difference=error)
        model.set_attn_implementation(before)  # type: ignore[operator]
    return packs


def claims_to_pack(model: nn.Module) -> bool:
    """Whether a model declares what packed rows need; `can_pack` verifies it."""
    flags = ("_supports_sdpa", "_supports_attention_backend")
    layers = getattr(model.config, "layer_types", None) or ()
    return (
        all(getattr(model, flag, False) for flag in flags)
        and not getattr(model, "_is_stateful", False)
        and set(layers) <= _LAYERS
        and row_rope(model) is None
    )


_TRIED = np.array([[1, 2, 3, 4], [1, 2, 5, 0]], np.int32)
_TRIED_LENGTHS = np.array([4, 3])


def _dtype(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype


def _logprobs(model: nn.Module, **arguments: Any) -> torch.Tensor:
    logits: torch.Tensor = model(**arguments).logits
    return logits.float().log_softmax(-1)


@torch.no_grad()
def _try_padded(outputs: Outputs, device: str) -> torch.Tensor:
    found = outputs(input_ids=torch.from_numpy(_TRIED).long().to(device), use_cache=False)
    return torch.cat([found[0], found[1, :3]]).float()


@torch.no_grad()
def _try_packed(outputs: Outputs, device: str) -> torch.Tensor:
    packing = Packing.of(_TRIED, _TRIED_LENGTHS, device)
    places = torch.cat([packing.places_BT[0], packing.places_BT[1, :3]])
    return outputs(**packing.arguments, logits_to_keep=places)[0].float()


def use_rows(model: nn.Module) -> None:
    """Let the attention of a model take packed rows, in place."""
    from transformers import AttentionInterface

    AttentionInterface.register(_ATTENTION, _attention)
    model.set_attn_implementation(_ATTENTION)  # type: ignore[operator]


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    rows: Packing,
    sliding_window: int | None = None,
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within rows: from [1, H, U, D] to [1, U, H, D]."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    outputs = []
    for places_BT in rows.buckets:
        output_BTHD, _ = sdpa_attention_forward(
            module,
            _rows(query, places_BT),
            _rows(key, places_BT),
            _rows(value, places_BT),
            _window(places_BT, sliding_window),
            **settings,
        )
        outputs.append(output_BTHD.flatten(0, 1))
    return torch.cat(outputs).index_select(0, rows.found_U)[None], None


def _rows(states: torch.Tensor, places_BT: torch.Tensor) -> torch.Tensor:
    """From [1, H, U, D] to [B, H, T, D]."""
    picked = states[0].transpose(0, 1).index_select(0, places_BT.flatten())
    return picked.view(*places_BT.shape, *picked.shape[1:]).transpose(1, 2)


def _window(places_BT: torch.Tensor, width: int | None) -> torch.Tensor | None:
    """Attention mask of a sliding window; None if a token attends to all tokens before it."""
    length = places_BT.shape[1]
    if width is None or width <= 0 or length <= width:
        return None
    ones = torch.ones(length, length, dtype=torch.bool, device=places_BT.device)
    return ones.tril().triu(1 - width)[None, None]


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
