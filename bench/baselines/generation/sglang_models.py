"""Random models for SGLang: the values of weights do not change its speed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from examples.quickstart.prepare import build_tokenizer

SHAPES: Mapping[str, Mapping[str, int]] = {
    "0.4m": {"hidden": 128, "layers": 2, "heads": 4, "kv_heads": 2, "head": 32, "ffn": 384},
    "75m": {"hidden": 768, "layers": 12, "heads": 12, "kv_heads": 4, "head": 64, "ffn": 2048},
}
"""Sizes by name; the name tells the number of parameters."""


def make_model(folder: Path, shape: str) -> Path:
    """Write a Hugging Face folder with weights, tokenizer and chat template; returns it."""
    tokenizer, size = build_tokenizer(), SHAPES[shape]
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=size["hidden"],
        num_hidden_layers=size["layers"],
        num_attention_heads=size["heads"],
        num_key_value_heads=size["kv_heads"],
        head_dim=size["head"],
        intermediate_size=size["ffn"],
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
