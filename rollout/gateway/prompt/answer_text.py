"""Text that grows: parts that may be the start of a marker wait until they are decided."""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["FieldText", "Markers"]


class Markers:
    """Literal texts that are looked for in a growing text."""

    def __init__(self, literals: Iterable[str]) -> None:
        known = sorted(set(literals) - {""}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, known)) or r"(?!)")
        self._starts = {literal[:n] for literal in known for n in range(1, len(literal))}
        self._longest = max(map(len, known), default=1) - 1

    def search(self, text: str) -> re.Match[str] | None:
        """The first marker in `text`, of two that begin together the longer one."""
        return self._pattern.search(text)

    def decided(self, text: str) -> int:
        """Characters before the longest end of `text` that more text may complete to a marker."""
        for number in range(min(self._longest, len(text)), 0, -1):
            if text[-number:] in self._starts:
                return len(text) - number
        return len(text)


class FieldText:
    """Text of one field of an answer, which comes in pieces.

    Special tokens are left out, pieces are stripped and joined by line breaks. What is returned at
    once concatenates to the same text however its pieces are cut.
    """

    def __init__(self, special: Markers) -> None:
        self._special = special
        self._waiting = ""  # may be the start of a special token
        self._space = ""  # white space that text has to follow
        self._num_pieces = 0
        self._in_piece = False

    def add(self, text: str) -> str:
        """What is certain with more text of a piece."""
        self._waiting += text
        return self._visible(self._without_special(is_whole=False))

    def close(self) -> str:
        """What is certain with the end of a piece."""
        new = self._visible(self._without_special(is_whole=True))
        self._space, self._in_piece = "", False
        return new

    def _without_special(self, *, is_whole: bool) -> str:
        kept = []
        while True:
            text, found = self._waiting, self._special.search(self._waiting)
            decided = len(text) if is_whole else self._special.decided(text)
            if found is None or found.start() >= decided:
                break
            kept.append(text[: found.start()])
            self._waiting = text[found.end() :]
        self._waiting = text[decided:]
        return "".join((*kept, text[:decided]))

    def _visible(self, text: str) -> str:
        """`text` without white space at the piece's ends, and joined to the piece before."""
        text = self._space + text if self._in_piece else text.lstrip()
        new = text.rstrip()
        self._space = text[len(new) :]
        if not new or self._in_piece:
            return new
        self._in_piece = True
        self._num_pieces += 1
        return "\n" + new if self._num_pieces > 1 else new
