"""LoRA: frozen weights, and two trained low-rank matrices for each linear layer.

    y = W x + (alpha / rank) B A x        A [rank, in] random, B [out, rank] zeros at first

Low-Rank Adaptation (arXiv 2106.09685), as implemented by peft. Published are the merged weights
W + (alpha / rank) B A, or A and B alone, as a PEFT folder.

Shape suffixes: I inputs and O outputs of a layer, R rank.
"""
# ruff: noqa: N806 -- tensors carry shape suffixes

from __future__ import annotations

import itertools
import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from services.chassis import log
from trainer.config import Setting, TrainerConfig

_ADAPTER = "default"
_BASE = ".base_layer."
_PUBLISHED = "base_model.model."
_PARTS = ("lora_A", "lora_B")
_HELD = "model_of_this_run"
_EXPERTS = "experts"
_NUMBER = re.compile(r"\b\d+\.")


def add_adapter(model: nn.Module, config: TrainerConfig) -> None:
    """Freeze the model and add adapters to its linear layers: those of `lora.targets`, or all.

    Raises:
        ValueError: peft is not installed, or a target is no layer that can have an adapter.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ValueError(
            f"lora.rank is {config.lora.rank} but peft is not installed: pip install "
            "'seamflow[lora]', or set lora.rank to 0"
        ) from error
    layers = adapted_layers(model, config)
    transposed = any(not isinstance(layer, nn.Linear) for layer in layers.values())
    names = [f"{_HELD}.{name}" for name in layers]
    settings: Any = {**adapter_settings(config), "target_modules": names}
    # Of a model that it recognises, peft takes `mlp.up_proj` for the up projections of the experts.
    holder = nn.Module()
    holder.add_module(_HELD, model)
    inject_adapter_in_model(LoraConfig(**settings, fan_in_fan_out=transposed), holder, _ADAPTER)
    _begin(model)
    _check_injected(model, layers)
    if config.publish.content == "adapter":
        _check_opened(model, config)
    log.get_logger().info("lora_adapters", layers=describe_layers(layers))


@torch.no_grad()
def _begin(model: nn.Module) -> None:
    """Give the adapters of a model without memory the values that peft begins with."""
    for module in model.modules():
        for part in _PARTS:
            layers = getattr(module, part, None)
            if not isinstance(layers, nn.ModuleDict) or not layers[_ADAPTER].weight.is_meta:
                continue
            layer: Any = layers[_ADAPTER]
            weight = torch.zeros_like(layer.weight, device="cpu")
            if part == "lora_A":
                nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
            layer.weight = nn.Parameter(weight)


def adapted_layers(model: nn.Module, config: TrainerConfig) -> dict[str, nn.Module]:
    """The layers that get an adapter, by full name; the model may be without memory.

    Without targets: every linear layer but the output and those of single experts. Experts that are
    stacked into one tensor, and routers that choose them, are no such layers and stay frozen.

    Raises:
        ValueError: a target is no such layer; names those that there are.
    """
    from transformers.pytorch_utils import Conv1D  # GPT-2's linear layers

    kinds = nn.Linear | Conv1D
    linear = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, kinds) and _gives_product(layer)
    }
    output: Any = model.get_output_embeddings()  # type: ignore[operator]
    targets = config.lora.targets
    for target in targets:
        _check_target(model, target, linear)
    chosen: dict[str, nn.Module] = {
        name: layer
        for name, layer in linear.items()
        if (
            any(_is_named(name, target) for target in targets)
            if targets
            else layer is not output and not _is_expert(name)
        )
    }
    _check_chosen(model, chosen, config)
    return chosen


@torch.no_grad()
def _gives_product(layer: Any) -> bool:
    """Whether it answers with a matrix product; some routers are subclasses that choose experts."""
    if not isinstance(layer, nn.Linear):
        return True
    try:
        found = layer(layer.weight.new_zeros(1, layer.in_features))
    except (RuntimeError, TypeError, ValueError):
        return False
    return isinstance(found, torch.Tensor) and found.shape == (1, layer.out_features)


def describe_layers(layers: Iterable[str]) -> str:
    """Which layers, and how many: `mlp.down_proj x2, self_attn.q_proj x2`."""
    kinds = Counter(_NUMBER.sub("*.", name).rpartition("*.")[2] for name in layers)
    return ", ".join(f"{name} x{count}" for name, count in sorted(kinds.items()))


def _is_named(name: str, target: str) -> bool:
    """Whether a target is the last parts of a layer's name; single experts are named as such."""
    is_named = name == target or name.endswith(f".{target}")
    return is_named and (_EXPERTS in target or not _is_expert(name))


def _is_expert(name: str) -> bool:
    """Whether it is a layer of a routed expert, as in `mlp.experts.7.down_proj`."""
    parts = name.split(".")
    return any(
        first == _EXPERTS and second.isdigit() for first, second in itertools.pairwise(parts)
    )


def _check_target(model: nn.Module, target: str, linear: Mapping[str, nn.Module]) -> None:
    if any(_is_named(name, target) for name in linear):
        return
    stacked = {
        name
        for name, parameter in model.named_parameters()
        if parameter.dim() > 2 and f".{target}." in f".{name}."
    }
    why = (
        f"its experts are stacked into tensors ({min(stacked)}), which get no adapter"
        if stacked
        else "the model has no linear layer of that name"
    )
    names = {name.rpartition(".")[2] for name in linear if not _is_expert(name)}
    raise ValueError(
        f"lora.targets has {target!r}, but {why}: use {', '.join(sorted(names))}, or the last "
        "parts of a layer's name, such as self_attn.q_proj"
    )


