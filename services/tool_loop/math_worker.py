"""Child process that compares answers as mathematics: JSON lines in, JSON lines out.

{"expected": ["1/2"], "answer": "\\boxed{0.5}"} -> {"right": true}, or {"error": "…"}

math-verify limits its time by signals, which work in the main thread of a process only.
"""

from __future__ import annotations

import json
import logging
import resource
import sys
from collections.abc import Sequence
from typing import Any

from math_verify import parse, verify  # type: ignore[import-untyped]

__all__ = ["main"]

_SECONDS = 5
_MAX_BYTES = 4 << 30


def main() -> None:
    """Answer until standard input ends."""
    logging.disable(logging.CRITICAL)  # parts of answers, which are not logged
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
    for line in sys.stdin:
        given = json.loads(line)
        answer = json.dumps(_compared(given["expected"], given["answer"]))
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()


def _compared(expected: Sequence[str], answer: str) -> dict[str, Any]:
    found = None
    for text in expected:
        gold = _gold(text)
        if not gold:
            return {"error": f"{text!r} is no mathematical expression"}
        found = parse(answer, parsing_timeout=_SECONDS) if found is None else found
        if verify(gold, found, timeout_seconds=_SECONDS):
            return {"right": True}
    return {"right": False}


def _gold(text: str) -> list[Any]:
    """The expected answer: LaTeX, with or without its dollar signs, or a text around it."""
    marked = any(mark in text for mark in ("$", r"\boxed", r"\(", r"\["))
    found: list[Any] = [] if marked else parse(f"${text}$", parsing_timeout=_SECONDS)
    return found or parse(text, parsing_timeout=_SECONDS)


if __name__ == "__main__":
    main()
