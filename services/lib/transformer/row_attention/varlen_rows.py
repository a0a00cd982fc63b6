"""Attention within packed rows by a kernel for rows of any length: FlashAttention of torch.

It takes rows one after the other, without padding, and never has the scores of a row in memory.
With its outputs it gives the logarithm of each sum of exponentials. With a sink s, output and that
logarithm l are

    output * exp(l - m),    m = log(exp(l) + exp(s))

and its backward pass, which computes exp(score - l) * (gradient - output * gradient of output)
anew, is right for the whole if it is given these: the sink is one more key of value 0. Autograd
alone would be wrong, as the kernel gives l no gradient.

Shape suffixes: J tokens of all rows, U distinct tokens, H heads, D values of a head.
"""
# ruff: noqa: N803, N806, N815 -- tensors carry shape suffixes

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from services.lib.transformer.packing import Packing
from services.lib.transformer.row_attention.sdpa_rows import Scores

_MULTIPLE = 8
"""Of values of a head, that the kernel takes."""


class RowStates(NamedTuple):
    """What a kernel attends with, rows one after the other."""

    query_JHD: Tensor
    key_JHD: Tensor
    """It may have fewer heads, each of which as many query heads share."""
    value_JHD: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RowShape:
    """How a kernel is to read rows."""

    ends: Tensor
    """0, then the index in J after each row, int32, [rows + 1]."""
    longest: int
    """Tokens of the longest row."""
    scale: float
    """Factor on products of queries and keys."""
    window: int | None
    """As that of `Scores`."""


class VarlenKernel(Protocol):
    """Causal attention of rows one after the other, and its derivative."""

    def forward(self, states: RowStates, shape: RowShape) -> tuple[Tensor, Tensor]:
        """Outputs, [J, H, D], and logarithms of sums, [H, J], in float32."""

    def backward(
        self,
        gradient_JHD: Tensor,
        states: RowStates,
        output_JHD: Tensor,
        sums_HJ: Tensor,
        shape: RowShape,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of queries, keys and values, from what `forward` gave."""


class _Flash:
    """FlashAttention 2 of torch (`torch.nn.attention.varlen` calls the same operations)."""

    def forward(self, states: RowStates, shape: RowShape) -> tuple[Tensor, Tensor]:
        output, sums, *_ = torch.ops.aten._flash_attention_forward(
            *states, *_spans(shape), 0.0, *_causal(shape), **_limits(shape)
        )
        return output, sums

    def backward(
        self,
        gradient_JHD: Tensor,
        states: RowStates,
        output_JHD: Tensor,
        sums_HJ: Tensor,
        shape: RowShape,
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Without dropout, the state of random numbers is not read.
        no_rng = torch.zeros(2, dtype=torch.uint64, device=gradient_JHD.device)
        given = gradient_JHD.contiguous(), *states, output_JHD, sums_HJ
        unused = torch.empty(0, device=gradient_JHD.device)
        is_causal, _ = _causal(shape)
        found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
            *given, *_spans(shape), 0.0, is_causal, no_rng, unused, **_limits(shape)
        )
        return found


FLASH: VarlenKernel = _Flash()


def _spans(shape: RowShape) -> tuple[Tensor, Tensor, int, int]:
    return shape.ends, shape.ends, shape.longest, shape.longest


def _causal(shape: RowShape) -> tuple[bool, bool]:
    """Whether nothing but causality limits attention; and no mask is asked for."""
    return shape.window is None, False


def _limits(shape: RowShape) -> dict[str, Any]:
    """Tokens before and after a token that it attends to; -1: all."""
    before = -1 if shape.window is None else shape.window - 1
    return {"scale": shape.scale, "window_size_left": before, "window_size_right": 0}


def varlen_rows(
    query_UHD: Tensor,
    key_UHD: Tensor,
    value_UHD: Tensor,
    rows: Packing,
    scores: Scores,
    kernel: VarlenKernel = FLASH,
) -> Tensor:
    """As `RowKernel` asks, by another kernel."""
    joined, size = rows.joined, value_UHD.shape[-1]
    width = -(-max(query_UHD.shape[-1], size) // _MULTIPLE) * _MULTIPLE
    picked = [
        pad(each.index_select(0, joined.places_J), (0, width - each.shape[-1]))
        for each in (query_UHD, key_UHD, value_UHD)
    ]
    shape = RowShape(
        ends=joined.ends, longest=joined.longest, scale=scores.scale, window=scores.window
    )
    output_JHD: Tensor = _Varlen.apply(*picked, scores.sinks_H, shape, kernel)  # type: ignore[no-untyped-call]
    return output_JHD.index_select(0, joined.found_U)[..., :size]


class _Varlen(torch.autograd.Function):
    """Attention of rows one after the other, with sinks if there are."""

    @staticmethod
    def forward(
        ctx: Any,
        query_JHD: Tensor,
        key_JHD: Tensor,
        value_JHD: Tensor,
        sinks_H: Tensor | None,
        shape: RowShape,
        kernel: VarlenKernel,
    ) -> Tensor:
        states = RowStates(query_JHD, key_JHD, value_JHD)
        output_JHD, sums_HJ = kernel.forward(states, shape)
        if sinks_H is not None:
            whole_HJ = torch.logaddexp(sums_HJ, sinks_H[:, None].to(sums_HJ.dtype))
            share_JH = (sums_HJ - whole_HJ).exp().T
            output_JHD = (output_JHD * share_JH[..., None]).to(query_JHD.dtype).contiguous()
            sums_HJ = whole_HJ
        ctx.shape, ctx.kernel = shape, kernel
        ctx.save_for_backward(*states, sinks_H, output_JHD, sums_HJ)
        return output_JHD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *states, sinks_H, output_JHD, sums_HJ = ctx.saved_tensors
        found = ctx.kernel.backward(grads[0], RowStates(*states), output_JHD, sums_HJ, ctx.shape)
        if sinks_H is None:
            return *found, None, None, None
        # Of a score it is probability * (its value's part of the gradient, here 0, less the mean).
        mean_HJ = (grads[0] * output_JHD).sum(-1, dtype=sums_HJ.dtype).T
        share_HJ = (sinks_H[:, None].to(sums_HJ.dtype) - sums_HJ).exp()
        return *found, -(share_HJ * mean_HJ).sum(1).to(sinks_H.dtype), None, None
