"""Make a Hugging Face folder from a GGUF file: `python -m trainer.model.convert_gguf`.

`seamflow init --model` runs it as a process of its own, with the package gguf on its path: its
memory, about eight bytes a parameter, is given back, and the user's environment stays as it is.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def convert_gguf(file: Path, folder: Path) -> None:
    """Write what a GGUF file holds into the new `folder`, the weights in float32.

    Quantized weights are written as the numbers that their blocks stand for.

    Raises:
        ImportError: the package gguf is missing.
        OSError, ValueError: `file` is damaged or of an unknown kind, or `folder` cannot be written.
    """
    tokenizer = AutoTokenizer.from_pretrained(
        file.parent, gguf_file=file.name, local_files_only=True
    )
    model = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        local_files_only=True,
        dtype=torch.float32,
        # Else they stay in blocks, which can be neither trained nor saved.
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Make a Hugging Face folder from a GGUF file.")
    parser.add_argument("file", type=Path)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args(argv)
    convert_gguf(given.file, given.folder)


if __name__ == "__main__":
    main()
