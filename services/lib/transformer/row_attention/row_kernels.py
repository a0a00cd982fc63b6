"""The kernels of attention within packed rows by name, and which of them a device has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch

from services.lib.transformer.row_attention.row_kernel import RowKernel
from services.lib.transformer.row_attention.sdpa_rows import sdpa_rows
from services.lib.transformer.row_attention.varlen_rows import varlen_rows

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
