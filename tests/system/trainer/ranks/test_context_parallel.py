"""Ranks that compute the tokens of rows together have the loss and gradient of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.lib.trainer.ranks.context_run import save_gradients
from tests.lib.trainer.ranks.forked_ranks import run_forked
from tests.lib.trainer.support import make_model

RANKS = 4
CASES: dict[str, dict[str, Any]] = {
    "two groups of two": {"context_parallel": 2},
    "one of four, sequences weighed whole, blocks computed again": {
        "context_parallel": 4,
        "algorithm__name": "gspo",
        "activation_checkpointing": True,
    },
    "a group in each replica, a critic's layer, adapters": {
        "context_parallel": 2,
        "replicas": 2,
        "algorithm__name": "ppo",
        "lora__rank": 2,
    },
    "a critic's own model": {
        "context_parallel": 2,
        "algorithm__name": "ppo",
        "critic": "model",
        "activation_checkpointing": True,
        "activation_offload": True,
    },
    "one of three, and a rank that is left over": {"context_parallel": 3},
    "sinks and experts": {"context_parallel": 2},
    "rounded to bfloat16": {"context_parallel": 2, "dtype": "bfloat16"},
}
ALONE = {"context_parallel": 1, "replicas": 1}
LOSS, GRADIENT = 1e-6, 1e-5
ROUNDED = 0.05
"""In bfloat16, whose precision is 2^-8: sums of a few tokens differ by some roundings."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what one rank and four found in each case, named by its number."""
    folder = tmp_path_factory.mktemp("context")
    # Groups of 3 and 4 ranks share heads of keys that their number does not divide.
    windows: dict[str, Any] = {
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 1,
    }
    heads: dict[str, Any] = {"num_attention_heads": 12, "num_key_value_heads": 2}
    model = make_model(folder / "model", **heads, **windows)
    experts: dict[str, Any] = {
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    }
    sparse = make_model(folder / "sparse", kind="gpt_oss", sliding_window=4, **heads, **experts)
    jobs = [
        {
            "config": {"batch__micro_batch_tokens": 60, "algorithm__name": "grpo", **config},
            "model": sparse if "experts" in name else model,
            "out": folder / f"{number}.safetensors",
        }
        for number, (name, config) in enumerate(CASES.items())
    ]
    wrong = {**jobs[0], "out": folder / "doubled.safetensors", "doubled": True}
    run_forked(RANKS, save_gradients, [*jobs, wrong])
    save_gradients(
        [
            {**job, "config": {**job["config"], **ALONE}, "out": folder / f"alone-{number}"}  # type: ignore[dict-item]
            for number, job in enumerate(jobs)
        ]
    )
    return folder


@pytest.mark.parametrize("name", CASES)
def test_a_group_has_the_loss_and_gradient_of_one_rank(found: Path, name: str) -> None:
    """Of every parameter, relative to its greatest; means count each group once."""
    number = list(CASES).index(name)
    loss, gradient = _differences(found, f"{number}.safetensors", number)
    rounded = CASES[name].get("dtype") == "bfloat16"
    assert loss <= (ROUNDED if rounded else LOSS)
    assert gradient <= (ROUNDED if rounded else GRADIENT)


def test_a_gradient_that_counts_twice_is_found_out(found: Path) -> None:
    """Negative control: the loss is the same, the gradient is not."""
    loss, gradient = _differences(found, "doubled.safetensors", 0)
    assert loss <= LOSS
    assert gradient > 0.5


def _differences(folder: Path, name: str, number: int) -> tuple[float, float]:
    """Of what four ranks found and what one did: of the means, and of the gradient.

    How many tokens were computed depends on which rows came together.
    """
    ours, alone = load_file(folder / name), load_file(folder / f"alone-{number}")
    assert ours.keys() == alone.keys()
    names = ours.keys() - {"metric.computed_tokens", "metric.packing"}
    each = {key: _relative(ours[key], alone[key]) for key in names}
    metrics = [value for key, value in each.items() if key.startswith("metric.")]
    gradients = [value for key, value in each.items() if not key.startswith("metric.")]
    return max(metrics), max(gradients)


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-9))
