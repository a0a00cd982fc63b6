"""A model family for tests: a chat template, its tokens, and how its policy writes an answer.

The templates are short ones in the form of each family's.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("t", "h"), ("th", "e")]
_UNKNOWN = "<unk>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What a policy says, before it is written in the form of its family."""

    reasoning: str = ""
    """Reasoning; empty if there is none."""
    content: str = ""
    """Text."""
    calls: Sequence[tuple[str, Mapping[str, Any]]] = ()
    """Name and arguments of each tool call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """One family."""

    name: str
    """Its name."""
    response_format: str
    """Format that must be chosen for its chat template."""
    chat_template: str
    """Jinja, with "↵" for line breaks, which the renderer removes after tags."""
    special: Sequence[str]
    """Special tokens; the first ends an answer."""
    others: Sequence[str] = ()
    """Tokens of their own that are not special."""
    more_stops: Sequence[str] = ()
    """Special tokens that end an answer too."""
    write: Callable[[Said, random.Random], str]
    """An answer as the policy writes it, without its end."""
    ends: Callable[[Said], str] | None = None
    """Token that ends it; None: the first special token."""
    reasons: bool = True
    """Whether answers may have reasoning."""
    max_calls: int = 3
    """Most tool calls of an answer."""
    calls_with_text: bool = True
    """Whether an answer may have text and tool calls."""
    rewrites_history: bool = False
    """Whether the template drops reasoning of earlier answers, or moves the tools."""

    @property
    def markup(self) -> Sequence[str]:
        """All tokens of their own."""
        return (*self.special, *self.others)

    @property
    def terminators(self) -> tuple[str, ...]:
        """Tokens with which policy or template end an answer."""
        ends = (self.special[0], *self.more_stops, "<|end|>")
        return tuple(token for token in ends if token in self.special)

    def end_of(self, said: Said) -> str:
        """Token that ends this answer."""
        return self.ends(said) if self.ends is not None else self.special[0]

    def make_model(self, folder: Path, *, falls_back: bool = False) -> Path:
        """A folder with a tokenizer of bytes, or with `falls_back` of letters, else bytes."""
        tokenizer = Tokenizer(_letters_or_bytes() if falls_back else _bytes())
        if falls_back:
            tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
        else:
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([AddedToken(t, special=True) for t in self.special])
        tokenizer.add_tokens([AddedToken(t, normalized=False) for t in self.others])
        fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
            tokenizer_object=tokenizer, eos_token=self.special[0]
        )
        fast.chat_template = self.chat_template.replace("↵", "{{ '\\n' }}")
        fast.save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
        stops = [tokenizer.token_to_id(t) for t in (self.special[0], *self.more_stops)]
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
        return folder


def json_text(value: Any, rng: random.Random) -> str:
    """JSON in any of the ways that policies and clients write it."""
    if isinstance(value, dict):
        value = dict(rng.sample(sorted(value.items()), len(value)))
    separators = rng.choice([(", ", ": "), (",", ":"), (" , ", " : ")])
    indent = rng.choice([None, None, 2])
    return json.dumps(value, separators=separators, ensure_ascii=rng.random() < 0.5, indent=indent)


def _bytes() -> models.BPE:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, *(first + second for first, second in _MERGES)]
    return models.BPE({word: i for i, word in enumerate(words)}, _MERGES)


def _letters_or_bytes() -> models.BPE:
    letters = [chr(i) for i in range(32, 127)] + ["\n"]
    words = [_UNKNOWN, *(f"<0x{i:02X}>" for i in range(256)), *letters]
    words += [first + second for first, second in _MERGES]
    known = {word: i for i, word in enumerate(words)}
    return models.BPE(known, _MERGES, unk_token=_UNKNOWN, byte_fallback=True, fuse_unk=False)
