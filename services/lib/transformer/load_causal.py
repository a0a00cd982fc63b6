"""A causal language model with every weight that its configuration asks for, and its blocks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from services.lib.model_files.json_file import read_object
from services.lib.model_files.model_folder import check_model_folder
from services.lib.model_files.quantization import is_mxfp4

_SHOWN = 3


def load_causal(folder: Path, dtype: torch.dtype) -> Any:
    """Load the model of a Hugging Face folder, on the CPU.

    Raises:
        ValueError: the folder is no whole model of that kind; one line names it and what is wrong.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    check_model_folder(folder)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            **dequantized(folder),
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise ValueError(f"model {folder}: cannot be loaded: {error}") from error
    model, found = loaded
    if missing := sorted(found["missing_keys"]):
        # transformers would go on with random numbers.
        raise ValueError(
            f"model {folder}: has no weights for {', '.join(missing[:_SHOWN])} ({len(missing)} "
            "parameters); copy the whole folder, or the configuration that belongs to it"
        )
    return model


def dequantized(folder: Path) -> dict[str, Any]:
    """Arguments of `from_pretrained` by which experts in mxfp4 are read as numbers."""
    if not is_mxfp4(read_object(folder, "config.json")):
        return {}
    from transformers.utils.quantization_config import Mxfp4Config

    return {"quantization_config": Mxfp4Config(dequantize=True)}


if TYPE_CHECKING:
    from torch import nn


def transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """The modules that the model declares must not be split over devices, in order."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]
