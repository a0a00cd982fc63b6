"""LoRA: frozen weights, and two trained low-rank matrices for each linear layer.

    y = W x + (alpha / rank) B A x        A [rank, in] random, B [out, rank] zeros at first

Low-Rank Adaptation (arXiv 2106.09685), as implemented by peft. Published are the merged weights
W + (alpha / rank) B A, or A and B alone, as a PEFT folder.

Shape suffixes: I inputs and O outputs of a layer, R rank.
"""
# ruff: noqa: N806 -- tensors carry shape suffixes

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from trainer.config import Setting, TrainerConfig

__all__ = [
    "adapter_settings",
    "add_adapter",
    "is_adapter",
    "merged",
    "plain_name",
    "published_name",
]

_ADAPTER = "default"
_BASE = ".base_layer."
_PARTS = ("lora_A", "lora_B")


def add_adapter(model: nn.Module, config: TrainerConfig) -> None:
    """Freeze the model and add adapters to its linear layers: those of `lora.targets`, or all.

    Experts stacked into one tensor are not separate layers and get no adapter.

    Raises:
        ValueError: peft is not installed, or the model has no such layers.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ValueError(
            f"lora.rank is {config.lora.rank} but peft is not installed: pip install "
            "'seamflow[lora]', or set lora.rank to 0"
        ) from error
    layers = _chosen(model, config.lora.targets)
    transposed = any(not isinstance(layer, nn.Linear) for layer in layers.values())
    if transposed and config.publish.content == "adapter":
        raise ValueError(
            f"publish is 'adapter' but {type(model).__name__} stores its matrices transposed: "
            "publish weights"
        )
    settings: Any = {**adapter_settings(config), "target_modules": list(layers)}
    inject_adapter_in_model(LoraConfig(**settings, fan_in_fan_out=transposed), model, _ADAPTER)


def _chosen(model: nn.Module, targets: Sequence[str]) -> dict[str, nn.Module]:
    """The layers that get an adapter, by full name."""
    from transformers.pytorch_utils import Conv1D  # GPT-2's linear layers

    kinds = nn.Linear | Conv1D
    linear = {name: layer for name, layer in model.named_modules() if isinstance(layer, kinds)}
    output: Any = model.get_output_embeddings()  # type: ignore[operator]
    names = {name.rpartition(".")[2] for name in linear}
    for target in targets:
        if target not in names:
            raise ValueError(
                f"lora.targets has {target!r}, but the model has no linear layer of that name: use "
                f"{', '.join(sorted(names))}"
            )
    chosen: dict[str, nn.Module] = {
        name: layer
        for name, layer in linear.items()
        if (name.rpartition(".")[2] in targets if targets else layer is not output)
    }
    inputs: Any = model.get_input_embeddings()  # type: ignore[operator]
    if output in chosen.values() and output.weight is inputs.weight:
        raise ValueError(
            "lora.targets has the output layer, which shares its weights with the input "
            "embeddings: remove it"
        )
    return chosen


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
    return f"base_model.model.{name.replace(f'.{_ADAPTER}.', '.')}"


def merged(model: nn.Module, name: str, whole: Callable[[str], torch.Tensor]) -> torch.Tensor:
    """The parameter `name` merged with its layer's adapter.

    Args:
        model: with or without adapters.
        name: of a parameter of the model itself.
        whole: gathers a parameter over the ranks.
    """
    path, base, parameter = name.rpartition(_BASE)
    if not base or parameter != "weight":
        return whole(name)
    layer: Any = model.get_submodule(path)
    a_RI, b_OR = (whole(f"{path}.{part}.{_ADAPTER}.weight") for part in _PARTS)
    delta_OI: torch.Tensor = layer.scaling[_ADAPTER] * (b_OR @ a_RI)
    return whole(name) + (delta_OI.T if layer.fan_in_fan_out else delta_OI)
