"""Text of sampled tokens as they arrive: increments for agents, and stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollout.gateway.prompt.chat_template import ChatTemplate

__all__ = ["StopStrings", "TextStream"]

_CUT = "\N{REPLACEMENT CHARACTER}"
"""Decoding gives this for a character whose last bytes are missing."""
_CONTEXT = 8
"""Tokens decoded before new ones: a token's text may depend on its neighbours."""
_MAX_BYTES = 4
"""Of a character; each may be a token."""


class TextStream:
    """Increments of a growing text; they concatenate to the whole."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._window: list[int] = []
        self._num_sent = 0  # characters of the window's text

    def push(self, token_ids: Sequence[int], *, last: bool = False) -> str:
        """The text that is complete with `token_ids`; a cut character waits for its last bytes.

        With `last` nothing waits.
        """
        self._window.extend(token_ids)
        decided = len(self._window)
        if not last:
            decided = _start_of_bytes(self._template, self._window, decided)
        whole = self._template.text(self._window[:decided])
        complete = whole if last else whole.rstrip(_CUT)
        new = complete[self._num_sent :]
        self._num_sent = len(complete)
        if complete == whole and decided == len(self._window) > 2 * _CONTEXT:
            self._forget(whole)
        return new

    def _forget(self, whole: str) -> None:
        """Shorten the window, but not within a character."""
        for start in range(-_CONTEXT, -_CONTEXT - _MAX_BYTES, -1):
            text = self._template.text(self._window[start:])
            if whole.endswith(text):
                self._window, self._num_sent = self._window[start:], len(text)
                return


class StopStrings:
    """Finds the first stop string in the text of a turn's sampled tokens."""

    def __init__(
        self, template: ChatTemplate, strings: Sequence[str], sampled_ids: Sequence[int] = ()
    ) -> None:
        """`sampled_ids` are the turn's tokens so far; `num_until_next` gets those that follow."""
        self._template = template
        self._strings = strings
        # A token has at least one byte.
        self._window = max((len(string.encode()) for string in strings), default=0) + _CONTEXT
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
        ends_in_bytes = _start_of_bytes(self._template, token_ids, len(token_ids)) < len(token_ids)
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
        return token_ids[_start_of_bytes(self._template, token_ids, start) :]

    def found(self, token_ids: Sequence[int]) -> str | None:
        """The stop string that begins first in the text of `token_ids`; None if there is none."""
        if not self._strings:
            return None
        text = self._template.text(token_ids)
        return min((s for s in self._strings if s in text), key=text.index, default=None)


def _start_of_bytes(template: ChatTemplate, token_ids: Sequence[int], end: int) -> int:
    """Where the tokens of single bytes begin that end at `end`; there are none: `end`.

    Tokenizers of letters that fall back to bytes decode all of them as one, or none.
    """
    while end > 0 and token_ids[end - 1] in template.byte_ids:
        end -= 1
    return end
