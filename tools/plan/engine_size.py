"""What an engine holds and reads, by the model's config.json."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer.model.load_slices import empty_causal

_BYTES = 2
"""Of a weight and of a number of the KV cache: bfloat16."""
_EXPERTS = ".experts."


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSize:
    """A model in bfloat16 as an engine samples from it."""

    parameters: int
    expert_parameters: int
    """Those of experts, of which a token meets some."""
    embedding_parameters: int
    """Those of an input embedding that is no output layer too: a row of it is read for a token."""
    experts: int
    """Experts of a layer; 0: there are none."""
    experts_per_token: int
    kv_bytes: int

    @property
    def weight_bytes(self) -> int:
        """Of all weights."""
        return _BYTES * self.parameters

    @property
    def active_parameters(self) -> float:
        """Those that a token is multiplied with."""
        return self._dense + self._share(1) * self.expert_parameters

    def bytes_of_step(self, sequences: int) -> float:
        """Weights read for one token of each of `sequences`, whose experts differ."""
        return _BYTES * (self._dense + self._share(sequences) * self.expert_parameters)

    @property
    def _dense(self) -> int:
        return self.parameters - self.expert_parameters - self.embedding_parameters

    def _share(self, tokens: int) -> float:
        """Of the experts that one of `tokens` meets, if each meets any."""
        if not self.experts:
            return 0.0
        return float(1 - (1 - self.experts_per_token / self.experts) ** tokens)


def engine_size(folder: Path) -> EngineSize:
    """The size of the model in a folder; only config.json is read.

    Raises:
        ValueError: transformers does not know such a model.
    """
    model = empty_causal(folder, torch.bfloat16)
    sizes = {name: each.numel() for name, each in model.named_parameters()}
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    config = model.config.get_text_config()
    return EngineSize(
        parameters=sum(sizes.values()),
        expert_parameters=sum(n for name, n in sizes.items() if _EXPERTS in name),
        embedding_parameters=0 if inputs.weight is outputs.weight else inputs.weight.numel(),
        experts=_first(config, "num_experts", "num_local_experts", "n_routed_experts"),
        experts_per_token=_first(config, "num_experts_per_tok"),
        kv_bytes=_kv_bytes(config),
    )


def _kv_bytes(config: Any) -> int:
    """Keys and values of a token; those of a latent if the model keeps one (MLA)."""
    latent = getattr(config, "kv_lora_rank", None)
    if latent:
        numbers = latent + config.qk_rope_head_dim
    else:
        heads = config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        numbers = 2 * (getattr(config, "num_key_value_heads", None) or heads) * size
    return int(_BYTES * config.num_hidden_layers * numbers)


def _first(config: Any, *names: str) -> int:
    return next((int(getattr(config, name)) for name in names if getattr(config, name, None)), 0)
