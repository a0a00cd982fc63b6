"""A policy that says random things, in tokens that no tokenizer would make of them."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from typing import Any

from rollout.gateway.prompt.chat_template import ChatTemplate
from tests.suites.roundtrips.model_family import ModelFamily, Said

MARK = re.compile(r"#(\d+)#")
"""Every message has a number of its own in its text."""
_PLAIN = ["hello", "the", "then", "shell", "llama", "1.5"]
_WORDS = [*_PLAIN, "{x}", "<b>", "naïve", "数学", "🙂🙃", "é", "\n"]
TOOLS = {
    "search": {"query": "string", "limit": "integer", "ratio": "number", "exact": "boolean"},
    "edit.file": {"path": "string", "lines": "array", "options": "object"},
    "now": {},
}
"""Parameters of each tool, and their types."""


class Marks:
    """Numbers that tell texts apart."""

    def __init__(self) -> None:
        self._number = 0

    def text(self, rng: random.Random) -> str:
        """A random text with a mark of its own."""
        self._number += 1
        words = rng.choices(_WORDS, k=rng.randint(0, 5))
        return " ".join((*words[:2], f"#{self._number}#", *words[2:])).strip()


def random_said(family: ModelFamily, rng: random.Random, marks: Marks) -> Said:
    """Text, reasoning or tool calls, as the family may say them."""
    number = rng.choice([0, 0, 1, 1, 2, 3])
    calls = [_call(rng, marks) for _ in range(min(number, family.max_calls))]
    has_text = not calls or (family.calls_with_text and rng.random() < 0.5)
    return Said(
        reasoning=marks.text(rng) if family.reasons and rng.random() < 0.6 else "",
        content=marks.text(rng) if has_text else "",
        calls=calls,
    )


def written(family: ModelFamily, said: Said, rng: random.Random) -> tuple[str, bool]:
    """How a policy writes it, and whether it ends: some are cut, some calls are malformed."""
    text = family.write(said, rng)
    chance = rng.random()
    if chance < 0.1:
        return text[: rng.randint(0, len(text))], False
    if chance < 0.2 and said.calls:
        position = rng.choice([i for i, c in enumerate(text) if c in '{}"<>/'])
        text = text[:position] + text[position + 1 :]
    return text + family.end_of(said), True


def sampled_ids(
    template: ChatTemplate, family: ModelFamily, text: str, rng: random.Random
) -> list[int]:
    """Ids of a text, cut at random places that a tokenizer would not cut at."""
    ids: list[int] = []
    for piece in re.split(f"({'|'.join(map(re.escape, family.markup))})", text):
        if piece in family.markup:
            ids += template.encode_text(piece)
            continue
        while piece:
            number = rng.randint(1, 12)
            ids += template.encode_text(piece[:number])
            piece = piece[number:]
    return ids


def _call(rng: random.Random, marks: Marks) -> tuple[str, Mapping[str, Any]]:
    name = rng.choice(sorted(TOOLS))
    values: dict[str, Callable[[], Any]] = {
        "string": lambda: marks.text(rng),
        "integer": lambda: rng.randint(-9, 9),
        "number": lambda: rng.choice([1.0, 2.5, -0.0, 1e22]),
        "boolean": lambda: rng.random() < 0.5,
        "array": lambda: [1, 2.0, marks.text(rng)],
        "object": lambda: {"b": None, "a": {"text": marks.text(rng)}},
    }
    given = {key: values[kind]() for key, kind in TOOLS[name].items() if rng.random() < 0.8}
    return name, given
