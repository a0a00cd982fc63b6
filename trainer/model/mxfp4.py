"""Experts that a folder holds as mxfp4, such as gpt-oss's, read as the numbers they stand for.

OCP Microscaling formats 1.0: 32 numbers of 4 bits share a power of two. A folder has, for each
expert and each row of its matrix, `_blocks` of 16 bytes, the first number of a pair in the lower
bits, and one byte of `_scales` for each block, the exponent plus 127. A row is an output, the
modules have them as columns.

Shape suffixes: E experts, R rows, G blocks of a row, B bytes of a block.
"""
# ruff: noqa: N803 -- tensors carry shape suffixes

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_BLOCKS, _SCALES = "_blocks", "_scales"
_HALF = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = torch.tensor([*_HALF, *(-each for each in _HALF)], dtype=torch.bfloat16)
"""E2M1 by its four bits; with any exponent they are exact in bfloat16."""
_BIAS = 127


def with_experts(slices: Mapping[str, Any]) -> dict[str, Any]:
    """Entries of a folder, with one entry of numbers in place of each pair of blocks and scales."""
    found = {}
    for name, entry in slices.items():
        if name.endswith(_BLOCKS):
            whole = name.removesuffix(_BLOCKS)
            found[whole] = _Experts(entry, slices[whole + _SCALES])
        elif name.removesuffix(_SCALES) + _BLOCKS not in slices:
            found[name] = entry
    return found


class _Experts:
    """An entry, [E, 2 * G * B, R] in bfloat16, whose experts are read when they are asked for."""

    def __init__(self, blocks: Any, scales: Any) -> None:
        self._blocks, self._scales = blocks, scales

    def get_shape(self) -> list[int]:
        """Its shape."""
        experts, rows, blocks, size = self._blocks.get_shape()
        return [experts, 2 * blocks * size, rows]

    def __getitem__(self, key: Any) -> torch.Tensor:
        """Some experts, by a slice of dimension 0, or all."""
        return _numbers(self._blocks[key], self._scales[key])


def _numbers(blocks_ERGB: torch.Tensor, scales_ERG: torch.Tensor) -> torch.Tensor:
    pairs = torch.stack([blocks_ERGB & 0xF, blocks_ERGB >> 4], -1).flatten(-2)
    exponents = scales_ERG.to(torch.int32)[..., None] - _BIAS
    return torch.ldexp(_VALUES[pairs.int()], exponents).flatten(-2).transpose(1, 2).contiguous()
