"""What the attention layers of a transformers model call, registered as one of its attentions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from services.lib.transformer.packing import Packing
from services.lib.transformer.row_attention.sdpa_rows import RowKernel, Scores, sdpa_rows
from services.lib.transformer.row_attention.varlen_rows import varlen_rows

_ATTENTION = "seamflow_rows_{}"
"""By the number of a kernel: names with "sdpa" or "flash" in them are those of transformers."""
_UNKNOWN = ("softcap", "position_bias")
"""Settings of a layer without which it would compute something else."""


def use_rows(model: nn.Module, kernel: str = "sdpa") -> None:
    """Let the attention of a model take packed rows, in place.

    Args:
        model: of transformers.
        kernel: of `KERNELS`.
    """
    from transformers import AttentionInterface

    name = _ATTENTION.format(list(KERNELS).index(kernel))
    AttentionInterface.register(name, partial(_attention, KERNELS[kernel]))
    model.set_attn_implementation(name)  # type: ignore[operator]


def _attention(
    kernel: RowKernel,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    rows: Packing,
    sliding_window: int | None = None,
    scaling: float | None = None,
    s_aux: Tensor | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Causal attention within rows: from [1, H, U, D] to [1, U, H, D]."""
    for name in _UNKNOWN:
        if settings.get(name) is not None:
            raise ValueError(f"attention within rows has no {name}, and a layer has one")
    scores = Scores(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window if sliding_window and sliding_window > 0 else None,
        sinks_H=s_aux,
    )
    return _attend([query, key, value], rows, scores, kernel)[None], None


def _attend(states: list[Tensor], rows: Packing, scores: Scores, kernel: RowKernel) -> Tensor:
    """To [U, H, D]; with a context group, of this rank's slice of the tokens."""
    context = rows.context
    if context is not None:
        states = context.to_heads(states, len(rows.token_ids_U))
        if scores.sinks_H is not None:
            scores = replace(scores, sinks_H=context.own_heads(scores.sinks_H))
    query, key, value = (each[0].transpose(0, 1) for each in states)
    output_uhd = kernel(query, key, value, rows, scores)
    return output_uhd if context is None else context.to_tokens(output_uhd)


Attention = Literal["auto", "varlen", "sdpa"]
"""A kernel, or the first that there is."""
KERNELS: Mapping[str, RowKernel] = {"varlen": varlen_rows, "sdpa": sdpa_rows}
"""The best first."""
_OLDEST = (8, 0)
"""Compute capability from which FlashAttention 2 works: Ampere."""


def kernels_for(attention: Attention, device: str, dtype: torch.dtype) -> list[str]:
    """The kernels to try, in order.

    Args:
        attention: the one that is asked for; "auto": all that there are.
        device: of the model.
        dtype: type that it computes in.

    Raises:
        ValueError: the one that is asked for is not there.
    """
    if attention == "auto":
        return [name for name in KERNELS if not lacking(name, device, dtype)]
    if reason := lacking(attention, device, dtype):
        raise ValueError(f"attention is {attention!r}, but {reason}: set it to 'auto' or 'sdpa'")
    return [attention]


def lacking(name: str, device: str, dtype: torch.dtype) -> str:
    """Why a kernel is not there; empty: it is."""
    if name == "sdpa":
        return ""
    if not device.startswith("cuda"):
        return f"that kernel is for cuda, and the device is {device}"
    if not torch.cuda.is_available():
        return "torch sees no cuda device"
    if torch.cuda.get_device_capability(device) < _OLDEST:
        return f"that kernel needs compute capability 8.0, which {device} has not"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"that kernel computes in bfloat16, and the type is {str(dtype).partition('.')[2]}"
    return ""
