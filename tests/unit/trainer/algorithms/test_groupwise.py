"""Objectives that compare the rollouts of a group: they see whole groups, and whole rollouts."""

from __future__ import annotations

import pytest
import torch

from services.chassis.errors import ConfigError
from tests.lib.trainer.ranks.gradients import config, greatest_error, make_case, ours
from tests.suites.algorithms.formulas import BETA
from trainer.algorithms.base import PolicyTokens, make_algorithm
from trainer.algorithms.groupwise import GroupwiseObjective


def tokens(
    rewards: list[float],
    groups: list[int],
    rollouts: list[int] | None = None,
    logprobs: torch.Tensor | None = None,
) -> PolicyTokens:
    """A row of three tokens for each; the last does not count."""
    shape = (len(rewards), 3)
    zeros = torch.zeros(shape, dtype=torch.float64)
    found = torch.linspace(-2, -1, 3 * len(rewards), dtype=torch.float64).view(shape)
    return PolicyTokens(
        logprobs_BT=(found if logprobs is None else logprobs).requires_grad_(),
        behaviour_logprobs_BT=zeros,
        reference_logprobs_BT=zeros - 1.5,
        turn_rewards_BT=zeros,
        advantages_BT=torch.tensor(rewards, dtype=torch.float64)[:, None].expand(shape),
        weights_BT=zeros + 1,
        staleness_BT=torch.zeros(shape, dtype=torch.int64),
        loss_mask_BT=torch.tensor([[True, True, False]]).expand(shape),
        rollouts_B=torch.tensor(rollouts or list(range(len(rewards)))),
        groups_B=torch.tensor(groups),
    )


@pytest.mark.parametrize("algorithm", ["dpo", "tba"])
def test_a_group_that_is_cut_gives_another_gradient(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: were groups not kept whole, small micro-batches would change the step."""
    samples, logits = make_case(0)
    whole = ours(samples, logits, config(algorithm), budget=10_000)
    small = ours(samples, logits, config(algorithm), budget=8)
    assert greatest_error(small, whole) < 1e-12
    monkeypatch.setattr(GroupwiseObjective, "whole_groups", False)
    assert greatest_error(ours(samples, logits, config(algorithm), budget=8), whole) > 1e-3


def test_a_group_without_a_preference_gives_no_gradient() -> None:
    """All alike: nothing to prefer; the other group learns as ever."""
    given = tokens([1.0, 1.0, 0.0, 1.0], [7, 7, 3, 3])
    make_algorithm(config("dpo")).loss(given).loss.backward()  # type: ignore[no-untyped-call]
    gradient = given.logprobs_BT.grad
    assert gradient is not None
    assert gradient[:2].abs().max() == 0
    assert gradient[2:, :2].abs().min() > 0


@pytest.mark.parametrize("algorithm", ["dpo", "tba"])
def test_a_rewritten_history_counts_as_one_rollout(algorithm: str) -> None:
    """Two sequences of a rollout are as one with the tokens of both."""
    parts = tokens([1.0, 1.0, 0.0], [0, 0, 0], rollouts=[4, 4, 9])
    logprobs = parts.logprobs_BT.detach()
    # The same sums: the second sequence's tokens, less their reference, added to the first's.
    joined = torch.stack([logprobs[0] + logprobs[1] + 1.5, logprobs[2]])
    one = tokens([1.0, 0.0], [0, 0], logprobs=joined)
    losses = [make_algorithm(config(algorithm)).loss(given).loss for given in (parts, one)]
    torch.testing.assert_close(*losses)
    losses[0].backward()  # type: ignore[no-untyped-call]
    gradient = parts.logprobs_BT.grad
    assert gradient is not None
    torch.testing.assert_close(gradient[0], gradient[1])


def test_balance_is_where_the_reward_over_beta_is_the_distance() -> None:
    """TBA's loss is 0 there and nowhere else."""
    rewards = [0.3, -0.2, 0.9]
    at_balance = torch.tensor(rewards, dtype=torch.float64)[:, None] / BETA / 2 - 1.5
    tba = make_algorithm(config("tba"))
    given = tokens(rewards, [0, 0, 0], logprobs=at_balance.expand(3, 3).clone())
    assert tba.loss(given).loss.item() == pytest.approx(0, abs=1e-12)
    other = tokens(rewards, [0, 0, 0], logprobs=(at_balance * 1.1).expand(3, 3).clone())
    assert tba.loss(other).loss.item() > 0.01


@pytest.mark.parametrize("algorithm", ["dpo", "tba"])
def test_errors_name_the_settings_of_the_objective(algorithm: str) -> None:
    """The message names the setting, the value and the cure."""
    with pytest.raises(ConfigError, match="reference_column is not set: give the column"):
        make_algorithm(config(algorithm, algorithm__reference_column=""))
    for name in ("kl__loss", "kl__reward"):
        with pytest.raises(
            ConfigError, match=rf"{name.replace('__', '.')} is 0.1: .* to 0 and use algorithm.beta"
        ):
            make_algorithm(config(algorithm, **{name: 0.1}))
    with pytest.raises(ConfigError, match=r"staleness_decay is 0.5: .* set it to 1.0"):
        make_algorithm(config(algorithm, algorithm__staleness_decay=0.5))
    with pytest.raises(
        ConfigError, match=r"loss_aggregation is 'token_mean': .* set it to 'algorithm'"
    ):
        make_algorithm(config(algorithm, algorithm__loss_aggregation="token_mean"))
