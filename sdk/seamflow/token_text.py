"""Text of token ids, for people."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any

__all__ = ["Decode", "load_decoder", "token_numbers"]

Decode = Callable[[Sequence[int]], str]
"""Converts token ids to text."""


def token_numbers(token_ids: Sequence[int]) -> str:
    """The ids as decimal numbers."""
    return "".join(f"{token_id} " for token_id in token_ids)


def load_decoder(folder: PathLike[str] | str) -> Decode:
    """The tokenizer of a model folder; special tokens are shown.

    Raises:
        ValueError: transformers is missing, or the folder holds no tokenizer.
    """
    try:
        # By name, because agents do not install it.
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise ValueError(
            f"the tokenizer of {str(folder)!r} needs transformers: pip install transformers"
        ) from error
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise ValueError(f"model folder {str(folder)!r} holds no usable tokenizer") from error
    return lambda token_ids: str(tokenizer.decode(list(token_ids)))
