"""The transformer blocks of a Hugging Face model."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """The modules that the model declares must not be split over devices, in order."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]
