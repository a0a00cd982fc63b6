"""A linear layer for few rows: on the CPU its weight is kept in oneDNN's own packed order.

A decode step multiplies tens of rows by every weight. The plain kernel packs the weight anew in
each call, which at such a width costs as much as the product; here it is packed once per weight
version. Measured against `torch.nn.functional.linear` at 64 rows: 1.3 to 1.5 times as fast.

Shapes: N tokens, I inputs, O outputs.
"""

# ruff: noqa: N803, N806, N815 -- tensors carry their shapes in their names

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

# Below this, calling oneDNN costs more than packing saves.
_SMALLEST_PACKED = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """`x @ weight.T + bias`, with what a transformer does next done by the same kernel."""

    weight_OI: Tensor
    """Plain, or packed by oneDNN."""
    bias_O: Tensor | None
    """None adds nothing."""
    packed: bool
    """Whether only oneDNN can read `weight_OI`."""

    @classmethod
    def of(cls, weight_OI: Tensor, bias_O: Tensor | None) -> Linear:
        """Pack a weight if this machine gains by it."""
        packed = (
            torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
            and weight_OI.device.type == "cpu"
            and weight_OI.dtype == torch.float32
            and weight_OI.numel() >= _SMALLEST_PACKED
        )
        if packed:
            weight_OI = torch.ops.mkldnn._reorder_linear_weight(weight_OI, None)
        return cls(weight_OI=weight_OI.contiguous(), bias_O=bias_O, packed=packed)

    def __call__(self, x_NI: Tensor) -> Tensor:
        """Return [N, O]."""
        return self._unary(x_NI, "none") if self.packed else self._plain(x_NI)

    def silu(self, x_NI: Tensor) -> Tensor:
        """Return silu of it, [N, O]."""
        return self._unary(x_NI, "swish") if self.packed else functional.silu(self._plain(x_NI))

    def plus(self, x_NI: Tensor, other_NO: Tensor) -> Tensor:
        """Return the sum with `other_NO`."""
        return self._binary(x_NI, other_NO, "add") if self.packed else self._plain(x_NI) + other_NO

    def times(self, x_NI: Tensor, other_NO: Tensor) -> Tensor:
        """Return the product with `other_NO`, element by element."""
        return self._binary(x_NI, other_NO, "mul") if self.packed else self._plain(x_NI) * other_NO

    def _plain(self, x_NI: Tensor) -> Tensor:
        return functional.linear(x_NI, self.weight_OI, self.bias_O)

    def _unary(self, x_NI: Tensor, then: str) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(
            x_NI, self.weight_OI, self.bias_O, then, [], ""
        )
        return result

    def _binary(self, x_NI: Tensor, other_NO: Tensor, then: str) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            x_NI, other_NO, self.weight_OI, self.bias_O, then
        )
        return result

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        bias = 0 if self.bias_O is None else self.bias_O.nbytes
        return self.weight_OI.numel() * self.weight_OI.element_size() + bias
