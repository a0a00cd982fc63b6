"""What a chat template writes after an answer, found by rendering a placeholder in its place.

So the answer's own text, which templates trim, move or drop, has no influence.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any

from rollout.gateway.prompt.conversation import Conversation, TemplateMessage

_PLACEHOLDER = f"answer-{uuid.uuid4().hex}"


class AnswerTail:
    """The tail of the answer `messages[end - 1]` of a conversation."""

    def __init__(
        self, render: Callable[..., str], stops: Sequence[str], conversation: Conversation, end: int
    ) -> None:
        """`render` is that of `ChatTemplate`, `stops` are the tokens that end an answer."""
        self._render = render
        self._stops = stops
        self._conversation = conversation
        self._end = end
        self._answer = conversation.messages[end - 1]

    def text(self) -> str | None:
        """Its terminator, later messages and the start of the next answer.

        None: the template does not write later messages after this one.
        """
        if "tool_calls" in self._answer:
            whole = self._rendered(self._with_marked_call(), is_whole=True)
            if _PLACEHOLDER in whole:
                return self._text_after_calls(whole.rpartition(_PLACEHOLDER)[2])
        whole = self._rendered(self._with_marked_content(), is_whole=True)
        return whole.rpartition(_PLACEHOLDER)[2] if _PLACEHOLDER in whole else None

    def has_terminator(self) -> bool:
        """Whether the template ends this answer with a token that ends answers."""
        marked = self._with_marked_call() if "tool_calls" in self._answer else None
        alone = self._rendered(marked or self._with_marked_content())
        return self._stop_position(alone.rpartition(_PLACEHOLDER)[2]) >= 0

    def _text_after_calls(self, whole: str) -> str | None:
        alone = self._rendered(self._with_marked_call()).rpartition(_PLACEHOLDER)[2]
        position = self._stop_position(alone)
        if position < 0:
            plain = {"role": "assistant", "content": _PLACEHOLDER}
            terminator = self._rendered(plain).rpartition(_PLACEHOLDER)[2]
            if not alone.endswith(terminator):
                return None
            position = len(alone) - len(terminator)
        return whole[position:] if whole.startswith(alone[:position]) else None

    def _rendered(self, answer: TemplateMessage, *, is_whole: bool = False) -> str:
        """The conversation with `answer`; up to it, or the whole with the start of the next one."""
        messages = self._conversation.messages
        later = messages[self._end :] if is_whole else ()
        conversation = self._conversation.with_messages(
            [*messages[: self._end - 1], answer, *later]
        )
        return self._render(conversation, add_prompt=is_whole)

    def _with_marked_content(self) -> dict[str, Any]:
        answer = {**self._answer, "content": _PLACEHOLDER}
        answer.pop("reasoning_content", None)
        return answer

    def _with_marked_call(self) -> dict[str, Any]:
        """The answer with the placeholder as the only argument of its last call."""
        *calls, last = self._answer["tool_calls"]
        function = {**last["function"], "arguments": {"value": _PLACEHOLDER}}
        answer = {**self._answer, "tool_calls": [*calls, {**last, "function": function}]}
        answer.pop("reasoning_content", None)
        return answer

    def _stop_position(self, text: str) -> int:
        return max((text.rfind(stop) for stop in self._stops), default=-1)
