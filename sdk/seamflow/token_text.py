"""Text of token ids, for people."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

Decode = Callable[[Sequence[int]], str]
"""Converts token ids to text."""


def token_numbers(token_ids: Sequence[int]) -> str:
    """The ids as decimal numbers."""
    return "".join(f"{token_id} " for token_id in token_ids)


def load_decoder(folder: PathLike[str] | str) -> Decode:
    """The tokenizer of a model folder; special tokens are shown.

    Of its tokenizer.json alone if it has one; transformers, which knows other files, takes seconds
    to load.

    Raises:
        ValueError: a package is missing, or the folder holds no tokenizer.
    """
    file = Path(folder) / "tokenizer.json"
    return decoder_of(read_tokenizer(file)) if file.is_file() else _of_folder(folder)


def read_tokenizer(file: Path) -> Any:
    """The `tokenizers.Tokenizer` of a tokenizer.json.

    Raises:
        ValueError: the package tokenizers is missing, or the file is damaged.
    """
    tokenizers = _package("tokenizers", file)
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise _unusable(file.parent) from error


def decoder_of(tokenizer: Any) -> Decode:
    """Shows special tokens, too."""
    return lambda token_ids: str(tokenizer.decode(list(token_ids), skip_special_tokens=False))


def _of_folder(folder: PathLike[str] | str) -> Decode:
    transformers = _package("transformers", folder)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise _unusable(folder) from error
    return decoder_of(tokenizer)


def _package(name: str, path: PathLike[str] | str) -> Any:
    """Imported by name, because agents do not install it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"the tokenizer {str(path)!r} needs {name}: pip install {name}") from error


def _unusable(folder: PathLike[str] | str) -> ValueError:
    return ValueError(f"model folder {str(folder)!r} holds no usable tokenizer")
