"""Checks a Hugging Face model folder before anything is started with it; reads no weights."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.lib.model_files.json_file import check_json_files, read_object, read_text_config
from services.lib.model_files.quantization import check_not_quantized
from services.lib.model_files.tokenizer_files import TOKENIZER_FILES, TokenizerFiles, number_of_ids
from services.lib.model_files.weight_headers import (
    Header,
    read_headers,
    same_content,
)

_OF_LAYER = re.compile(r"\.[0-9]+\.")
_CAUSAL = ("ForCausalLM", "LMHeadModel")
_VOCABULARY_ROWS = (
    *("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight"),
    *("lm_head.weight", "embed_out.weight"),
)
"""Ends of names of tensors that have a row for each token id."""


def check_model_folder(folder: Path) -> None:
    """Check that the folder holds a whole causal language model with its tokenizer.

    Raises:
        ValueError: one line that names the folder, what is wrong and the cure.
    """
    if not folder.is_dir():
        raise ValueError(f"model {folder}: no such folder; give a local Hugging Face model folder")
    check_json_files(folder)
    config = _config(folder)
    _check_kind(folder, config)
    headers = read_headers(folder)
    check_not_quantized(folder, config, headers)
    _check_tokenizer(folder)
    check_vocabulary(folder, headers)
    _check_tied(folder, headers)


def check_classifier(folder: Path) -> None:
    """Check that the folder holds a whole reward model with its tokenizer.

    Raises:
        ValueError: one line that names the folder, what is wrong and the cure.
    """
    if not folder.is_dir():
        raise ValueError(f"model {folder}: no such folder; give a local Hugging Face model folder")
    check_json_files(folder)
    names = _config(folder).get("architectures") or []
    if names and not any(name.endswith("ForSequenceClassification") for name in names):
        raise ValueError(
            f"model {folder}: is {', '.join(names)}, not a reward model; use one whose "
            "architecture ends in ForSequenceClassification"
        )
    check_not_quantized(folder, _config(folder), read_headers(folder))
    _check_tokenizer(folder)


def _check_tokenizer(folder: Path) -> None:
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ValueError(
            f"model {folder}: has no tokenizer ({', '.join(TOKENIZER_FILES)}); save it there with "
            "tokenizer.save_pretrained()"
        )


def _check_tied(folder: Path, headers: Mapping[str, Header]) -> None:
    """Check that the file's rows of ids are equal where the configuration says that they are one.

    Loaders differ in which of two they then take: transformers keeps both.
    """
    size = vocabulary_size(folder)
    rows = sorted(
        name
        for name, each in headers.items()
        if each.shape[:1] == (size,) and each.shape[1:] and not _OF_LAYER.search(name)
    )
    differing = [
        (one, other)
        for one, other in itertools.pairwise(rows)
        if headers[one].shape == headers[other].shape
        and not same_content(headers[one], headers[other])
    ]
    if differing and _is_tied(folder):
        one, other = differing[0]
        raise ValueError(
            f"model {folder}: config.json has tie_word_embeddings true, and its weights have "
            f"{one} and a {other} that differs; set tie_word_embeddings to false if both belong "
            "to the model, or save it again without the one that does not"
        )


def _is_tied(folder: Path) -> bool:
    """As config.json says; transformers, which takes seconds to import, where it does not."""
    config = _config(folder)
    says = None if config.get("text_config") else config.get("tie_word_embeddings")
    if isinstance(says, bool):
        return says
    return bool(getattr(read_text_config(folder), "tie_word_embeddings", False))


def check_vocabulary(folder: Path, headers: Mapping[str, Header]) -> None:
    """Check that there is a row of the embedding for each id of the tokenizer.

    An embedding of more rows is usual: it is padded.

    Raises:
        ValueError: one line that names the folder, both sizes and the cure.
    """
    size = vocabulary_size(folder)
    rows = {
        name: each.shape[0]
        for name, each in headers.items()
        if name.endswith(_VOCABULARY_ROWS) and len(each.shape) == 2
    }
    for name, num_rows in rows.items():
        if size is not None and num_rows != size:
            raise ValueError(
                f"model {folder}: config.json has vocab_size {size}, {name} has {num_rows} rows; "
                "copy configuration and weights of the same model"
            )
    fewest = min(rows.values(), default=size)
    if fewest is not None and (num_ids := number_of_ids(folder)) > fewest:
        raise ValueError(
            f"model {folder}: its tokenizer has ids up to {num_ids - 1}, {num_ids} tokens, and its "
            f"embedding has {fewest} rows; call model.resize_token_embeddings({num_ids}) and "
            "save the model, or use the tokenizer that belongs to it"
        )


def vocabulary_size(folder: Path) -> int | None:
    """Rows of the embedding by config.json; None if it does not say.

    Raises:
        ValueError: there is no config.json, or it cannot be read.
    """
    config = _config(folder)
    text = config.get("text_config") or config
    size = text.get("vocab_size", config.get("vocab_size"))
    return size if isinstance(size, int) else None


def check_chat_template(folder: Path) -> None:
    """Check that messages can be rendered.

    Raises:
        ValueError: names the folder and the cure.
    """
    settings = read_object(folder, "tokenizer_config.json")
    file = folder / "chat_template.jinja"
    try:
        has_file = (folder / "chat_template.json").is_file() or (
            file.is_file() and bool(file.read_text(encoding="utf-8"))
        )
    except (OSError, ValueError) as error:
        raise ValueError(f"model {folder}: {file.name} cannot be read: {error}") from error
    if not settings.get("chat_template") and not has_file:
        raise ValueError(
            f"model {folder}: has no chat template, so no message can be rendered; write one to "
            "chat_template.jinja in that folder, or start from an instruct model"
        )


def _config(folder: Path) -> dict[str, Any]:
    if (folder / "config.json").is_file():
        return read_object(folder, "config.json")
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


def check_same_tokens(policy: Path, other: Path, setting: str) -> None:
    """Check that a model can read what the policy sampled, by its token ids.

    Args:
        policy: folder of the policy's model.
        other: of the model that gets its token ids.
        setting: that names `other`.

    Raises:
        ValueError: one line that names both folders, what differs and the cure.
    """
    if policy == other:
        return
    sizes = vocabulary_size(policy), vocabulary_size(other)
    problem = other_token(policy, other)
    if not problem and None not in sizes and sizes[1] < sizes[0]:  # type: ignore[operator]
        problem = f"has a vocabulary of {sizes[1]} ids, and the policy one of {sizes[0]}"
    if problem:
        raise ValueError(
            f"{setting} {other} {problem}: it gets the token ids that the policy {policy} "
            "sampled, so give a model with the policy's tokenizer and vocabulary"
        )


def other_token(policy: Path, other: Path) -> str:
    """A token of the policy's that the other tokenizer does not have as this id; empty: none."""
    ids, others = TokenizerFiles.of(policy).ids, TokenizerFiles.of(other).ids
    for text, number in ids.items():
        if others.get(text) != number:
            found = "no such token" if text not in others else f"id {others[text]}"
            return f"has another tokenizer: {text!r} is id {number} of the policy, and {found} here"
    return ""
