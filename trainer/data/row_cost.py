"""What it costs to train on rows of tokens, in FLOPs of a forward and backward pass.

Shape suffixes: N rows, T tokens of a row.
"""
# ruff: noqa: N803, N806 -- arrays carry shape suffixes

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.chassis.log import get_logger
from services.lib.model_files.json_file import read_text_config


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCost:
    """The cost of rows, from that of a token and of a pair of tokens in a model.

    Example: RowCost(token_flops=6.0 * 4e9, pairs=((0, 3.5 * 4 * 32 * 128 * 36),))
    """

    token_flops: float
    """Of a token in all layers but the output layer, without attention to other tokens."""
    output_flops: float = 0.0
    """Of the output layer for a token."""
    pairs: tuple[tuple[int, float], ...] = ()
    """(window, FLOPs): of a token and one it attends to, over all layers whose tokens attend to
    themselves and those before within `window` tokens; 0: to all before."""

    def of_tokens(self, num_tokens: int, num_outputs: int) -> float:
        """FLOPs of tokens, some of which pass the output layer, without attention."""
        return self.token_flops * num_tokens + self.output_flops * num_outputs

    def attention(self, lengths_N: NDArray[np.int64]) -> NDArray[np.float64]:
        """FLOPs of attention of each row, [N], as if it shared no prefix: it is computed again."""
        lengths_N = np.asarray(lengths_N, np.float64)
        found_N = np.zeros(lengths_N.shape, np.float64)
        for window, flops in self.pairs:
            # The first tokens of a row see less than a window, all others just that.
            first_N = np.minimum(lengths_N, window) if window else lengths_N
            found_N += flops * (first_N * (first_N + 1) / 2 + (lengths_N - first_N) * window)
        return found_N


LINEAR = RowCost(token_flops=1.0)
"""Of a model that is not known: rows cost what they have tokens, and the unit is a token."""


_WEIGHT_FLOPS = 2.0 * 3.0
_PAIR_FLOPS = 2.0 * 2.0 * 3.5
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_WINDOWS = {
    "full_attention": None,
    "sliding_attention": "sliding_window",
    "chunked_attention": "attention_chunk_size",
}
"""By type of layer, the setting that limits what its tokens attend to; other types have no
attention between pairs of tokens."""


@cache
def model_cost(folder: Path) -> RowCost:
    """The cost in the model of a folder, read once; `LINEAR` if it is not known."""
    if not (folder / "config.json").exists():
        return LINEAR
    try:
        return cost_in(read_text_config(folder))
    except Exception as problem:  # whatever a configuration lacks: a plan is no reason to end
        get_logger().warning("row_cost_linear", reason=f"{type(problem).__name__}: {problem}")
        return LINEAR


def cost_in(config: Any) -> RowCost:
    """The cost in a model of this configuration, of which no weight is allocated.

    A parameter of a matrix costs two FLOPs for a token that passes it, and twice as many again in
    the backward pass. Attention costs 4 x heads x head size for a pair of tokens in a layer, and
    two and a half times as many again in the backward pass, which computes the scores again.

    Raises what transformers raises for a configuration that it does not know, and `AttributeError`
    for one without attention heads.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        # In the default type: while it is made in another one, that is the default of all threads.
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.get_default_dtype())  # type: ignore[no-untyped-call]
    output = model.get_output_embeddings()
    return RowCost(
        token_flops=_WEIGHT_FLOPS * _weights(model, output),
        output_flops=_WEIGHT_FLOPS * output.weight.numel(),
        pairs=_pairs(config),
    )


def _weights(model: Any, output: Any) -> float:
    """Weights that a token passes: no embeddings, and of experts those that are chosen."""
    import torch

    chosen = _chosen_experts(model.config)
    weights: float = sum(
        parameter.numel() * (chosen if "experts." in name and "shared" not in name else 1.0)
        for place, module in model.named_modules()
        if module is not output and not isinstance(module, torch.nn.Embedding)
        for name, parameter in (
            (f"{place}.{own}", each) for own, each in module.named_parameters(recurse=False)
        )
        if parameter.dim() > 1 and not name.endswith("bias")
    )
    return weights


def _chosen_experts(config: Any) -> float:
    """The share of a layer's experts that a token passes; 1: there are none."""
    found = [number for name in _EXPERTS if (number := getattr(config, name, None))]
    return float(config.num_experts_per_tok / found[0]) if found else 1.0


def _pairs(config: Any) -> tuple[tuple[int, float], ...]:
    """FLOPs of a pair of tokens, by the window of layers; 0: they have none."""
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    layers = Counter(_windows(config))
    return tuple((each, _PAIR_FLOPS * heads * size * layers[each]) for each in sorted(layers))


def _windows(config: Any) -> list[int]:
    """The window of each layer with attention."""
    types = getattr(config, "layer_types", None)
    if types is None:
        return [getattr(config, "sliding_window", None) or 0] * config.num_hidden_layers
    names = [_WINDOWS[each] for each in types if each in _WINDOWS]
    return [(getattr(config, name, None) or 0) if name else 0 for name in names]
