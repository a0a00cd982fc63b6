"""A frozen Hugging Face model from a folder, on the device or waiting in the host's memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from services.scoring.config import ScoringConfig
from services.scoring.scorers.swapping import Swapping

__all__ = ["frozen"]

_DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


def frozen(config: ScoringConfig, kind: Any, **settings: Any) -> nn.Module:
    """The model of `config.model` as `kind`, one of transformers' auto classes, ready to be called.

    Raises:
        ValueError: the folder does not exist, or holds another kind of model.
    """
    from transformers.utils import logging

    if not config.model.is_dir():
        raise ValueError(f"model {config.model}: no such folder; give a Hugging Face model folder")
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(config.threads)
    try:
        model: nn.Module = kind.from_pretrained(
            config.model,
            dtype=_DTYPES[config.dtype],
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            **settings,
        )
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"model {config.model}: {error}") from error
    model.eval().requires_grad_(False)
    return _swapped_in(model, config.device) if config.cpu_offload else model.to(config.device)


def _swapped_in(model: nn.Module, device: str) -> nn.Module:
    """`model`, whose weights stay on the host but for the blocks that compute."""
    if not (blocks := _blocks(model)):
        raise ValueError(
            f"{type(model).__name__} names no blocks to swap in one by one: leave cpu_offload off"
        )
    Swapping(blocks, device)  # lives in the hooks of the blocks
    return model.to(device)


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The transformer blocks: what Hugging Face says must not be split over devices."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]
