"""GSM8K as tasks: grade-school sums in words, whose answer is a number (arXiv 2110.14168)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["heldout", "number_of", "tasks"]


def tasks(seed: int, epoch: int) -> Iterator[dict[str, Any]]:
    """The training part; the dataloader shuffles it."""
    return _rows("train")


def heldout(seed: int, epoch: int) -> Iterator[dict[str, Any]]:
    """The test part."""
    return _rows("test")


def number_of(solution: str) -> str:
    """The number after the last "####" of a written solution, without its commas."""
    return solution.rpartition("####")[2].strip().replace(",", "")


def _rows(split: str) -> Iterator[dict[str, Any]]:
    from datasets import load_dataset

    for row in load_dataset("openai/gsm8k", "main", split=split):
        yield {"question": row["question"], "answer": number_of(row["answer"])}
