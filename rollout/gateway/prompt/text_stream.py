"""Text of sampled tokens as they arrive, in increments for agents that stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollout.gateway.prompt.chat_template import ChatTemplate


CONTEXT_TOKENS = 8
"""Tokens decoded before new ones: a token's text may depend on its neighbours."""
_CUT = "\N{REPLACEMENT CHARACTER}"
"""Decoding gives this for a character whose last bytes are missing."""
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
            decided = start_of_bytes(self._template, self._window, decided)
        whole = self._template.text(self._window[:decided])
        complete = whole if last else whole.rstrip(_CUT)
        new = complete[self._num_sent :]
        self._num_sent = len(complete)
        if complete == whole and decided == len(self._window) > 2 * CONTEXT_TOKENS:
            self._forget(whole)
        return new

    def _forget(self, whole: str) -> None:
        """Shorten the window, but not within a character."""
        for start in range(-CONTEXT_TOKENS, -CONTEXT_TOKENS - _MAX_BYTES, -1):
            text = self._template.text(self._window[start:])
            if whole.endswith(text):
                self._window, self._num_sent = self._window[start:], len(text)
                return


def start_of_bytes(template: ChatTemplate, token_ids: Sequence[int], end: int) -> int:
    """Where the tokens of single bytes begin that end at `end`; `end` if there are none.

    Tokenizers of letters that fall back to bytes decode all of them as one, or none.
    """
    while end > 0 and token_ids[end - 1] in template.byte_ids:
        end -= 1
    return end
