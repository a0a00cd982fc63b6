"""What gathering a block's experts costs next to expert parallelism, for Qwen3-30B-A3B on H100s.

FSDP2 gathers the experts of one block, and those of the next while it computes. With expert
parallelism each rank keeps its experts, and tokens travel instead: to the ranks of their experts
and back, in the forward pass, its recomputation and the backward pass.

`make bench-size` computes them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from bench.report import Report
from bench.size.model_shapes import MODELS
from services.lib.transformer.load_causal import transformer_blocks
from services.node_agent.known_devices import device
from tools.plan.step_seconds import SHARE_FLOPS, SHARE_LINK
from tools.plan.training_count import GATHERED, count_training
from trainer.config import TrainerConfig
from trainer.model.load_slices import empty_causal

_MODEL, _DEVICE, _RANKS = "qwen3-30b-a3b", "h100-80", 16
_MICRO_BATCHES = (8_192, 32_768)
_BFLOAT16, _FLOAT32 = 2, 4
_TRIPS = 6
"""Of a layer's tokens: there and back in the forward pass, its recomputation and the backward."""


def figures() -> dict[str, float]:
    """Bytes, and seconds of one micro-batch on a rank, over the network between nodes."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(MODELS[_MODEL]), encoding="utf-8")
        found = _of_block(folder)
        for tokens in _MICRO_BATCHES:
            of_tokens = _of_micro_batch(folder, tokens)
            found |= {f"{key}_{tokens}": value for key, value in of_tokens.items()}
    return found


def _of_block(folder: Path) -> dict[str, float]:
    model = empty_causal(folder, torch.bfloat16)
    block = transformer_blocks(model)[0]
    experts = sum(p.numel() for name, p in block.named_parameters() if ".experts." in name)
    return {"gb_of_a_block": _BFLOAT16 * experts / 1e9}


def _of_micro_batch(folder: Path, tokens: int) -> Mapping[str, float]:
    count = count_training(
        _config(folder, tokens), ranks=_RANKS, rollout_tokens=tokens, prompt_tokens=512
    )
    config: Mapping[str, Any] = MODELS[_MODEL]
    others = (_RANKS - 1) / _RANKS / (SHARE_LINK * device(_DEVICE).network)
    gathers = (2 * _BFLOAT16 + _FLOAT32) * count.parameters
    trip = _BFLOAT16 * tokens * config["num_experts_per_tok"] * config["hidden_size"]
    return {
        "gathered_gb": count.by_part[GATHERED] / 1e9,
        "compute_seconds": count.flops / (SHARE_FLOPS * device(_DEVICE).flops),
        "gather_seconds": gathers * others,
        "all_to_all_seconds": _TRIPS * config["num_hidden_layers"] * trip * others,
    }


def _config(folder: Path, tokens: int) -> TrainerConfig:
    given = {
        "run_id": "size",
        "model": folder,
        "checkpoint": {"folder": folder},
        "dtype": "bfloat16",
        "device": "cuda",
        "batch": {"micro_batch_tokens": tokens},
    }
    return TrainerConfig.model_validate(given)


if __name__ == "__main__":
    Report(
        bench="expert_gathers",
        figures=figures(),
        packages=("seamflow", "torch", "transformers"),
    ).publish()
