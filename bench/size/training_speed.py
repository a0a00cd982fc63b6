"""Tokens that one rank trains in a second on this processor, beside `torch.mm` and TRL.

Shape of SmolLM2-135M with random weights, float32; rollouts that have no prefix in common. Between
its steps the product of two matrices is timed, so that a busy machine slows both.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import torch

from bench.baselines.environments import interpreter
from bench.harness.product_seconds import PRODUCT_FLOPS, product_seconds
from bench.size.model_shapes import MODELS
from bench.size.small_models import save_model
from bench.train.trl import PEER, as_arguments, trl_environment
from tools.plan.training_count import count_training, sample_rows
from trainer.config import TrainerConfig

_THREADS = 2
_TOKENS, _ROLLOUT_TOKENS, _PROMPT_TOKENS = 2048, 256, 64
_STEPS = 5


def training_speed() -> dict[str, float]:
    """Tokens a second, the share of what `torch.mm` does meanwhile, and the same of TRL's step."""
    with tempfile.TemporaryDirectory(prefix="seamflow-size-") as scratch:
        model = save_model(Path(scratch) / "model", MODELS["smollm2-135m"])
        ours = _timed([sys.executable, "-m", "bench.size.training_speed", str(model)])
        theirs = _timed(_trl_step(model))
        flops = count_training(
            _config(model), ranks=1, rollout_tokens=_ROLLOUT_TOKENS, prompt_tokens=_PROMPT_TOKENS
        ).flops
    return {
        "trained_tokens_per_second": _TOKENS / median(ours["steps"]),
        "mm_gflops": PRODUCT_FLOPS / median(ours["products"]) / 1e9,
        "training_over_mm": flops / PRODUCT_FLOPS / median(_in_products(ours)),
        "training_vs_trl": median(_in_products(theirs)) / median(_in_products(ours)),
    }


def _timed(command: list[str]) -> dict[str, list[float]]:
    """Run one side; seconds of its steps and products."""
    done = subprocess.run(
        command, env=trl_environment(_THREADS), check=True, stdout=subprocess.PIPE
    )
    found: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return found


def _in_products(found: Mapping[str, Sequence[float]]) -> list[float]:
    """Each step as so many times the product after it: the machine may be busy."""
    return [s / p for s, p in zip(found["steps"], found["products"], strict=True)]


def _trl_step(model: Path) -> list[str]:
    flags = as_arguments(
        model=model,
        rows=_TOKENS // _ROLLOUT_TOKENS,
        rollout_tokens=_ROLLOUT_TOKENS,
        prompt_tokens=_PROMPT_TOKENS,
        steps=_STEPS,
        threads=_THREADS,
    )
    return [str(interpreter(PEER)), "-m", "bench.baselines.training.trl_step", *flags]


def _config(model: Path) -> TrainerConfig:
    return TrainerConfig.model_validate(
        {
            "run_id": "size",
            "model": model,
            "threads": _THREADS,
            "batch": {"micro_batch_tokens": _TOKENS},
            "checkpoint": {"folder": model.parent},
        }
    )


def _main(model: Path) -> None:
    import torch.distributed as dist

    from bench.size.measured_rank import gradient_of, rank_policy

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    config = _config(model)
    torch.set_num_threads(config.threads)
    policy = rank_policy(config)
    chunk = gradient_of(sample_rows(_TOKENS, _ROLLOUT_TOKENS, _PROMPT_TOKENS))
    steps, products = [], []
    for step in range(1 + _STEPS):
        began = time.perf_counter()
        policy.accumulate(chunk)
        policy.optimize(step + 1)
        steps.append(time.perf_counter() - began)
        products.append(product_seconds())
        print(f"step {step}: {steps[-1]:.2f} s", file=sys.stderr)
    dist.destroy_process_group()
    print(json.dumps({"steps": steps[1:], "products": products[1:]}))


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
