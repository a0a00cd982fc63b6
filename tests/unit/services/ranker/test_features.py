"""Columns of a prompt: what of it can count."""

from __future__ import annotations

import pytest

from services.ranker.features import NUM_COLUMNS, Columns, TurnStart, columns


def of(ids: list[int], turn_index: int = 0) -> Columns:
    """The columns of a turn."""
    return columns(TurnStart(task_id="task", token_ids=ids, turn_index=turn_index))


def shared(first: Columns, second: Columns) -> int:
    """Columns that both have."""
    return len(set(first.tolist()) & set(second.tolist()))


def test_words_and_pairs_of_words_count_once_each() -> None:
    """Three words, three pairs of them, length and turn; ascending and in bounds."""
    found = of([5, 6, 5, 6, 7])
    assert len(found) == 3 + 3 + 2
    assert (found[1:] > found[:-1]).all()
    assert found[0] >= 0 and found[-1] < NUM_COLUMNS


def test_the_order_of_words_counts() -> None:
    """The same words in another order share their words, their length and turn."""
    assert shared(of([1, 2, 3]), of([3, 2, 1])) == 3 + 2


@pytest.mark.parametrize(
    ("task_id", "name"), [("a@0", "a"), ("a@12", "a"), ("a@b", "a@b"), ("a", "a"), ("@1", "@1")]
)
def test_a_task_is_the_same_in_every_epoch(task_id: str, name: str) -> None:
    """The dataloader puts the epoch behind an @; other names are taken as they are."""
    start = TurnStart(task_id=task_id, token_ids=[], turn_index=3)
    assert start.place == (name, 3)


def test_of_a_long_prompt_the_beginning_and_the_end_are_read() -> None:
    """The middle of a hundred thousand tokens costs no time and adds no feature."""
    long = list(range(100_000))
    assert len(of(long)) < 2 * 1024 + 2
    assert shared(of(long), of([*range(200), *range(99_800, 100_000)])) >= 4 * 199


def test_an_empty_prompt_has_columns() -> None:
    """Its length and its turn."""
    assert len(of([])) == 2
