"""A tiny model that has learned nothing, and tasks without content."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from examples.quickstart.prepare import build_model

_TEMPLATE = (
    "{% for tool in tools or [] %}{{ 'tool: ' + tool['function']['name'] + ' ' }}{% endfor %}"
    "{% for message in messages %}{{ message['role'] + ': ' + (message['content'] or '') }}"
    "{{ ' ' + eos_token + ' ' }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
_OTHERS = ("<pad>", "<eos>", "<unk>", "system:", "user:", "assistant:", "tool:")


def make_model(folder: Path, words: Sequence[str], seed: int) -> None:
    """A model folder. All words but `words` and roles are one unknown token to the model."""
    vocabulary = {word: i for i, word in enumerate(dict.fromkeys((*_OTHERS, *words)))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template=_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
    fast.save_pretrained(folder)
    build_model(len(fast), seed).save_pretrained(folder)


def make_tasks(file: Path, number: int) -> None:
    """Tasks with empty payloads, whose names alone differ."""
    lines = [json.dumps({"task_id": f"task-{i}", "payload": {}}) for i in range(number)]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
