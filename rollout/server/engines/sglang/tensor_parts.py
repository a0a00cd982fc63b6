"""The tensors of a folder, a part at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open

PART_BYTES = 512 << 20
"""Bytes of tensors in one call, about: what the engine must have room for besides its weights."""

Part = list[tuple[str, torch.Tensor]]


def tensor_parts(folder: Path) -> Iterator[Part]:
    """The tensors of all files, in parts of `PART_BYTES`, or of one tensor that is larger."""
    part: Part = []
    size = 0
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 -- it is no mapping
                tensor = file.get_tensor(name)
                if part and size + tensor.nbytes > PART_BYTES:
                    yield part
                    part, size = [], 0
                part.append((name, tensor))
                size += tensor.nbytes
    if part:
        yield part
