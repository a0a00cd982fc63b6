"""Linear layers whose products are oneDNN's: on the CPU, in float32.

torch multiplies float32 matrices by MKL there, which leaves AVX-512 unused on processors that are
not Intel's: oneDNN takes what the processor has. Measured on such a one, at 1,870 tokens and 256 by
768 weights: 230 GFLOP/s instead of 100 for outputs and gradients of inputs, 165 for gradients of
weights.

Shapes: N tokens, I inputs, O outputs.
"""

# ruff: noqa: N803, N806 -- tensors carry their shapes in their names

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

__all__ = ["use_onednn"]

# Multiplications; below it, calling oneDNN from Python costs more than it saves.
_SMALLEST = 1 << 21


def use_onednn(model: nn.Module) -> None:
    """Let the model's linear layers multiply so where they gain by it, if torch can.

    In place, and nothing but `forward` changes: parameters, names and hooks stay.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return
    for module in model.modules():
        # No subclass: what it does besides is its own.
        if type(module) is nn.Linear:
            module.__class__ = _Linear


class _Linear(nn.Linear):
    """`x @ weight.T + bias`."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 -- torch's name
        """Return [..., O] for [..., I]."""
        if not self._gains(input):
            return functional.linear(input, self.weight, self.bias)
        result: Tensor = _Products.apply(input, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return result

    def _gains(self, input: Tensor) -> bool:  # noqa: A002
        # Asked in each call: a sharded weight is there, and of its type, only now.
        return (
            input.dim() > 1
            and input.device.type == "cpu"
            and input.dtype == self.weight.dtype == torch.float32
            and input.numel() * self.out_features >= _SMALLEST
        )


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        # What a frozen weight, or an input without a gradient, does not need is not kept.
        for_x, for_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if for_weight else None, weight_OI if for_x else None)
        return _product(x, weight_OI, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight_OI = ctx.saved_tensors
        grad_NO = grad.flatten(0, -2)
        for_x, for_weight, for_bias = ctx.needs_input_grad
        return (
            _product(grad, weight_OI.t()) if for_x else None,
            _product(grad_NO.t(), x.flatten(0, -2).t()) if for_weight else None,
            grad_NO.sum(0) if for_bias else None,
        )


def _product(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    # Not public in torch, whose release is pinned.
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight_OI, bias_O, "none", [], "")
    return result
