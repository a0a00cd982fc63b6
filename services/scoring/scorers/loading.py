"""A frozen Hugging Face model from a folder."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from services.scoring.config import ScoringConfig

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
    return model.to(config.device).eval().requires_grad_(False)
