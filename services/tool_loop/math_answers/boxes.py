r"""The boxes of an answer: `\boxed{…}`, with braces in it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Box", "has_open_box", "last_boxes"]

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*(?P<open>\{)?")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_BETWEEN = re.compile(r"[\s$,;]*(?:and|or)?[\s$,;]*")


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a text that is closed."""

    begin: int
    """Of its command."""
    end: int
    """After its brace."""
    content: str
    """Between its braces."""


def has_open_box(text: str) -> bool:
    """Whether the last box of a text is never closed: the answer was cut off."""
    begins = list(_BOX.finditer(text))
    if not begins:
        return False
    last = begins[-1]
    if last["open"]:
        return _closing(text, last.end()) is None
    return last.end() == len(text)  # cut off before its brace


def last_boxes(text: str) -> list[Box]:
    """The last box, and those before it that it is connected with by "," or "and"."""
    connected: list[Box] = []
    for box in reversed(list(_boxes(text))):
        if connected and not _BETWEEN.fullmatch(text[box.end : connected[0].begin]):
            break
        connected.insert(0, box)
    return connected


def _boxes(text: str) -> Iterator[Box]:
    """Those that are in no other."""
    position = 0
    while (begin := _BOX.search(text, position)) is not None:
        end = _closing(text, begin.end()) if begin["open"] else None
        if end is not None:
            yield Box(begin.start(), end, text[begin.end() : end - 1])
        position = end or begin.end()


def _closing(text: str, position: int) -> int | None:
    """The end of the braces that are open at `position`; None: they are never closed."""
    depth = 1
    for brace in _BRACE.finditer(text, position):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return brace.end()
    return None
