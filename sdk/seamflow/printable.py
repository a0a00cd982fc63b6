"""Text of others for a terminal: what would control it is shown, not obeyed."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

_KEPT = frozenset("\n\t")
_CONTROLS = ("Cc", "Cf", "Zl", "Zp")
"""Unicode categories: control characters, those that change the direction, line separators."""


def escaped(text: str) -> str:
    """`text` with control characters written as in Python's strings, except line breaks and tabs.

    >>> escaped("a\\x1b[2Jb")
    'a\\\\x1b[2Jb'
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_escaped, text))


@contextmanager
def escaped_output() -> Iterator[None]:
    """Whatever is printed within the context is escaped: agents, tasks and models write texts."""
    out, err = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = cast(TextIO, _Escaping(out)), cast(TextIO, _Escaping(err))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = out, err


class _Escaping:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(escaped(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _escaped(character: str) -> str:
    if character in _KEPT or unicodedata.category(character) not in _CONTROLS:
        return character
    return character.encode("unicode_escape").decode()
