"""The text of sampled tokens: its bytes, its increments, and the stop strings that end it.

Stop strings are looked for in the bytes of the tokens, one token after the other, so that it does
not matter how an answer is cut into chunks, or a character into tokens. Special tokens are no text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    pass


class Tokens(Protocol):
    """What `ChatTemplate` knows of tokens."""

    @property
    def token_bytes(self) -> Callable[[int], bytes]: ...

    @property
    def marker_ids(self) -> Set[int]: ...

    @property
    def byte_ids(self) -> Set[int]: ...

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


CONTEXT_TOKENS = 8
"""Tokens decoded before new ones: a token's text may depend on its neighbours."""
_CUT = "\N{REPLACEMENT CHARACTER}"
"""Decoding gives this for a character whose last bytes are missing."""
_MAX_BYTES = 4
"""Of a character; each may be a token."""


class TextStream:
    """Increments of a growing text; they concatenate to the whole."""

    def __init__(self, template: Tokens) -> None:
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


def start_of_bytes(template: Tokens, token_ids: Sequence[int], end: int) -> int:
    """Where the tokens of single bytes begin that end at `end`; `end` if there are none.

    Tokenizers of letters that fall back to bytes decode all of them as one, or none.
    """
    while end > 0 and token_ids[end - 1] in template.byte_ids:
        end -= 1
    return end


_ONE_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""Stands for a space in the vocabularies of SentencePiece."""


class TokenTexts:
    def __init__(self, tokenizer: Any, added: Mapping[int, str]) -> None:
        """`added` are the texts, by id, of tokens that are not in the vocabulary's letters."""
        self._tokenizer = tokenizer
        self._known = {token_id: text.encode() for token_id, text in added.items()}
        decoder = json.dumps(json.loads(tokenizer.backend_tokenizer.to_str())["decoder"])
        self._byte_of = _bytes_by_letter() if '"ByteLevel"' in decoder else {}

    def bytes_of(self, token_id: int) -> bytes:
        """UTF-8, of which the token may have a part; empty for an id without a token."""
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._decoded(token_id)
        return found

    def _decoded(self, token_id: int) -> bytes:
        piece: str | None = self._tokenizer.convert_ids_to_tokens(token_id)
        if piece is None:
            return b""
        if self._byte_of and all(letter in self._byte_of for letter in piece):
            return bytes(self._byte_of[letter] for letter in piece)
        if byte := _ONE_BYTE.fullmatch(piece):
            return bytes([int(byte[1], 16)])
        return piece.replace(_SPACE, " ").encode()


def _bytes_by_letter() -> dict[str, int]:
    """The alphabet of byte-level tokenizers (GPT-2): printable bytes are themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    shifted = {chr(0x100 + place): byte for place, byte in enumerate(others)}
    return {**{chr(byte): byte for byte in printable}, **shifted}
