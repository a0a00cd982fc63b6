"""What a device does at most, measured beside the work: products of matrices, and copies."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

_TIMES = 5
_SIZES = {"cpu": 1024, "cuda": 8192}
"""Of a square matrix."""
_COPY_BYTES = {"cpu": 64 << 20, "cuda": 2 << 30}


def seconds_of(device: str, work: Callable[[], object], times: int = _TIMES) -> float:
    """Seconds of `work` on the device, the mean of several after one that is not timed."""
    work()
    _wait(device)
    began = time.perf_counter()
    for _ in range(times):
        work()
    _wait(device)
    return (time.perf_counter() - began) / times


def products_per_second(device: str, dtype: torch.dtype) -> float:
    """FLOP/s of a product of two large matrices."""
    size = _SIZES[device]
    left, right = torch.randn(2, size, size, device=device, dtype=dtype).unbind()
    return 2 * size**3 / seconds_of(device, lambda: left @ right)


def bytes_per_second(device: str) -> float:
    """Bytes that a copy within the device's memory reads and writes."""
    source = torch.zeros(_COPY_BYTES[device], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_of(device, lambda: target.copy_(source))


def host_bytes_per_second(device: str) -> float:
    """Bytes that come from pinned memory of the host to the device."""
    source = torch.zeros(_COPY_BYTES["cpu"], dtype=torch.uint8, pin_memory=device == "cuda")
    target = torch.empty_like(source, device=device)
    return source.nbytes / seconds_of(device, lambda: target.copy_(source, non_blocking=True))


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
