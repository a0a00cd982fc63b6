"""FLOPs of rows, next to those that are counted one by one and by torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from trainer.data.row_cost import LINEAR, RowCost, cost_in, model_cost

SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"tie_word_embeddings": True},
    "llama": {},
    "mistral": {"sliding_window": 8},
    "gemma3_text": {"sliding_window": 8},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
LENGTH = 40
PASSES, PAIR_PASSES = 3.0, 3.5
"""Forward and backward, in forward passes."""


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 30])
@pytest.mark.parametrize("window", [0, 1, 8])
def test_attention_costs_each_token_what_it_attends_to(length: int, window: int) -> None:
    """Itself and those before, within the window."""
    cost = RowCost(token_flops=1.0, pairs=((window, 3.0),))
    seen = [min(place + 1, window or length) for place in range(length)]
    np.testing.assert_array_equal(cost.attention(np.array([length])), [3.0 * sum(seen)])


def test_layers_of_several_windows_add_up() -> None:
    """And nothing is added for a model without attention."""
    cost = RowCost(token_flops=1.0, pairs=((0, 2.0), (2, 10.0)))
    np.testing.assert_array_equal(cost.attention(np.array([3, 1])), [2 * 6 + 10 * 5, 12])
    np.testing.assert_array_equal(LINEAR.attention(np.array([3, 1])), [0, 0])


@pytest.mark.parametrize("kind", MODELS)
def test_the_cost_in_a_model_is_what_torch_counts(kind: str) -> None:
    """A pass over one row; torch counts pairs that the causal mask hides."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **{**SHAPE, **MODELS[kind]})
    config._attn_implementation = config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.zeros(1, LENGTH, dtype=torch.int64))
    cost = cost_in(config)
    pairs = sum(flops for _, flops in cost.pairs) * LENGTH**2 / PAIR_PASSES
    ours = cost.of_tokens(LENGTH, LENGTH) / PASSES + pairs
    assert counter.get_total_flops() == pytest.approx(ours, rel=1e-9)


@pytest.mark.parametrize(
    ("kind", "settings", "windows"),
    [
        ("llama", {}, {0: 3}),
        ("mistral", {"sliding_window": 8}, {8: 3}),
        ("gpt_oss", {"sliding_window": 8, "num_local_experts": 4}, {0: 1, 8: 2}),
        ("qwen3_next", {"layer_types": ["linear_attention"] * 2 + ["full_attention"]}, {0: 1}),
    ],
)
def test_the_type_of_a_layer_says_what_it_attends_to(
    kind: str, settings: dict[str, Any], windows: dict[int, int]
) -> None:
    """Layers without attention between tokens cost nothing for pairs of them."""
    from transformers import AutoConfig

    given = {**SHAPE, "max_position_embeddings": 131_072, **settings}
    pairs = cost_in(AutoConfig.for_model(kind, **given)).pairs
    assert pairs == tuple((each, 14.0 * 4 * 16 * windows[each]) for each in sorted(windows))


@pytest.mark.parametrize("content", [None, "{", '{"model_type": "no_such_model"}'])
def test_a_model_that_is_not_known_costs_what_it_has_tokens(
    tmp_path: Path, content: str | None
) -> None:
    """No configuration, a damaged one, one that transformers does not know."""
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert model_cost(tmp_path) == LINEAR


def test_the_folder_of_a_model_has_its_cost(tmp_path: Path) -> None:
    """As its configuration says."""
    from transformers import AutoConfig

    config = AutoConfig.for_model("llama", **SHAPE)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    assert model_cost(tmp_path) == cost_in(config)
