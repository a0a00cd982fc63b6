"""Checks a Hugging Face model folder before anything is started with it; reads no weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["check_chat_template", "check_model_folder", "weight_files"]

_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt"),
    *("spiece.model", "sentencepiece.bpe.model", "tekken.json"),
)
_CAUSAL = ("ForCausalLM", "LMHeadModel")
_INDEX = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000  # of the safetensors format


def check_model_folder(folder: Path) -> None:
    """Check that the folder holds a whole causal language model with its tokenizer.

    Raises:
        ValueError: one line that names the folder, what is wrong and the cure.
    """
    if not folder.is_dir():
        raise ValueError(f"model {folder}: no such folder; give a local Hugging Face model folder")
    config = _config(folder)
    _check_kind(folder, config)
    for file in weight_files(folder):
        _check_file(folder, file)
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise ValueError(
            f"model {folder}: has no tokenizer ({', '.join(_TOKENIZER_FILES)}); save it there with "
            "tokenizer.save_pretrained()"
        )


def check_chat_template(folder: Path) -> None:
    """Check that messages can be rendered.

    Raises:
        ValueError: names the folder and the cure.
    """
    settings = _json(folder, "tokenizer_config.json")
    has_file = any((folder / f"chat_template.{kind}").is_file() for kind in ("jinja", "json"))
    if not settings.get("chat_template") and not has_file:
        raise ValueError(
            f"model {folder}: has no chat template, so no message can be rendered; write one to "
            "chat_template.jinja in that folder, or start from an instruct model"
        )


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files, all that the index names.

    Raises:
        ValueError: one or all are missing; names the folder and the cure.
    """
    if not (folder / _INDEX).is_file():
        found = sorted(folder.glob("*.safetensors"))
        if not found:
            raise ValueError(f"model {folder}: {_without_weights(folder)}")
        return found
    shards = sorted(set(_json(folder, _INDEX).get("weight_map", {}).values()))
    missing = [name for name in shards if not (folder / name).is_file()]
    if missing or not shards:
        raise ValueError(
            f"model {folder}: {_INDEX} names {', '.join(missing) or 'no file'}, which is not "
            "there; copy the whole folder"
        )
    return [folder / name for name in shards]


def _config(folder: Path) -> dict[str, Any]:
    if (folder / "config.json").is_file():
        return _json(folder, "config.json")
    if (folder / "adapter_config.json").is_file():
        raise ValueError(
            f"model {folder}: is an adapter without its model; merge it into the model it belongs "
            "to with peft's merge_and_unload(), and save that"
        )
    raise ValueError(
        f"model {folder}: is not a Hugging Face model folder, as it has no config.json; save a "
        "model there with model.save_pretrained()"
    )


def _check_kind(folder: Path, config: dict[str, Any]) -> None:
    if config.get("auto_map"):
        raise ValueError(
            f"model {folder}: needs code of its own (auto_map in config.json), which is never run; "
            "use an architecture that transformers has"
        )
    names = config.get("architectures") or []
    causal = [name for name in names if name.endswith(_CAUSAL)]
    is_encoder = config.get("is_encoder_decoder") or (
        causal == ["BertLMHeadModel"] and not config.get("is_decoder")
    )
    if (names and not causal) or is_encoder:
        raise ValueError(
            f"model {folder}: is {', '.join(names)}, not a causal language model; use one whose "
            "architecture ends in ForCausalLM"
        )


def _without_weights(folder: Path) -> str:
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")):
        return (
            "has its weights in pickle files (.bin), which may run code; convert it with "
            "AutoModelForCausalLM.from_pretrained(…).save_pretrained(…)"
        )
    return "has no weights (*.safetensors); save them with model.save_pretrained()"


def _check_file(folder: Path, file: Path) -> None:
    """Compare a file's size with what its header promises."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        try:
            header = json.loads(opened.read(min(length, _MAX_HEADER_BYTES)))
            ends = [each["data_offsets"][1] for name, each in header.items() if name[:2] != "__"]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            raise ValueError(
                f"model {folder}: {file.name} is not a safetensors file, or damaged; copy it again"
            ) from None
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        raise ValueError(
            f"model {folder}: {file.name} has {size} bytes and should have {expected}; the copy "
            "was cut short, so copy it again"
        )


def _json(folder: Path, name: str) -> dict[str, Any]:
    try:
        values = json.loads((folder / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ValueError(f"model {folder}: {name} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"model {folder}: {name} is not a JSON object")  # noqa: TRY004
    return values
