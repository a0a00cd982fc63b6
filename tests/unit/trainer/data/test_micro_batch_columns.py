"""Micro-batches on their way to the ranks: the same when they arrive, and few bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.commands import from_columns, to_columns
from trainer.data.micro_batch import MicroBatch, weightless

MANY = 4_000
"""Tokens of a row, beside which what is sent once does not count."""
SAME = {"reference_logprobs_BT": 0.0, "temperatures_BT": 1.0, "turn_rewards_BT": 0.0}
"""What is the same for all tokens without a reference, and with one temperature."""


def make(lengths: list[int], constant: Mapping[str, float], seed: int = 0) -> MicroBatch:
    """Rows of random values but for some fields, padded as the trainer does."""
    rng = np.random.default_rng(seed)
    lengths_b = np.array(lengths)
    real_bt = np.arange(lengths_b.max()) < lengths_b[:, None]
    found: dict[str, Any] = {}
    for entry in fields(MicroBatch):
        like = getattr(weightless(), entry.name)
        if like is None:  # routed experts, of some batches
            continue
        shape = real_bt.shape if like.ndim == 2 else lengths_b.shape
        values = rng.normal(size=shape) if like.dtype.kind == "f" else rng.integers(0, 2, shape)
        found[entry.name] = values.astype(like.dtype)
        if entry.name in constant:
            found[entry.name][:] = constant[entry.name]
        if like.ndim == 2:
            found[entry.name][~real_bt] = 1 if entry.name == "temperatures_BT" else 0
    found["lengths_B"] = lengths_b
    if seed % 2:
        experts = rng.integers(0, 9, (*real_bt.shape, 3, 2)).astype(np.uint8)
        experts[~real_bt] = 255
        found["routed_experts_BTLK"] = experts
    return MicroBatch(**found)


def check_equal(ones: tuple[MicroBatch, ...], others: tuple[MicroBatch, ...]) -> None:
    """Values bit for bit, types and shapes."""
    for one, other in zip(ones, others, strict=True):
        for entry in fields(MicroBatch):
            mine, theirs = getattr(one, entry.name), getattr(other, entry.name)
            assert (mine is None) == (theirs is None), entry.name
            if mine is None:
                continue
            assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape), entry.name
            assert mine.tobytes() == theirs.tobytes(), entry.name


def num_bytes(batch: MicroBatch) -> int:
    """Of its columns."""
    return sum(column.nbytes for column in to_columns([batch]).values())


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), max_size=4),
    constant=st.sampled_from([{}, {"temperatures_BT": 0.7}, {"reference_logprobs_BT": -0.0}]),
)
def test_micro_batches_arrive_as_they_were(
    sizes: list[list[int]], constant: dict[str, float]
) -> None:
    """Rows of any lengths, none at all, one of no weight between others."""
    batches = tuple(make(lengths, constant, n) for n, lengths in enumerate(sizes))
    check_equal(from_columns(to_columns(batches)), batches)
    mixed = (*batches[:1], weightless(), *batches[1:])
    check_equal(from_columns(to_columns(mixed)), mixed)


@pytest.mark.parametrize("version", [0, 255, 256, 70_000, 2**40, -1])
def test_versions_of_any_size_arrive(version: int) -> None:
    """Whatever type they are sent in."""
    batch = make([3, 2], {})
    batch.weight_versions_BT[0, 0] = version
    check_equal(from_columns(to_columns([batch])), (batch,))


def test_zeros_of_either_sign_are_not_one_value() -> None:
    """Nor is one that is not a number left out."""
    batch = make([4], {})
    batch.reference_logprobs_BT[:] = [[0.0, -0.0, 0.0, 0.0]]
    batch.turn_rewards_BT[:] = np.nan
    check_equal(from_columns(to_columns([batch])), (batch,))


def test_a_token_takes_few_bytes() -> None:
    """Its id, log-prob, mask and version; of two rows the padding is not sent."""
    batch = make([MANY, 10], SAME)
    assert num_bytes(batch) / (MANY + 10) < 4 + 4 + 1 + 1 + 0.1


@pytest.mark.parametrize("name", SAME)
def test_a_field_that_differs_between_tokens_is_sent(name: str) -> None:
    """Negative control: one token more takes its four bytes for all."""
    batch = make([MANY], SAME)
    values = getattr(batch, name).copy()
    values[0, 7] += 0.5
    other = replace(batch, **{name: values})
    assert num_bytes(other) - num_bytes(batch) == 4 * (MANY - 1)
    check_equal(from_columns(to_columns([other])), (other,))
