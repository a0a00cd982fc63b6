"""Messages rendered to token ids by a tokenizer's chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import BatchEncoding, PreTrainedTokenizerBase


def rendered_ids(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[dict[str, str]],
    *,
    add_generation_prompt: bool = False,
    tools: Sequence[dict[str, Any]] = (),
) -> list[int]:
    """The token ids of `messages`."""
    rendered = tokenizer.apply_chat_template(
        list(messages), tools=[*tools] or None, add_generation_prompt=add_generation_prompt
    )
    assert isinstance(rendered, BatchEncoding)
    ids: list[int] = rendered["input_ids"]
    return ids
