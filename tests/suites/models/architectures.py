"""The architectures of the model zoo: small models of random weights, made by transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bench.harness.byte_model import make_byte_model

_VOCABULARY = 264
_END = 260
_SIZES: Mapping[str, Any] = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 48,
    "max_position_embeddings": 1024,
    "bos_token_id": _END,
    "eos_token_id": _END,
    "pad_token_id": _END,
}
_EXPERTS: Mapping[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 128}
_HYBRID = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One model of the zoo."""

    name: str
    """Unique in the zoo."""
    model_type: str
    """As in config.json."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of its config.json, beside the sizes that all share; None takes one of those away."""
    dtype: torch.dtype = torch.float32
    """Of the saved weights."""
    shard_size: str = "1GB"
    """Most bytes of a safetensors file."""
    trains: bool = True
    """Whether it is trained, rather than refused for its layers."""

    def make(self, folder: Path, seed: int) -> None:
        """Write the model folder, with a byte tokenizer and a chat template."""
        make_byte_model(folder)
        torch.manual_seed(seed)
        model = self._model().to(dtype=self.dtype)
        model.save_pretrained(folder, max_shard_size=self.shard_size)

    def _model(self) -> Any:
        sizes = {**_SIZES, **self.settings}
        given = {name: value for name, value in sizes.items() if value is not None}
        config = AutoConfig.for_model(self.model_type, **given)
        return AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]


ARCHITECTURES = {
    architecture.name: architecture
    for architecture in (
        Architecture(name="llama-tied", model_type="llama", settings={"tie_word_embeddings": True}),
        Architecture(
            name="llama-untied", model_type="llama", settings={"tie_word_embeddings": False}
        ),
        Architecture(
            name="llama-bfloat16-shards",
            model_type="llama",
            dtype=torch.bfloat16,
            shard_size="1MB",
        ),
        Architecture(name="qwen2", model_type="qwen2"),
        Architecture(name="qwen3", model_type="qwen3"),
        Architecture(name="gemma2", model_type="gemma2", settings={"query_pre_attn_scalar": 48}),
        Architecture(
            name="gemma3", model_type="gemma3_text", settings={"query_pre_attn_scalar": 48}
        ),
        Architecture(
            name="mistral-sliding-window", model_type="mistral", settings={"sliding_window": 512}
        ),
        Architecture(name="phi3", model_type="phi3"),
        Architecture(
            name="gpt2",
            model_type="gpt2",
            settings={"n_embd": 192, "n_layer": 4, "n_head": 4, "n_positions": 1024},
        ),
        Architecture(
            name="gpt-oss",
            model_type="gpt_oss",
            settings={
                **_EXPERTS,
                "num_local_experts": 4,
                "intermediate_size": 128,
                "sliding_window": 512,
            },
        ),
        Architecture(name="gpt-neox", model_type="gpt_neox"),
        Architecture(
            name="mixtral",
            model_type="mixtral",
            settings={"num_local_experts": 4, "intermediate_size": 128},
        ),
        Architecture(
            name="deepseek-v3",
            model_type="deepseek_v3",
            settings={
                **_EXPERTS,
                "num_key_value_heads": 4,
                "head_dim": None,
                "n_routed_experts": 4,
                "n_group": 2,
                "topk_group": 1,
                "first_k_dense_replace": 1,
                "q_lora_rank": 64,
                "kv_lora_rank": 64,
                "qk_rope_head_dim": 16,
                "qk_nope_head_dim": 32,
                "v_head_dim": 32,
            },
        ),
        Architecture(
            name="qwen3-moe", model_type="qwen3_moe", settings={**_EXPERTS, "num_experts": 4}
        ),
        Architecture(name="olmo2", model_type="olmo2"),
        Architecture(name="granite", model_type="granite"),
        Architecture(name="smollm3", model_type="smollm3"),
        Architecture(name="mamba", model_type="mamba", trains=False),
        Architecture(
            name="mamba2",
            model_type="mamba2",
            trains=False,
            settings={"num_heads": 8, "head_dim": 48, "n_groups": 1, "state_size": 16},
        ),
        Architecture(
            name="qwen3-next",
            model_type="qwen3_next",
            trains=False,
            settings={
                **_EXPERTS,
                "num_experts": 4,
                "layer_types": _HYBRID,
                "linear_num_value_heads": 4,
                "linear_num_key_heads": 2,
                "linear_key_head_dim": 32,
                "linear_value_head_dim": 32,
            },
        ),
        Architecture(
            name="lfm2",
            model_type="lfm2",
            trains=False,
            settings={"layer_types": ["conv", "conv", "full_attention", "conv"]},
        ),
    )
}
"""By name."""
