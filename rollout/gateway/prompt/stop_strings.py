"""Stop strings: where the text of sampled tokens ends a turn.

They are looked for in the bytes of the tokens, one token after the other, so that it does not
matter how an answer is cut into chunks, or a character into tokens. Special tokens are no text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Protocol


class Tokens(Protocol):
    """What `ChatTemplate` knows of tokens: their bytes, those that are no text, and their text."""

    @property
    def token_bytes(self) -> Callable[[int], bytes]: ...

    @property
    def marker_ids(self) -> Set[int]: ...

    def text(self, token_ids: Sequence[int]) -> str: ...


class StopStrings:
    """Finds the first stop string in the text of a turn's sampled tokens."""

    def __init__(
        self, template: Tokens, strings: Sequence[str], sampled_ids: Sequence[int] = ()
    ) -> None:
        """`sampled_ids` are the turn's tokens so far; `num_until_next` gets those that follow."""
        self._template = template
        self._strings = {string.encode(): string for string in strings}
        self._num_kept = max(map(len, self._strings), default=1) - 1
        self._tail = b""  # the last bytes of text that a stop string may begin in
        for token_id in sampled_ids if strings else ():
            self._tail = self._text_with(self._tail, token_id)

    def num_until_next(self, new_ids: Sequence[int]) -> int | None:
        """How many of the next sampled tokens it takes to end a stop string; None if none ends.

        Takes as long for the tokens of a long answer as for those of a short one.
        """
        for number, token_id in enumerate(new_ids if self._strings else (), 1):
            self._tail = self._text_with(self._tail, token_id)
            if self._begins(self._tail):
                return number
        return None

    def num_until_stop(self, token_ids: Sequence[int], start: int) -> int | None:
        """Tokens from index `start` to the one that completes a stop string; None if none does."""
        known = StopStrings(self._template, [*self._strings.values()], token_ids[:start])
        return known.num_until_next(token_ids[start:])

    def ends_with_stop(self, token_ids: Sequence[int]) -> bool:
        """Whether the last token completes the first stop string."""
        return bool(token_ids) and self.num_until_stop(token_ids, 0) == len(token_ids)

    def found(self, token_ids: Sequence[int]) -> str | None:
        """The stop string that ends the text of `token_ids`; None if there is none.

        Of those that one token completes it is the one that begins first.
        """
        _, tail = self._first(token_ids)
        begins = self._begins(tail)
        return self._strings[begins[0][1]] if begins else None

    def text_before(self, token_ids: Sequence[int]) -> str:
        """Text of the tokens, special ones included, up to where the first stop string begins."""
        number, tail = self._first(token_ids)
        if not (begins := self._begins(tail)):
            return self._template.text(token_ids)
        left = len(tail) - begins[0][0]  # bytes from there on, of the tokens before `number`
        while left >= len(piece := self._template.token_bytes(token_ids[number - 1])) and left:
            left, number = left - len(piece), number - 1
        text = self._template.text(token_ids[:number])
        return text[: len(text) - len(piece[-left:].decode(errors="replace"))] if left else text

    def _first(self, token_ids: Sequence[int]) -> tuple[int, bytes]:
        """Tokens up to the one that completes a stop string, and the last bytes of their text."""
        tail = b""
        for number, token_id in enumerate(token_ids if self._strings else (), 1):
            tail = self._text_with(tail, token_id)
            if self._begins(tail):
                return number, tail
        return len(token_ids), b""

    def _text_with(self, tail: bytes, token_id: int) -> bytes:
        if token_id in self._template.marker_ids:
            return b""
        return tail[max(len(tail) - self._num_kept, 0) :] + self._template.token_bytes(token_id)

    def _begins(self, tail: bytes) -> list[tuple[int, bytes]]:
        """Where stop strings begin in `tail`, the first one first."""
        return sorted((tail.index(each), each) for each in self._strings if each in tail)
