"""The task of the throughput workloads, for both sides: write down a sum, digit by digit.

    user: 4 5 + 7 =        assistant: 5 2

Nothing is learned, as the learning rate is almost zero: a model with random weights continues until
it happens to sample the end, so that lengths are geometric, with a long tail, and stay so. Digits
pay a little wherever they are, or most groups would have no variance and no gradient.

No dependencies: a peer's environment has none of ours.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

DIGITS = tuple("0123456789")
WORDS = ("user:", "assistant:", *DIGITS, "+", "=")
"""All that the task is written in."""

Payload = Mapping[str, Any]
"""{"terms": [int, int], "max_new_tokens": int}"""


def write_tasks(file: Path, *, count: int, max_new_tokens: int, seed: int) -> Path:
    """Write `count` tasks as JSON lines; those of one seed differ in `max_new_tokens` only."""
    random = Random(seed)
    with file.open("w", encoding="utf-8") as lines:
        for number in range(count):
            terms = [random.randrange(100), random.randrange(100)]
            payload = {"terms": terms, "max_new_tokens": max_new_tokens}
            lines.write(json.dumps({"task_id": f"sum-{number}", "payload": payload}) + "\n")
    return file


def payloads(file: Path) -> list[Payload]:
    """What a file of tasks holds, in its order."""
    lines = file.read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["payload"] for line in lines]


def user_message(payload: Payload) -> str:
    """The user's message: "4 5 + 7 ="."""
    left, right = payload["terms"]
    return f"{' '.join(str(left))} + {' '.join(str(right))} ="


def score(payload: Payload, answer: str) -> tuple[float, bool]:
    """(reward in [0, 1], success): half for the right sum, half for the share of digits."""
    words, expected = answer.split(), list(str(sum(payload["terms"])))
    share = sum(word in DIGITS for word in words) / max(len(words), 1)
    return 0.5 * (words == expected) + 0.5 * share, words == expected
