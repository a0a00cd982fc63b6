"""Text that grows: parts that may be the start of a marker wait until they are decided."""

from __future__ import annotations

import re
from collections.abc import Iterable


class Markers:
    """Literal texts that are looked for in a growing text."""

    def __init__(self, literals: Iterable[str]) -> None:
        known = sorted(set(literals) - {""}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, known)) or r"(?!)")
        self._starts = {literal[:n] for literal in known for n in range(1, len(literal))}
        self._longest = max(map(len, known), default=1) - 1

    def search(self, text: str, start: int = 0) -> re.Match[str] | None:
        """The first marker from `start` on, of two that begin together the longer one."""
        return self._pattern.search(text, start)

    def decided(self, text: str) -> int:
        """Characters before the longest end of `text` that more text may complete to a marker."""
        for number in range(min(self._longest, len(text)), 0, -1):
            if text[-number:] in self._starts:
                return len(text) - number
        return len(text)


class FieldText:
    """Text of one field of an answer, which comes in pieces.

    Special tokens are left out, and pieces joined by line breaks. White space next to other parts
    of the answer belongs to its form and is left out; of an `exact` text the rest is as sampled.
    What is returned at once concatenates to the same text however its pieces are cut.
    """

    def __init__(self, special: Markers, lead: str = "", *, exact: bool = False) -> None:
        """`lead` may come before the first piece and is no part of it."""
        self._special = special
        self._lead = lead
        self._exact = exact
        self._waiting = ""  # may be the start of a special token
        self._space = ""  # white space that text has to follow
        self._num_pieces = 0
        self._in_piece = False
        self._follows = not exact

    def follow(self) -> None:
        """Another part of the answer comes before the next piece."""
        self._follows = True

    def add(self, text: str) -> str:
        """What is certain with more text of a piece."""
        self._waiting += text
        return self._visible(self._without_special(is_whole=False))

    def close(self, *, is_last: bool = False) -> str:
        """What is certain with the end of a piece, or of the answer."""
        new = self._visible(self._without_special(is_whole=True))
        if is_last and self._exact and (self._in_piece or not self._follows):
            new += self._space
        self._space, self._in_piece = "", False
        return new

    def _without_special(self, *, is_whole: bool) -> str:
        text, kept, start = self._waiting, [], 0
        decided = len(text) if is_whole else self._special.decided(text)
        while (found := self._special.search(text, start)) and found.start() < decided:
            kept.append(text[start : found.start()])
            start = found.end()
        decided = max(decided, start)
        self._waiting = text[decided:]
        return "".join((*kept, text[start:decided]))

    def _visible(self, text: str) -> str:
        """`text` without what may be white space next to another part, joined to what is before."""
        text = self._space + text
        begun = text if self._in_piece else self._begun(text)
        new = begun.rstrip()
        if not new:
            self._space = text
            return ""
        self._space = begun[len(new) :]
        if self._in_piece:
            return new
        self._in_piece = True
        self._num_pieces += 1
        return "\n" + new if self._num_pieces > 1 else new

    def _begun(self, text: str) -> str:
        """The beginning of a piece: after another part, from its first line with text on."""
        if not self._follows:
            return text.removeprefix(self._lead)
        body = text.lstrip()
        lead = text[: len(text) - len(body)]
        return lead[lead.rfind("\n") + 1 :] + body if self._exact and "\n" in lead else body
