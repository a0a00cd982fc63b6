"""A gpt-oss folder whose experts are mxfp4, as the model is released."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

_GROUP = 32
"""Numbers that share an exponent."""


def mxfp4_folder(source: Path, folder: Path, seed: int = 0) -> Path:
    """Copy a folder; its experts become random blocks and scales, rows being outputs."""
    shutil.copytree(source, folder)
    random = torch.Generator().manual_seed(seed)
    tensors = load_file(source / "model.safetensors")
    for name in [each for each in tensors if each.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = (experts, outputs, inputs // _GROUP, _GROUP // 2)
        codes = torch.randint(0, 256, blocks, generator=random, dtype=torch.uint8)
        scales = torch.randint(118, 124, blocks[:-1], generator=random, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": codes, f"{name}_scales": scales}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.embed_tokens", "lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
