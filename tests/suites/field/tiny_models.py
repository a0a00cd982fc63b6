"""Small models of random weights, of many architectures, for checks against transformers alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]

VOCABULARY = 264
EXPERTS: Mapping[str, Any] = {"num_experts_per_tok": 4, "moe_intermediate_size": 16}
"""All of four experts: which of two almost equal ones is chosen is a matter of rounding."""
_SIZES: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
    "max_position_embeddings": 64,
    "bos_token_id": 256,
    "eos_token_id": 256,
    "pad_token_id": 256,
}
_LATENT: Mapping[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": None,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_GROUPS: Mapping[str, Any] = {"n_routed_experts": 4, "n_group": 2, "topk_group": 2}
TINY: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "phi3": {},
    "phi": {},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 4},
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 8},
    "gemma3_text": {"query_pre_attn_scalar": 8},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gpt_neox": {},
    "gpt_oss": {**EXPERTS, "num_local_experts": 4},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 4},
    "qwen2_moe": {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 24},
    "qwen3_moe": {**EXPERTS, "num_experts": 4},
    "deepseek_v3": {**EXPERTS, **_LATENT, **_GROUPS, "first_k_dense_replace": 1},
    "glm4": {"partial_rotary_factor": 1.0},
    "glm4_moe": {**EXPERTS, **_GROUPS, "first_k_dense_replace": 1, "partial_rotary_factor": 1.0},
    "olmo": {},
    "olmo2": {},
    "olmoe": {**EXPERTS, "num_experts": 4},
    "granite": {},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 4},
    "smollm3": {},
    "starcoder2": {},
    "stablelm": {"partial_rotary_factor": 1.0},
    "cohere": {},
    "ernie4_5": {},
    "seed_oss": {},
}
"""Settings of each model type beside the sizes that all share; None takes one of those away."""


def make_config(model_type: str, **settings: Any) -> Any:
    """A configuration of a tiny model."""
    sizes = {**_SIZES, **TINY.get(model_type, {}), **settings}
    return AutoConfig.for_model(model_type, **{k: v for k, v in sizes.items() if v is not None})


def make_model(config: Any, seed: int = 0) -> nn.Module:
    """A causal language model of random weights, in float32."""
    torch.manual_seed(seed)
    model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    return model.eval()
