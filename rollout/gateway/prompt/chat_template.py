"""From messages to token ids without ever encoding a sampled token again.

The matched prefix keeps its sampled ids, and only the messages after it are rendered and encoded.
Where a template rewrites history (for example, drops old thinking), `is_append_only` is False and
the whole prompt is matched by its ids.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError

from services.chassis.errors import ConfigError

__all__ = ["ChatTemplate"]

Message = Mapping[str, str]

_MAX_KNOWN = 16_384


class ChatTemplate:
    """Tokenizer and chat template of one model folder."""

    def __init__(self, folder: Path) -> None:
        """Load from a Hugging Face folder. Raises `ConfigError` that names the missing file."""
        self._tokenizer = _load_tokenizer(folder)
        parts = [self._tokenizer.chat_template or "", _vocabulary_digest(folder)]
        self.fingerprint = hashlib.sha256("\0".join(parts).encode()).hexdigest()
        """Changes whenever the same messages could give other ids."""
        self.stop_token_ids = _stop_token_ids(folder, self._tokenizer)
        """Ids that end an answer."""
        self.vocabulary_size = len(self._tokenizer)
        """Ids below this are valid."""
        self._special_ids = frozenset(self._tokenizer.all_special_ids)
        # Digests of conversations that are known to be append-only, oldest first.
        self._append_only: dict[str, None] = {}

    @staticmethod
    def keys(messages: Sequence[Message]) -> list[str]:
        """Digest of each message; equal keys mean equal role and text."""
        return [
            hashlib.sha256(json.dumps([m["role"], m["content"]]).encode()).hexdigest()[:32]
            for m in messages
        ]

    def is_append_only(self, messages: Sequence[Message]) -> bool:
        """Whether every answer in `messages` renders as a prefix of the whole.

        Conversations found append-only are remembered, so a later turn checks only its new answers.
        """
        whole = self._render(messages, add_prompt=True)
        answers = [i + 1 for i, message in enumerate(messages) if message["role"] == "assistant"]
        for end in reversed(answers):
            if self._tail(messages, end, whole) is None:
                return False
            if self._name(messages[: end - 1]) in self._append_only:
                break
        if len(self._append_only) >= _MAX_KNOWN:
            del self._append_only[next(iter(self._append_only))]
        self._append_only[self._name(messages)] = None
        return True

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Ids of the whole prompt, including the start of the answer."""
        return self._encode(self._render(messages, add_prompt=True))

    def encode_after(
        self, messages: Sequence[Message], num_matched: int, last_token_id: int
    ) -> list[int]:
        """Ids that follow a prefix which ends with the answer `messages[num_matched - 1]`.

        `last_token_id` is the prefix's last id: a terminator the policy sampled itself is not
        repeated, a missing one is added here, as an environment token.
        """
        tail = self._tail(messages, num_matched, self._render(messages, add_prompt=True))
        if tail is None:
            raise ValueError("the template rewrites history: check is_append_only first")
        ids = self._encode(tail)
        is_sampled = bool(ids) and ids[0] == last_token_id and last_token_id in self._special_ids
        return ids[1:] if is_sampled else ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of sampled ids, without special tokens."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def text(self, token_ids: Sequence[int]) -> str:
        """Text of any ids, special tokens included."""
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def _name(self, messages: Sequence[Message]) -> str:
        return hashlib.sha256("".join(self.keys(messages)).encode()).hexdigest()

    def _tail(self, messages: Sequence[Message], end: int, whole: str) -> str | None:
        """The part of `whole` after the answer `messages[end - 1]`; None: it is not a prefix."""
        before = self._render(messages[: end - 1], add_prompt=True)
        content = messages[end - 1]["content"]
        if not whole.startswith(before + content):
            return None
        return whole[len(before) + len(content) :]

    def _render(self, messages: Sequence[Message], *, add_prompt: bool) -> str:
        if not self._tokenizer.chat_template:
            raise ValueError("the model's tokenizer has no chat template: send token_ids")
        try:
            text: str = self._tokenizer.apply_chat_template(
                [dict(m) for m in messages], tokenize=False, add_generation_prompt=add_prompt
            )
        except TemplateError as error:
            raise ValueError(f"the chat template cannot render them: {error}") from error
        return text

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids


def _load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer  # heavy: only this process needs it

    if not (folder / "config.json").is_file():
        raise ConfigError(f"model {str(folder)!r} has no config.json: name a Hugging Face folder")
    missing = ConfigError(
        f"model {str(folder)!r} has no usable tokenizer: save one with "
        f"tokenizer.save_pretrained({str(folder)!r})"
    )
    if not _vocabulary_files(
        folder
    ):  # transformers would create an empty tokenizer for some models
        raise missing
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise missing from error


def _vocabulary_files(folder: Path) -> list[Path]:
    names = (
        *("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt"),
        *("spiece.model", "sentencepiece.bpe.model", "tekken.json"),
    )
    return [folder / name for name in names if (folder / name).is_file()]


def _vocabulary_digest(folder: Path) -> str:
    files = _vocabulary_files(folder)
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _stop_token_ids(folder: Path, tokenizer: Any) -> frozenset[int]:
    """End-of-sequence ids of the tokenizer and of generation_config.json, as engines use them."""
    ids = {tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set()
    file = folder / "generation_config.json"
    if file.is_file():
        given = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
        ids |= set(given if isinstance(given, list) else [given]) - {None}
    return frozenset(ids)
