"""Texts of a turn for agents that stream: as sampled, and parsed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rollout.gateway.prompt.answer.answer_parser import Delta
from rollout.gateway.prompt.prompt import Prompt
from rollout.gateway.prompt.text_stream import TextStream


class TurnTexts:
    """Increments of the text of one turn, and of its answer's content and reasoning."""

    def __init__(self, prompt: Prompt, stops: Sequence[str]) -> None:
        self._markers = prompt.template.marker_ids
        self._text = TextStream(prompt.template)
        constraint = prompt.constraint
        self._answer = prompt.template.stream(
            prompt.conversation, stops, has_calls=not constraint.no_call
        )
        self._opening = self._answer.open(constraint.opening)
        if constraint.prefill:
            self._opening = Delta()  # the agent has it

    def push(self, token_ids: Sequence[int], *, last: bool = False) -> tuple[str, Delta]:
        """Text that is complete with the next tokens, all of it with `last`; what it parses to."""
        texts = []
        delta, self._opening = self._opening, Delta()
        for is_marker, group in groupby(token_ids, self._markers.__contains__):
            texts.append(self._text.push([*group]))
            delta.add(self._answer.push(texts[-1], is_marker=is_marker))
        if last:
            texts.append(self._text.push([], last=True))
            delta.add(self._answer.push(texts[-1]))
        return "".join(texts), delta
