"""Names and layout of weights in a Hugging Face checkpoint, which may differ from the modules'.

A Mixtral's experts are one parameter of its modules, and three tensors each in its checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn


def checkpoint_tensors(
    model: nn.Module, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """All weights of a model as `save_pretrained` would name and split them.

    Args:
        model: made by `from_pretrained`.
        tensors: its parameters and buffers by the names of its modules.
    """
    from transformers.core_model_loading import revert_weight_conversion

    reverted = revert_weight_conversion(model, dict(tensors))  # type: ignore[arg-type]
    return {name: tensor.contiguous() for name, tensor in reverted.items()}
