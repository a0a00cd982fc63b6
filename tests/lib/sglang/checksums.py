"""What SGLang's `/weights_checker` must answer for a folder of published weights.

A tensor's checksum is the first 8 bytes of the SHA-256 of its values. SGLang loads the projections
of Qwen models fused: query, key and value are one tensor, and so are gate and up. The vocabulary
is padded with rows of zeros.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from safetensors.torch import load_file

_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
_VOCABULARY_MULTIPLE = 64


def published_checksums(folder: Path) -> dict[str, str]:
    """Checksums by SGLang's names of what `folder` holds."""
    tensors = load_file(folder / "model.safetensors")
    return {name: _checksum(tensor) for name, tensor in _as_loaded(tensors).items()}


def _as_loaded(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same values under the names and in the shapes of SGLang's model."""
    loaded = dict(tensors)
    for fused, parts in _FUSED.items():
        for name in [name for name in tensors if f".{parts[0]}." in name]:
            names = [name.replace(parts[0], part) for part in parts]
            loaded[name.replace(parts[0], fused)] = torch.cat([loaded.pop(part) for part in names])
    for name in loaded.keys() & set(_VOCABULARY):
        missing = -len(loaded[name]) % _VOCABULARY_MULTIPLE
        loaded[name] = torch.nn.functional.pad(loaded[name], (0, 0, 0, missing))
    return loaded


def _checksum(tensor: torch.Tensor) -> str:
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(data.tobytes()).hexdigest()[:16]
