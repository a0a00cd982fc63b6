"""Whether the token ids of one model folder mean the same to another; reads no weights."""

from __future__ import annotations

from pathlib import Path

from services.lib.model_files.model_folder import vocabulary_size
from services.lib.model_files.tokenizer_files import TokenizerFiles


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
