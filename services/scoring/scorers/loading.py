"""Load a frozen Hugging Face model onto the device, or offloaded to the host's memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from services.lib.transformer.load_causal import transformer_blocks
from services.scoring.config import ScoringConfig
from services.scoring.scorers.swapping import BlockSwapper

_DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


def load_frozen(config: ScoringConfig, auto_class: Any, **settings: Any) -> nn.Module:
    """Load `config.model` with one of transformers' auto classes, for inference.

    Raises:
        ValueError: the folder does not exist, or holds another kind of model.
    """
    from transformers.utils import logging

    if not config.model.is_dir():
        raise ValueError(f"model {config.model}: no such folder; give a Hugging Face model folder")
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(config.threads)
    try:
        model: nn.Module = auto_class.from_pretrained(
            config.model,
            dtype=_DTYPES[config.dtype],
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            **settings,
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise ValueError(f"model {config.model}: {error}") from error
    model.eval().requires_grad_(False)
    return _offload(model, config.device) if config.cpu_offload else model.to(config.device)


def _offload(model: nn.Module, device: str) -> nn.Module:
    """Keep the weights of the model's blocks on the host, except while they compute."""
    if not (blocks := transformer_blocks(model)):
        raise ValueError(
            f"{type(model).__name__} declares no blocks to swap in one by one: set cpu_offload to "
            "false"
        )
    BlockSwapper(blocks, device)  # referenced by the hooks of the blocks
    return model.to(device)
