"""The cost of rows in the model of a folder, by its configuration and its parameters.

A parameter of a matrix costs two FLOPs for each token that passes it, and twice as many again in
the backward pass. Attention costs 4 x heads x head size for a pair of tokens in a layer, and two
and a half times as many again in the backward pass, which computes the scores a second time.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

from services.chassis.log import get_logger
from services.lib.model_files.text_config import read_text_config
from trainer.data.row_cost import LINEAR, RowCost

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
