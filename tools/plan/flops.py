"""Floating-point operations, also of kernels that torch's own formulas leave out.

torch's `FlopCounterMode` follows modules by hooks, which keep recomputed activations alive that a
count of bytes must see freed; so its formulas are called here without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import (
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
    shape_wrapper,
)

_Shape = tuple[int, ...]


class Flops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within the block, counts the floating-point operations of products and attention.

    Causal attention counts half of the operations that its shapes allow.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0
        self._formulas: Mapping[Any, Callable[..., int]] = {**flop_registry, **_own_formulas()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the operation, and count its work."""
        found = func(*args, **(kwargs or {}))
        formula = self._formulas.get(func._overloadpacket)
        if formula is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=found)
        return found


def _own_formulas() -> Mapping[Any, Callable[..., int]]:
    from transformers.integrations import moe  # noqa: F401 -- it declares operations

    aten, experts = torch.ops.aten, torch.ops.transformers
    formulas: dict[Any, Callable[..., int]] = {
        torch.ops.mkldnn._linear_pointwise: _linear,
        aten._scaled_dot_product_flash_attention_for_cpu: _attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
        aten._grouped_mm: _grouped,
        experts.grouped_mm_fallback: _grouped,
        experts.grouped_mm_fallback_backward: _grouped_backward,
    }
    wrap: Any = shape_wrapper
    return {operation: wrap(formula) for operation, formula in formulas.items()}


def _linear(inputs: _Shape, weight: _Shape, *_: Any, **__: Any) -> int:
    """Of [..., I] by [O, I]."""
    return 2 * math.prod(inputs) * weight[0]


def _attention(
    query: _Shape,
    key: _Shape,
    value: _Shape,
    dropout: float = 0.0,
    is_causal: bool = False,
    **_: Any,
) -> int:
    wide = _heads(key, query), _heads(value, query)
    flops: int = sdpa_flop_count(query, *wide)  # type: ignore[no-untyped-call]
    return flops // (1 + is_causal)


def _attention_backward(
    grad: _Shape,
    query: _Shape,
    key: _Shape,
    value: _Shape,
    out: _Shape,
    logsumexp: _Shape,
    dropout: float,
    is_causal: bool,
    **_: Any,
) -> int:
    wide = _heads(key, query), _heads(value, query)
    flops: int = sdpa_backward_flop_count(grad, query, *wide)  # type: ignore[no-untyped-call]
    return flops // (1 + is_causal)


def _heads(shape: _Shape, query: _Shape) -> _Shape:
    """Keys or values as if each query head had its own."""
    return (shape[0], query[1], *shape[2:])


def _grouped(left: _Shape, right: _Shape, *_: Any, **__: Any) -> int:
    """Of [S, I] by [E, I, O], whose rows each meet one expert, and of [I, S] by [S, O]."""
    return 2 * left[0] * left[1] * right[-1]


def _grouped_backward(left: _Shape, right: _Shape, *_: Any, **__: Any) -> int:
    return 2 * _grouped(left, right)
