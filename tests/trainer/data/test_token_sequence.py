"""Samples to arrays."""

from __future__ import annotations

import numpy as np
import pytest
from seamflow.common.v1 import tokens_pb2

from tests.trainer.support import make_sample, make_samples, pack
from trainer.data.token_sequence import TokenSequence, sequence


def test_a_sequence_ends_with_its_last_trainable_token() -> None:
    """Environment tokens at the end are never computed."""
    sample = make_sample(np.random.default_rng(0), "s", "g")
    tail = 3
    sample.tokens.token_ids.extend([1] * tail)
    sample.tokens.logprobs.extend([0.0] * tail)
    sample.loss_mask.extend([False] * tail)
    total = len(sample.loss_mask)
    sample.tokens.spans.add(
        start=total - tail, num_tokens=tail, origin=tokens_pb2.ORIGIN_ENVIRONMENT
    )
    result = sequence(sample)
    assert len(result.token_ids_T) == len(result.weight_versions_T) == total - tail
    assert result.loss_mask_T[-1]


def test_tokens_of_unknown_version_are_never_trained() -> None:
    """A POLICY span without a version source carries no loss, even where the mask allows it."""
    sample = make_sample(np.random.default_rng(1), "s", "g")
    before = sequence(sample).loss_mask_T.sum()
    span = sample.tokens.spans[1]
    span.version_source = tokens_pb2.VERSION_SOURCE_UNSPECIFIED
    assert sequence(sample).loss_mask_T.sum() == before - span.num_tokens


def test_a_column_of_log_probs_is_cut_with_its_tokens() -> None:
    """It is aligned with the tokens up to the last trainable one; without a column it is 0."""
    sample = make_sample(np.random.default_rng(3), "s", "g")
    tail = [1] * 2
    sample.tokens.token_ids.extend(tail)
    sample.tokens.logprobs.extend([0.0] * len(tail))
    sample.loss_mask.extend([False] * len(tail))
    begin = len(sample.loss_mask) - len(tail)
    sample.tokens.spans.add(start=begin, num_tokens=len(tail), origin=tokens_pb2.ORIGIN_ENVIRONMENT)
    values = np.arange(begin + len(tail), dtype="<f4")
    sample.columns[0].values = values.tobytes()
    np.testing.assert_array_equal(
        sequence(sample, "ref_logprobs").reference_logprobs_T, values[:begin]
    )
    assert not sequence(sample).reference_logprobs_T.any()


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("other", b"", r"has no column 'other' but \['ref_logprobs'\]: add it to the run's"),
        ("ref_logprobs", bytes(4), r"column 'ref_logprobs' has 1 values for \d+ tokens"),
    ],
)
def test_a_column_that_is_not_there_or_not_of_tokens_is_named(
    name: str, values: bytes, message: str
) -> None:
    """With what to do about it."""
    sample = make_sample(np.random.default_rng(3), "s", "g")
    sample.columns[0].values = values
    with pytest.raises(ValueError, match=message):
        sequence(sample, name)


def test_rewards_of_one_name_add_up_over_turns() -> None:
    """A rollout's reward is what its turns and its end were given together."""
    sample = make_sample(np.random.default_rng(2), "s", "g", reward=0.5)
    sample.rewards.add(name="reward", value=0.25, turn_id="t")
    sample.rewards.add(name="success", value=1.0)
    assert sequence(sample).rewards == {"reward": 0.75, "success": 1.0}


@pytest.mark.parametrize("field", ["logprobs", "loss_mask", "spans"])
def test_parallel_fields_of_different_length_are_rejected(field: str) -> None:
    """The message names the sample and the field."""
    sample = make_sample(np.random.default_rng(3), "bad", "g")
    if field == "loss_mask":
        del sample.loss_mask[-1]
    elif field == "logprobs":
        del sample.tokens.logprobs[-1]
    else:
        del sample.tokens.spans[-1]
    with pytest.raises(ValueError, match=f"'bad'.*{field}"):
        sequence(sample)


def test_packed_samples_are_the_same_sequences() -> None:
    """Bytes or repeated fields: every array is equal, of the same type."""
    for sample in make_samples(9):
        one, two = sequence(sample), sequence(pack(sample))
        for field in TokenSequence.__dataclass_fields__:
            np.testing.assert_array_equal(getattr(one, field), getattr(two, field))
            assert np.asarray(getattr(one, field)).dtype == np.asarray(getattr(two, field)).dtype


@pytest.mark.parametrize(
    ("field", "size"),
    [("token_ids", 3), ("token_ids", 4), ("logprobs", 3), ("logprobs", 4), ("loss_mask", 1)],
)
def test_packed_fields_of_different_length_are_rejected(field: str, size: int) -> None:
    """The error of truncated bytes names sample and field."""
    sample = pack(make_sample(np.random.default_rng(3), "bad", "g"))
    if field == "loss_mask":
        sample.packed_loss_mask = sample.packed_loss_mask[:-size]
    else:
        data = getattr(sample.packed_tokens, field)
        setattr(sample.packed_tokens, field, data[:-size])
    with pytest.raises(ValueError, match=f"'bad'.*{field}"):
        sequence(sample)


def test_greedy_samples_are_rejected() -> None:
    """At temperature 0, log-probs are meaningless."""
    sample = make_sample(np.random.default_rng(4), "s", "g", temperature=0.0)
    with pytest.raises(ValueError, match="greedy"):
        sequence(sample)
