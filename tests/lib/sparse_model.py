"""A model folder of any size whose weights are a hole in a file: headers, and no bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from trainer.model.load_slices import empty_causal


def make_sparse_model(folder: Path, settings: Mapping[str, Any]) -> Path:
    """Write configuration, tokenizer and a file of bfloat16 zeros that takes no space."""
    folder.mkdir()
    config = {**settings, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    header, position = {}, 0
    for name, parameter in empty_causal(folder, torch.bfloat16).named_parameters():
        end = position + parameter.nbytes
        header[name] = {
            "dtype": "BF16",
            "shape": list(parameter.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + position)
    _tokenizer().save_pretrained(folder)
    return folder


def _tokenizer() -> Any:
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=words)  # type: ignore[no-untyped-call]
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return tokenizer
