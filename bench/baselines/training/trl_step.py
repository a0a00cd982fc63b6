"""A step of TRL's `GRPOTrainer` on given rows, in its environment: loss, backward pass, AdamW.

The rows are given as TRL makes them of finished rollouts, so nothing is generated. It prints the
seconds of each step, and of a product of matrices after it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from bench.baselines.training.trl_grpo import ON_CPU
from bench.harness.product_seconds import product_seconds


def main() -> None:
    """Train on the same rows again and again."""
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        trainer = _trainer(arguments, folder)
        model = trainer.model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, betas=(0.9, 0.95), fused=True)
        steps, products = [], []
        for _ in range(1 + arguments.steps):
            began = time.perf_counter()
            trainer.compute_loss(model, _rows(arguments)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            steps.append(time.perf_counter() - began)
            products.append(product_seconds())
            print(f"TRL: {steps[-1]:.2f} s", file=sys.stderr)
    print(json.dumps({"steps": steps[1:], "products": products[1:]}))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    for name in ("rows", "rollout-tokens", "prompt-tokens", "steps", "threads"):
        parser.add_argument(f"--{name}", type=int, required=True)
    return parser.parse_args()


def _trainer(arguments: argparse.Namespace, folder: str) -> Any:
    config = GRPOConfig(
        output_dir=folder,
        num_generations=arguments.rows,
        per_device_train_batch_size=arguments.rows,
        max_completion_length=arguments.rollout_tokens - arguments.prompt_tokens,
        loss_type="dapo",
        beta=0.0,
        **ON_CPU,
    )
    trainer: Any = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(arguments.model),
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "a"}] * arguments.rows),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
    )
    trainer.current_gradient_accumulation_steps = 1  # which `train` would set
    return trainer


def _rows(arguments: argparse.Namespace) -> Mapping[str, Any]:
    """As many different prompts as rows, each repeated to the rollout's length."""
    size = arguments.rows, arguments.rollout_tokens
    ids = torch.arange(arguments.rows)[:, None].repeat(1, size[1])
    prompt, completion = ids[:, : arguments.prompt_tokens], ids[:, arguments.prompt_tokens :]
    return {
        "prompt_ids": prompt,
        "prompt_mask": torch.ones_like(prompt),
        "completion_ids": completion,
        "completion_mask": torch.ones_like(completion),
        "advantages": torch.ones(arguments.rows),
        "old_per_token_logps": torch.zeros(completion.shape),
        "num_items_in_batch": torch.tensor(completion.numel()),
    }


if __name__ == "__main__":
    main()
