"""Sequences of a step to micro-batches of ranks."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import ArrayLike

from services.lib.transformer.packing import Packing
from tests.lib.trainer.support import make_samples
from trainer.data.advantages import SequenceAdvantages
from trainer.data.micro_batch import MicroBatch, plan_micro_batches
from trainer.data.token_sequence import TokenSequence, sequence, trainable_tokens


def of_length(length: int, name: str, group: str = "g") -> TokenSequence:
    """A sequence whose every token but the first is trained; no other begins with that."""
    mask = np.arange(length) > 0
    return TokenSequence(
        sample_id=name,
        rollout_id=name,
        group_id=group,
        token_ids_T=np.r_[int(name), np.arange(1, length)].astype(np.int32)[:length],
        behaviour_logprobs_T=np.zeros(length, np.float32),
        reference_logprobs_T=np.zeros(length, np.float32),
        loss_mask_T=mask,
        weight_versions_T=np.zeros(length, np.int64),
        temperatures_T=np.ones(length, np.float32),
        rewards={"reward": 0.0},
    )


def credited(advantages: ArrayLike) -> SequenceAdvantages:
    """With these advantages."""
    values = np.array(advantages, np.float64)
    return SequenceAdvantages(
        advantages_N=values,
        weights_N=2 * values,
        turn_rewards_N=[()] * len(values),
        bootstrap_N=np.zeros(len(values), bool),
        denominator=1.0,
    )


def tokens_of(batch: MicroBatch, packed: bool) -> int:
    """What counts towards the budget."""
    if not packed:
        return batch.token_ids_BT.size
    return len(Packing.of(batch.token_ids_BT, batch.lengths_B, "cpu").token_ids_U)


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=0, max_size=30),
    ranks=st.integers(1, 4),
    budget=st.integers(1, 120),
    packed=st.booleans(),
    group_size=st.sampled_from([0, 1, 4]),
)
def test_a_plan_holds_every_token_once_and_gives_ranks_equal_counts(
    lengths: list[int], ranks: int, budget: int, packed: bool, group_size: int
) -> None:
    """Whatever the lengths: nothing lost or doubled, budget kept, equal counts, groups whole."""
    sequences = [
        of_length(length, str(n), str(n // (group_size or 4))) for n, length in enumerate(lengths)
    ]
    shares = plan_micro_batches(
        sequences,
        credited(np.arange(1.0, len(lengths) + 1)),
        num_ranks=ranks,
        micro_batch_tokens=budget,
        packed=packed,
        whole_groups=group_size > 0,
    )
    assert len({len(share) for share in shares}) == 1
    found: list[tuple[float, int, int]] = []
    groups: list[int] = []
    for batch in (batch for share in shares for batch in share):
        here = set(batch.groups_B.tolist()) if batch.advantages_B.all() else set()
        groups += here
        alone = len(here) <= 1 if group_size else len(batch.lengths_B) == 1
        assert alone or tokens_of(batch, packed) <= budget
        found += [
            (advantage, int(mask.sum()), length)
            for advantage, mask, length in zip(
                batch.advantages_B, batch.loss_mask_BT, batch.lengths_B, strict=True
            )
            if advantage
        ]
    expected = [(n + 1.0, max(length - 1, 0), length) for n, length in enumerate(lengths) if length]
    assert sorted(found) == expected
    assert sum(count for _, count, _ in found) == trainable_tokens(sequences)
    if group_size:
        assert len(groups) == len(set(groups)), "no group is cut"


@pytest.mark.parametrize(("packed", "share"), [(True, 1.0), (False, 0.85)])
def test_little_of_a_long_tailed_batch_is_padding_and_ranks_are_balanced(
    packed: bool, share: float
) -> None:
    """Lognormal lengths: nothing or 15 % of what is computed, ranks differ by less than 10 %."""
    lengths = np.random.default_rng(5).lognormal(4, 0.7, 128).astype(int) + 2
    sequences = [of_length(int(length), str(n)) for n, length in enumerate(lengths)]
    shares = plan_micro_batches(
        sequences,
        credited(np.ones(128)),
        num_ranks=2,
        micro_batch_tokens=1024,
        packed=packed,
    )
    computed = [sum(tokens_of(batch, packed) for batch in share) for share in shares]
    assert lengths.sum() / sum(computed) >= share
    assert max(computed) / min(computed) < 1.1
    least = -(-sum(computed) // (2 * 1024))
    assert len(shares[0]) <= least + 2, "few passes"


def test_a_long_prompt_is_computed_once_for_as_many_answers_as_fit() -> None:
    """Each row is half the budget, and all sixteen take a few micro-batches."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 1000, 400)
    answers = [rng.integers(0, 1000, 50) for _ in range(16)]
    rows = [np.concatenate([prompt, answer]).astype(np.int32) for answer in answers]
    sequences = [
        dataclasses.replace(of_length(len(ids), str(n)), token_ids_T=ids)
        for n, ids in enumerate(rows)
    ]
    given = credited(np.ones(16))
    (share,) = plan_micro_batches(sequences, given, num_ranks=1, micro_batch_tokens=900)
    assert len(share) <= 3
    assert all(tokens_of(batch, packed=True) <= 900 for batch in share)


def test_answers_that_are_all_alike_are_one_micro_batch_however_long() -> None:
    """Nothing can be gained by cutting them: they are computed once."""
    sequences = [of_length(50, "7") for _ in range(5)]
    (share,) = plan_micro_batches(
        sequences, credited(np.ones(5)), num_ranks=1, micro_batch_tokens=20
    )
    assert sum(len(batch.lengths_B) for batch in share) == 5


@pytest.mark.parametrize("packed", [True, False])
def test_samples_of_the_contract_survive_the_way_into_micro_batches(packed: bool) -> None:
    """Ids, log-probs, versions and masks of a row are those of its sample."""
    sequences = [sequence(sample) for sample in make_samples(6)]
    given = credited(np.arange(12.0))
    (share,) = plan_micro_batches(
        sequences, given, num_ranks=1, micro_batch_tokens=64, packed=packed
    )
    groups: dict[str, set[int]] = {}
    for batch in share:
        for row, index in enumerate(batch.advantages_B.astype(int)):
            item = sequences[index]
            length = len(item.token_ids_T)
            assert batch.lengths_B[row] == length
            np.testing.assert_array_equal(batch.token_ids_BT[row, :length], item.token_ids_T)
            np.testing.assert_array_equal(
                batch.behaviour_logprobs_BT[row, :length], item.behaviour_logprobs_T
            )
            np.testing.assert_array_equal(
                batch.weight_versions_BT[row, :length], item.weight_versions_T
            )
            np.testing.assert_array_equal(batch.temperatures_BT[row, :length], item.temperatures_T)
            assert len(set(item.temperatures_T)) == 2
            assert batch.loss_mask_BT[row].sum() == item.loss_mask_T.sum()
            assert batch.weights_B[row] == 2 * index
            groups.setdefault(item.group_id, set()).add(int(batch.groups_B[row]))
    assert [groups[name] for name in sorted(groups)] == [{0}, {1}, {2}]