def _check_chosen(model: nn.Module, chosen: Mapping[str, nn.Module], config: TrainerConfig) -> None:
    if not chosen:
        raise ValueError(
            f"lora.rank is {config.lora.rank}, but {type(model).__name__} has no linear layers: "
            "set it to 0"
        )
    output: Any = model.get_output_embeddings()  # type: ignore[operator]
    inputs: Any = model.get_input_embeddings()  # type: ignore[operator]
    tied = getattr(model.config, "tie_word_embeddings", False) or (
        output is not None and output.weight is inputs.weight
    )
    if tied and any(layer is output for layer in chosen.values()):
        raise ValueError(
            "lora.targets has the output layer, which shares its weights with the input "
            "embeddings: remove it"
        )
    transposed = any(not isinstance(layer, nn.Linear) for layer in chosen.values())
    if transposed and config.publish.content == "adapter":
        raise ValueError(
            f"publish is 'adapter' but {type(model).__name__} stores its matrices transposed: "
            "publish weights"
        )


def _check_injected(model: nn.Module, chosen: Collection[str]) -> None:
    """Check that peft has adapted just the chosen layers, and left the others as they were."""
    adapted = {
        name.partition(".lora_")[0] for name, _ in model.named_parameters() if is_adapter(name)
    }
    if adapted != set(chosen):
        raise ValueError(
            f"peft has added adapters to {describe_layers(adapted)} instead of "
            f"{describe_layers(chosen)}: install a version of peft that pyproject.toml allows"
        )


def _check_opened(model: Any, config: TrainerConfig) -> None:
    """Check that peft gives the published adapters to the same layers.

    Of a model with experts it takes `up_proj` of its other layers for that of the experts.
    """
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    ours = {published_name(n): p.detach() for n, p in model.named_parameters() if is_adapter(n)}
    settings: Any = {**adapter_settings(config), "target_modules": layer_names(ours)}
    try:
        with torch.device("meta"), warnings.catch_warnings(action="ignore"):
            whole: Any = AutoModelForCausalLM.from_config(model.config)  # type: ignore[no-untyped-call]
            opened: Any = get_peft_model(whole, LoraConfig(**settings))
        on_meta = {name: tensor.to("meta") for name, tensor in ours.items()}
        found: Any = set_peft_model_state_dict(opened, on_meta)
        theirs = {n.replace(f".{_ADAPTER}.", ".") for n, _ in opened.named_parameters()}
        lost = sorted({*found.unexpected_keys, *(ours.keys() - theirs)})
        reason = f"it has no place for {lost[0]}" if lost else ""
    except ValueError as error:
        reason = str(error)
    if reason:
        raise ValueError(
            f"publish.content is 'adapter', but peft opens it as another model than this "
            f"{type(model).__name__} ({reason}): publish weights, or set lora.targets to layers of "
            "attention"
        )


def layer_names(published: Iterable[str]) -> list[str]:
    """The last parts of the names of layers that have adapters, by names in a PEFT file."""
    return sorted({name.rpartition(".lora_")[0].rpartition(".")[2] for name in published})


def adapter_settings(config: TrainerConfig) -> dict[str, Setting]:
    """The settings of the adapter in a PEFT folder."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(config.model),
        "r": config.lora.rank,
        "lora_alpha": config.lora.alpha or 2.0 * config.lora.rank,
        # Dropout would make log-probs differ from the engine's.
        "lora_dropout": 0.0,
    }


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return any(f".{part}." in name for part in _PARTS)


def plain_name(name: str) -> str:
    """A parameter's name in the model without adapters."""
    return name.replace(_BASE, ".")


def published_name(name: str) -> str:
    """The name of an adapter's parameter in a PEFT file."""
    return f"{_PUBLISHED}{name.replace(f'.{_ADAPTER}.', '.')}"


def merged(model: nn.Module, name: str, whole: Callable[[str], torch.Tensor]) -> torch.Tensor:
    """The parameter `name` merged with its layer's adapter.

    Args:
        model: with or without adapters.
        name: of a parameter of the model itself.
        whole: gathers a parameter over the ranks.
    """
    added = delta(model, name, whole)
    return whole(name) if added is None else whole(name) + added


def delta(model: nn.Module, name: str, whole: Callable[[str], torch.Tensor]) -> torch.Tensor | None:
    """What its layer's adapter adds to the whole parameter `name`; None: it has no adapter.

    Args:
        model: with or without adapters.
        name: of a parameter of the model itself.
        whole: gathers a parameter over the ranks.
    """
    path, base, parameter = name.rpartition(_BASE)
    if not base or parameter != "weight":
        return None
    layer: Any = model.get_submodule(path)
    a_RI, b_OR = (whole(f"{path}.{part}.{_ADAPTER}.weight") for part in _PARTS)
    delta_OI: torch.Tensor = layer.scaling[_ADAPTER] * (b_OR @ a_RI)
    return delta_OI.T if layer.fan_in_fan_out else delta_OI
