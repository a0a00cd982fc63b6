"""Reads a Hugging Face model folder: configuration and context."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from services.lib.model_files.text_config import check_layers, read_text_config


def read_config(folder: Path) -> Any:
    """Return the text model's configuration. Raises `ValueError` if no row of it can be cached."""
    text = read_text_config(folder)
    check_layers(folder, text)
    return text


def context(config: Any, max_context: int | None, longest: int | None = None) -> int:
    """Return the context to serve, checked against the model.

    Args:
        config: of the model.
        max_context: that is asked for; None: what the model allows.
        longest: tokens of the longest row that is computed exactly; None: any.
    """
    limit = int(getattr(config, "max_position_embeddings", None) or 4096)
    limit = min(limit, longest or limit)
    most = min(int(limit * _growth(config)), longest or sys.maxsize)
    if max_context is not None and max_context > most:
        raise ValueError(f"max_context is {max_context}: this model reads at most {most} tokens")
    return max_context or limit


def _growth(config: Any) -> float:
    """How many times its context a model reads if asked to: `dynamic` rope grows with the row."""
    rope = getattr(config, "rope_parameters", None) or {}
    parameters = (rope, *(each for each in rope.values() if isinstance(each, dict)))
    return max(
        (float(p.get("factor") or 1) for p in parameters if p.get("rope_type") == "dynamic"),
        default=1.0,
    )
