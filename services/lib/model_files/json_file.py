"""JSON objects of a model folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_IDS = (int, list)
_TOKEN = (str, dict)
_CONFIG: Mapping[str, tuple[type, ...]] = {
    "architectures": (list,),
    "auto_map": (dict,),
    "eos_token_id": _IDS,
    "model_type": (str,),
    "quantization_config": (dict,),
    "text_config": (dict,),
    "vocab_size": (int,),
}
_KINDS: Mapping[str, Mapping[str, tuple[type, ...]]] = {
    "config.json": _CONFIG,
    "generation_config.json": {"eos_token_id": _IDS},
    "tokenizer.json": {"model": (dict,), "added_tokens": (list,)},
    "tokenizer_config.json": {"chat_template": (str, list, dict), "eos_token": _TOKEN},
    "special_tokens_map.json": {"eos_token": _TOKEN},
    "model.safetensors.index.json": {"weight_map": (dict,)},
    "chat_template.json": {"chat_template": (str,)},
}
"""What the values that are read here have to be; null stands for a missing one."""

_ELEMENTS = {
    "architectures": str,
    "eos_token_id": int,
    "added_tokens": dict,
    "weight_map": str,
}
"""Kind of what is in a list, or of the values of an object."""


def check_json_files(folder: Path) -> None:
    """Check the files of the folder that describe model and tokenizer, as far as they are there.

    Raises:
        ValueError: one cannot be read, or a value is of another kind; names folder, file and value.
    """
    for name in _KINDS:
        read_object(folder, name)


def read_object(folder: Path, name: str) -> dict[str, Any]:
    """The object in a file of the folder; empty without the file.

    Raises:
        ValueError: it cannot be read, is no object, or has a value of another kind; names the
            folder, the file and the value.
    """
    try:
        values = json.loads((folder / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except RecursionError as error:
        raise ValueError(f"model {folder}: {name} is nested too deeply: is it damaged?") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"model {folder}: {name} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"model {folder}: {name} is not a JSON object")  # noqa: TRY004
    _check_kinds(f"model {folder}: {name}", values, _KINDS.get(name, {}))
    return values


def _check_kinds(
    where: str, values: Mapping[str, Any], kinds: Mapping[str, tuple[type, ...]]
) -> None:
    for name, allowed in kinds.items():
        value = values.get(name)
        if value is not None and not _is_of(name, value, allowed):
            raise ValueError(
                f"{where} has {name} {str(value)[:60]!r}, which is of the wrong kind: copy the "
                "file again from the model that it belongs to"
            )
    if "text_config" in kinds and values.get("text_config"):
        _check_kinds(f"{where}, text_config,", values["text_config"], kinds)


def _is_of(name: str, value: Any, allowed: tuple[type, ...]) -> bool:
    if isinstance(value, bool) or not isinstance(value, allowed):
        return False
    element = _ELEMENTS.get(name)
    inner: Any = value.values() if isinstance(value, dict) else value
    return element is None or isinstance(value, int) or all(isinstance(v, element) for v in inner)


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
