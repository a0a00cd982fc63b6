"""How fast this machine multiplies matrices now: what the time of a step is compared with."""

from __future__ import annotations

import time

import torch

_SIZE, _TIMES = 2048, 5
PRODUCT_FLOPS = 2 * _SIZE**3
"""Operations of one product, in float32."""


def product_seconds() -> float:
    """Seconds of a product, the mean of five after one that is not timed."""
    left, right = torch.randn(2, _SIZE, _SIZE).unbind()
    torch.mm(left, right)
    began = time.perf_counter()
    for _ in range(_TIMES):
        torch.mm(left, right)
    return (time.perf_counter() - began) / _TIMES
