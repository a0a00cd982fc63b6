"""The configuration of a folder's language model, as transformers understands it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from services.lib.model_files.json_file import read_object

_ATTENTION = frozenset(
    {
        *("llama", "qwen2", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text", "mistral"),
        *("mixtral", "phi3", "gpt2", "gpt_oss", "gpt_neox", "deepseek_v3", "olmo2", "smollm3"),
    }
)
"""Models without other layers, which need not be asked: to import transformers takes seconds."""
_ATTENTION_TYPES = frozenset({"full_attention", "sliding_attention"})


def check_attention(folder: Path) -> None:
    """Check that the torch engine can cache each layer of the model.

    Raises:
        ValueError: one line that names the folder, what is wrong and the cure.
    """
    config = read_object(folder, "config.json")
    if config.get("model_type") not in _ATTENTION:
        check_layers(folder, read_text_config(folder))


def read_text_config(folder: Path) -> Any:
    """Return the configuration; of a model that also sees or hears, its text part.

    Raises:
        ValueError: transformers cannot read it; names the folder.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the library raises anything at a damaged file
        reason = " ".join(str(error).split())
        raise ValueError(f"model {folder}: config.json cannot be used: {reason}") from error
    return config.get_text_config(decoder=True)


def check_layers(folder: Path, text: Any) -> None:
    """Check that the torch engine can cache each layer: those of attention alone.

    Raises:
        ValueError: one line that names the folder, the layers and the cure.
    """
    unsupported = set(getattr(text, "layer_types", None) or ()) - _ATTENTION_TYPES
    if unsupported:
        raise ValueError(
            f"model {folder}: has layers of type {', '.join(sorted(unsupported))}, whose state the "
            'torch engine cannot cache; use a model of attention layers, or engine = "sglang"'
        )
