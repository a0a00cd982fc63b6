"""Say the word that is asked for: the tasks and their score, for both versions of verifiers."""

from __future__ import annotations

FAILING = 4
"""Index of the task whose score raises."""
TASKS = ("up", "down", "left", "right", "fail")


def score(word: str, answer: str) -> float:
    """1 for an answer with the word, 0.1 for another of several words, else 0.

    Raises:
        RuntimeError: for the word "fail".
    """
    if word == "fail":
        raise RuntimeError("no disk")
    words = answer.split()
    return 1.0 if word in words else 0.1 * (len(words) > 1)
