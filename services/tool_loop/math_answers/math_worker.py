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

from services.tool_loop.math_answers.equality import are_equal
from services.tool_loop.math_answers.readable import read, read_expected

__all__ = ["main"]

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
        gold = read_expected(text)
        if not gold:
            return {"error": f"{text!r} is no mathematical expression"}
        found = read(answer) if found is None else found
        if are_equal(gold, found):
            return {"right": True}
    return {"right": False}


if __name__ == "__main__":
    main()
