"""Texts of a turn for agents that stream: as sampled, and parsed."""

from __future__ import annotations

from collections.abc import Sequence

from rollout.gateway.prompt.answer.answer_parser import Delta
from rollout.gateway.prompt.prompt import Prompt
from rollout.gateway.prompt.text_stream import TextStream

__all__ = ["TurnTexts"]


class TurnTexts:
    """Increments of the text of one turn, and of its answer's content and reasoning."""

    def __init__(self, prompt: Prompt, stops: Sequence[str]) -> None:
        self._text = TextStream(prompt.template)
        self._answer = prompt.template.stream(prompt.conversation, stops)
        self._opening = self._answer.open(prompt.constraint.opening)

    def push(self, token_ids: Sequence[int], *, last: bool = False) -> tuple[str, Delta]:
        """Text that is complete with the next tokens, all of it with `last`; what it parses to."""
        text = self._text.push(token_ids, last=last)
        delta, self._opening = self._opening, Delta()
        delta.add(self._answer.push(text))
        return text, delta
