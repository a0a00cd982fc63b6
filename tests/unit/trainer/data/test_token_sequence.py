"""Samples to arrays."""

from __future__ import annotations

import numpy as np
import pytest
from seamflow.common.v1 import tokens_pb2
from seamflow.trajectory.v1 import trajectory_pb2

from services.chassis.errors import ConfigError
from tests.lib.trainer.support import make_sample
from trainer.data.token_sequence import sequence


def observe(sample: trajectory_pb2.Sample, number: int) -> None:
    """Append environment tokens to the last turn."""
    start = len(sample.loss_mask)
    sample.tokens.token_ids += np.ones(number, "<i4").tobytes()
    sample.tokens.logprobs += bytes(4 * number)
    sample.loss_mask += bytes(number)
    sample.tokens.spans.add(start=start, num_tokens=number, origin=tokens_pb2.ORIGIN_ENVIRONMENT)
    sample.turns[-1].num_tokens += number


def test_a_sequence_ends_with_its_last_trainable_token() -> None:
    """Environment tokens at the end are never computed."""
    sample = make_sample(np.random.default_rng(0), "s", "g")
    tail = 3
    observe(sample, tail)
    total = len(sample.loss_mask)
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
    begin = len(sample.loss_mask)
    observe(sample, 2)
    values = np.arange(begin + 2, dtype="<f4")
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
    with pytest.raises((ValueError, ConfigError), match=message):
        sequence(sample, name)


def test_rewards_of_one_name_add_up_over_turns() -> None:
    """A sample's reward is what its rollout and its turns were given; turns keep theirs."""
    sample = make_sample(np.random.default_rng(2), "s", "g", reward=0.5)
    sample.turns[0].rewards.add(name="reward", value=0.25, turn_id="t1")
    sample.turns[1].rewards.add(name="other", value=3.0, turn_id="t2")
    sample.rewards.add(name="success", value=1.0)
    found = sequence(sample)
    assert found.rewards == {"reward": 0.75, "success": 1.0, "other": 3.0}
    first, both = sample.turns[0].num_tokens, len(sample.loss_mask)
    assert found.turn_rewards == (("reward", 0.25, first, "t1"), ("other", 3.0, both, "t2"))


def test_each_token_has_the_temperature_of_its_turn() -> None:
    """Not that of the last turn; a turn without one was sampled at 1."""
    sample = make_sample(np.random.default_rng(2), "s", "g", temperature=0.4)
    sample.turns[1].sampling.ClearField("temperature")
    first, second = (turn.num_tokens for turn in sample.turns)
    expected = np.array([0.4] * first + [1.0] * second, np.float32)
    np.testing.assert_array_equal(sequence(sample).temperatures_T, expected)


@pytest.mark.parametrize("field", ["spans", "turns"])
def test_parts_that_do_not_cover_the_tokens_are_rejected(field: str) -> None:
    """The message names the sample and the field."""
    sample = make_sample(np.random.default_rng(3), "bad", "g")
    del (sample.turns if field == "turns" else sample.tokens.spans)[-1]
    with pytest.raises(ValueError, match=f"'bad'.*{field}"):
        sequence(sample)


@pytest.mark.parametrize(
    ("field", "size"),
    [("token_ids", 3), ("token_ids", 4), ("logprobs", 3), ("logprobs", 4), ("loss_mask", 1)],
)
def test_packed_fields_of_different_length_are_rejected(field: str, size: int) -> None:
    """The error of truncated bytes names sample and field."""
    sample = make_sample(np.random.default_rng(3), "bad", "g")
    if field == "loss_mask":
        sample.loss_mask = sample.loss_mask[:-size]
    else:
        data = getattr(sample.tokens, field)
        setattr(sample.tokens, field, data[:-size])
    with pytest.raises(ValueError, match=f"'bad'.*{field}"):
        sequence(sample)


def test_greedy_samples_are_rejected() -> None:
    """At temperature 0, log-probs are meaningless."""
    sample = make_sample(np.random.default_rng(4), "s", "g", temperature=0.0)
    with pytest.raises(ValueError, match="greedy"):
        sequence(sample)
