"""Small models with random weights: with tied embeddings, with experts, with windows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

_SIZE = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
}
KINDS: Mapping[str, Mapping[str, Any]] = {
    "tied": {"model_type": "qwen3", "intermediate_size": 384, "tie_word_embeddings": True},
    "experts": {
        "model_type": "qwen3_moe",
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    },
    "windows": {
        "model_type": "mistral",
        "intermediate_size": 384,
        "sliding_window": 48,
        "tie_word_embeddings": False,
    },
}
"""What differs of their configurations."""


def make_model(folder: Path, kind: str) -> Path:
    """Write a model of a kind with its tokenizer; its folder."""
    return save_model(folder, {**_SIZE, **KINDS[kind]})


def save_model(
    folder: Path, settings: Mapping[str, Any], dtype: torch.dtype = torch.float32
) -> Path:
    """Write a model of this configuration with a tokenizer of two words; its folder."""
    from tokenizers import Tokenizer, models
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings))  # type: ignore[no-untyped-call]
    model.to(dtype).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))  # noqa: S106
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)  # type: ignore[no-untyped-call]
    return folder
