"""Where an answer ends that has to: with its JSON value, or with its first tool call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rollout.gateway.prompt.text_stream import TextStream

if TYPE_CHECKING:
    from rollout.gateway.prompt.chat_template import ChatTemplate


class JsonEnd:
    """Finds the end of one object or array in a growing text."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._is_escaped = False

    def feed(self, text: str) -> bool:
        """Whether the value is complete within `text`, which comes next."""
        return any(self._closes(character) for character in text)

    def _closes(self, character: str) -> bool:
        if self._is_escaped:
            self._is_escaped = False
        elif character == '"':
            self._in_string = not self._in_string
        elif self._in_string:
            self._is_escaped = character == "\\"
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            return self._depth == 0
        return False


class AnswerEnd:
    """The end of one answer, looked for in each of its tokens once."""

    def __init__(
        self,
        template: ChatTemplate,
        feed: Callable[[str], bool],
        is_whole: Callable[[Sequence[int]], bool] | None = None,
    ) -> None:
        """`feed` takes the answer's text and tells when it is complete.

        It may tell so one token late: where `is_whole` holds for the tokens before, they are all.
        """
        self._text = TextStream(template)
        self._feed = feed
        self._is_whole = is_whole
        self._seen: list[int] = []

    def num_until_end(self, token_ids: Sequence[int]) -> int | None:
        """Of the tokens that come next, those that belong to the answer; None: it goes on."""
        for index, token_id in enumerate(token_ids):
            is_complete = self._feed(self._text.push([token_id]))
            if is_complete:
                is_late = self._is_whole is not None and self._is_whole(self._seen)
                return index if is_late else index + 1
            self._seen.append(token_id)
        return None
