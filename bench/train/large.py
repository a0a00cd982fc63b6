"""The quickstart's start, with the throughput workloads' model of 4.7 million parameters.

python -m bench.train.large --out FOLDER --seed 0
"""

from __future__ import annotations

import torch
from transformers import Qwen3ForCausalLM

from bench.generation import SIZES, model_config
from examples.quickstart import prepare

__all__ = ["build", "main"]

PLAN = prepare.WarmStart(steps=160, learning_rate=1e-3)
"""Fewer steps than the small model's: it learns more from each."""


def build(vocabulary_size: int, seed: int) -> Qwen3ForCausalLM:
    """A freshly initialised model, in float32."""
    torch.manual_seed(seed)
    config = model_config(SIZES["5m"])
    config.vocab_size = vocabulary_size
    return Qwen3ForCausalLM(config)


def main() -> int:
    """See `examples.quickstart.prepare`."""
    return prepare.main(build=build, plan=PLAN)


if __name__ == "__main__":
    raise SystemExit(main())
