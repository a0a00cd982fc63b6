"""A tiny model folder with a byte-level tokenizer, for gateways without a real model."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END = "<|end|>"
APPENDING = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
_MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o")]


def make_byte_model(folder: Path, chat_template: str = APPENDING) -> Path:
    """A model folder whose tokenizer works on bytes and merges "he", "ll", "hell" and "hello"."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, *(first + second for first, second in _MERGES)]
    bpe = models.BPE({word: i for i, word in enumerate(words)}, _MERGES)
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)  # type: ignore[no-untyped-call]
    fast.chat_template = chat_template
    fast.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder
