"""The tokens of a folder's tokenizer and the one that ends text, from its files.

transformers, which takes seconds to import, is asked only where the files do not say it: without
tokenizer.json, or where the class of the tokenizer has a default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from services.lib.model_files.json_file import read_object

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt"),
    *("spiece.model", "sentencepiece.bpe.model", "tekken.json"),
)
"""A folder with a tokenizer has one of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """What a tokenizer can encode."""

    ids: Mapping[str, int]
    """Id of each token by its text, in the tokenizer's alphabet."""
    special: Mapping[int, str]
    """Text of each added token by its id."""
    end_id: int | None
    """Id of the token that ends text; None: it has none."""

    @classmethod
    def of(cls, folder: Path) -> Self:
        """Read a model folder.

        Raises:
            ValueError: it has no tokenizer, or one that cannot be read; names the folder.
        """
        ids, special = _read_json(folder)
        settings = read_object(folder, "tokenizer_config.json")
        legacy = read_object(folder, "special_tokens_map.json")
        end = _content(settings.get("eos_token"))
        is_told = "eos_token" in settings and _content(legacy.get("eos_token")) in (None, end)
        # SGLang's environment lacks transformers; SGLang itself stops at the tokenizer's end.
        if ids and (find_spec("transformers") is None or (is_told and (not end or end in ids))):
            return cls(ids=ids, special=special, end_id=ids.get(end) if end else None)
        return cls._loaded(folder)

    @classmethod
    def _loaded(cls, folder: Path) -> Self:
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # the library raises anything at a damaged file
            reason = " ".join(str(error).split())
            raise ValueError(f"model {folder}: its tokenizer cannot be used: {reason}") from error
        added: Mapping[int, Any] = tokenizer.added_tokens_decoder
        return cls(
            ids=tokenizer.get_vocab(),
            special={number: token.content for number, token in added.items()},
            end_id=tokenizer.eos_token_id,
        )


def number_of_ids(folder: Path) -> int:
    """One more than the greatest id that the folder's tokenizer gives.

    Raises:
        ValueError: it has no tokenizer, or one that cannot be read; names the folder.
    """
    ids, _ = _read_json(folder)
    return max((ids or TokenizerFiles.of(folder).ids).values(), default=-1) + 1


def _read_json(folder: Path) -> tuple[dict[str, int], dict[int, str]]:
    content = read_object(folder, "tokenizer.json")
    try:
        ids, special = _from_json(content)
        if all(isinstance(each, int) for each in (*ids.values(), *special)):
            return ids, special
        reason = "an id is no number"
    except (TypeError, KeyError, IndexError, AttributeError, ValueError) as error:
        reason = repr(error)
    raise ValueError(
        f"model {folder}: tokenizer.json has a vocabulary that cannot be read: {reason}; copy the "
        "file again from the model that it belongs to"
    )


def _from_json(content: Mapping[str, Any]) -> tuple[dict[str, int], dict[int, str]]:
    """Ids of all tokens, and texts of the added ones, in a tokenizer.json."""
    vocabulary: Any = (content.get("model") or {}).get("vocab") or {}
    if isinstance(vocabulary, list):  # Unigram: pairs of a token and its score
        vocabulary = {pair[0]: number for number, pair in enumerate(vocabulary)}
    added = {each["id"]: each["content"] for each in content.get("added_tokens") or ()}
    return {**vocabulary, **{text: number for number, text in added.items()}}, added


def _content(token: Any) -> str | None:
    """Text of a token, which may be described by an object."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None
