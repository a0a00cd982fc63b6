"""Stop strings: where the text of sampled tokens ends a turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rollout.gateway.prompt.text_stream import CONTEXT_TOKENS, start_of_bytes

if TYPE_CHECKING:
    from rollout.gateway.prompt.chat_template import ChatTemplate

__all__ = ["StopStrings"]


class StopStrings:
    """Finds the first stop string in the text of a turn's sampled tokens."""

    def __init__(
        self, template: ChatTemplate, strings: Sequence[str], sampled_ids: Sequence[int] = ()
    ) -> None:
        """`sampled_ids` are the turn's tokens so far; `num_until_next` gets those that follow."""
        self._template = template
        self._strings = strings
        # A token has at least one byte.
        self._window = max((len(string.encode()) for string in strings), default=0) + CONTEXT_TOKENS
        self._tail = self._last(sampled_ids, len(sampled_ids)) if strings else ()

    def num_until_next(self, new_ids: Sequence[int]) -> int | None:
        """How many of the next sampled tokens it takes to end a stop string; None if none ends.

        Takes as long for the tokens of a long answer as for those of a short one.
        """
        if not self._strings:
            return None
        ids = [*self._tail, *new_ids]
        number = self.num_until_stop(ids, len(self._tail))
        self._tail = self._last(ids, len(ids))
        return number

    def num_until_stop(self, token_ids: Sequence[int], start: int) -> int | None:
        """Tokens from index `start` to the one that completes a stop string; None if none does."""
        if not self._strings:
            return None
        ends_in_bytes = start_of_bytes(self._template, token_ids, len(token_ids)) < len(token_ids)
        if not ends_in_bytes and self.found(self._last(token_ids, start)) is None:
            return None
        for end in range(start + 1, len(token_ids) + 1):
            if self.ends_with_stop(token_ids[:end]):
                return end - start
        return None

    def ends_with_stop(self, token_ids: Sequence[int]) -> bool:
        """Whether the last token completes a stop string."""
        return bool(token_ids) and self.found(self._last(token_ids, len(token_ids))) is not None

    def _last(self, token_ids: Sequence[int], position: int) -> Sequence[int]:
        """The tokens from some before `position` on, as many as may matter."""
        start = max(position - self._window, 0)
        return token_ids[start_of_bytes(self._template, token_ids, start) :]

    def found(self, token_ids: Sequence[int]) -> str | None:
        """The stop string that begins first in the text of `token_ids`; None if there is none."""
        if not self._strings:
            return None
        text = self._template.text(token_ids)
        return min((s for s in self._strings if s in text), key=text.index, default=None)
