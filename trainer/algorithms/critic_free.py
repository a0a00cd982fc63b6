"""The policy-gradient algorithms without a critic: each is the terms in which it differs.

Formulas: A the advantage, r the reward of a rollout, R rollouts and N tokens of the step, rho the
ratio to the recorded behaviour policy. As in all of these algorithms, `importance` bounds the
weight of a token, which PPO leaves unbounded for A < 0.
"""
# ruff: noqa: N806 -- tensors carry shape suffixes

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from trainer.algorithms.base import LossTerms, PolicyTokens, Rollouts
from trainer.algorithms.policy_gradient import (
    Importance,
    PolicyGradient,
    centred,
    leave_one_out,
    standardised,
    whitened,
)
from trainer.config import TrainerConfig

_Baseline = Callable[[Rollouts], NDArray[np.float64]]


def grpo(config: TrainerConfig) -> PolicyGradient:
    """GRPO (DeepSeekMath, arXiv 2402.03300, outcome supervision).

        A = (r - mean(r)) / (std(r) + eps)                                       of the group
        J = 1/R sum_r 1/|r| sum_t min(rho_t * A, clip(rho_t, 1 - low, 1 + high) * A) - beta * k3_t

    beta is `kl.loss`, 0 unless set.
    """
    return PolicyGradient(
        config,
        baseline=_standardised(config),
        importance=Importance.clipped(config, low=0.2, high=0.2),
        aggregation="sequence_mean",
    )


def dapo(config: TrainerConfig) -> PolicyGradient:
    """DAPO (arXiv 2503.14476): GRPO's advantages, clip-higher, and a token-mean loss.

        J = 1/N sum_t min(rho_t * A, clip(rho_t, 1 - low, 1 + high) * A)

    Its two other parts are settings for any algorithm: `zero_variance_reward` of the run drops and
    replaces groups without variance, and `overlong_tokens` shapes the reward of long rollouts.
    """
    return PolicyGradient(
        config,
        baseline=_standardised(config),
        importance=Importance.clipped(config, low=0.2, high=0.28),
        aggregation="token_mean",
    )


def dr_grpo(config: TrainerConfig) -> PolicyGradient:
    """Dr. GRPO (arXiv 2503.20783): GRPO without its two biases.

        A = r - mean(r)                                                          of the group
        J = 1/R sum_r 1/L sum_t min(rho_t * A, clip(rho_t, 1 - low, 1 + high) * A)

    Without the standard deviation, which favours tasks that are nearly solved or nearly unsolved,
    and with a constant L (`algorithm.loss_length`) instead of each rollout's length, which favours
    long failures.

    Raises:
        ValueError: `algorithm.loss_length` is not set.
    """
    return PolicyGradient(
        config,
        baseline=centred,
        importance=Importance.clipped(config, low=0.2, high=0.2),
        aggregation="constant",
    )


def gspo(config: TrainerConfig) -> PolicyGradient:
    """GSPO (arXiv 2507.18071): importance ratios of sequences, not of tokens.

        s = exp(1/|y| sum_t log rho_t)
        J = 1/R sum_r min(s * A, clip(s, 1 - low, 1 + high) * A)

    s varies far less than rho, so its clip range is far smaller. Its gradient is s / |y| times the
    score of each token, so tokens are weighted as in `sequence_mean`. A rollout with a rewritten
    history has several sequences, each with a separate s.
    """
    return PolicyGradient(
        config,
        baseline=_standardised(config),
        importance=Importance.clipped(config, low=3e-4, high=4e-4, of_sequences=True),
        aggregation="sequence_mean",
    )


def cispo(config: TrainerConfig) -> PolicyGradient:
    """CISPO (MiniMax-M1, arXiv 2506.13585): importance weights are clipped, no token is dropped.

        J = 1/N sum_t sg[min(rho_t, 1 + high)] * A * log pi_theta(t)

    There is no lower limit, as in the paper's experiments, so `clip_low` has no effect; the clip is
    the bound on importance.

    Raises:
        ValueError: `importance` is not "truncate".
    """
    if config.algorithm.importance != "truncate":
        raise ValueError(
            f"algorithm.importance is {config.algorithm.importance!r}: cispo truncates ratios at "
            "1 + clip_high, leave it at 'truncate'"
        )
    high = 0.28 if config.algorithm.clip_high is None else config.algorithm.clip_high
    return PolicyGradient(
        config,
        baseline=_standardised(config),
        importance=Importance(way="truncate", floor=0.0, cap=1 + high),
        aggregation="token_mean",
        of_logprobs=True,
    )


def decoupled_ppo(config: TrainerConfig) -> PolicyGradient:
    """Decoupled PPO (arXiv 2110.00641; AReaL, arXiv 2505.24298): trust region beside importance.

        J = 1/N sum_t pi_prox / pi_behaviour * min(r_t * A, clip(r_t, 1 - low, 1 + high) * A)
        r_t = pi_theta / pi_prox

    pi_prox is the policy before the step. A step of one update is at pi_theta = pi_prox, where
    r_t = 1 and nothing is clipped: the corrected policy gradient remains. The clip range acts from
    the second update of a step on (`num_epochs`, `num_mini_batches`).
    """
    return PolicyGradient(
        config,
        baseline=_standardised(config),
        importance=Importance.clipped(config, low=0.2, high=0.2, decoupled=True),
        aggregation="token_mean",
    )


def rloo(config: TrainerConfig) -> PolicyGradient:
    """RLOO, REINFORCE leave-one-out (arXiv 2402.14740): a rollout is one action.

        A = r - mean of the group's other rewards
        J = 1/R sum_r A * log pi_theta(r)

    The paper is on-policy; here tokens sampled by older weights get importance weights. The KL term
    of the paper's reward is `kl.reward`, 0 unless set.
    """
    return PolicyGradient(
        config,
        baseline=leave_one_out,
        importance=Importance.bounded(config),
        aggregation="sequence_sum",
        of_logprobs=True,
    )


def reinforce_pp(config: TrainerConfig) -> PolicyGradient:
    """REINFORCE++ (arXiv 2501.03262): PPO's clipped surrogate, rewards whitened over the step.

        A = (r - mean(r)) / (std(r) + eps)                                       of all N tokens
        J = 1/N sum_t min(rho_t * A, clip(rho_t, 1 - low, 1 + high) * A)

    The paper has a KL term in the reward of each token, which affects all tokens before it;
    `kl.reward` is a term of the whole rollout.
    """
    return _whitened(config, lambda rollouts: rollouts.rewards_R)


def reinforce_pp_baseline(config: TrainerConfig) -> PolicyGradient:
    """REINFORCE++ for several rollouts of a task: it subtracts the mean of the group first."""
    return _whitened(config, centred)


class Distillation(PolicyGradient):
    """On-policy distillation: the policy samples, a teacher gives the log-prob of each token.

        A_t = log pi_teacher(t) - log pi_theta(t)
        J = 1/N sum_t rho_t * A_t * log pi_theta(t)

    A_t and rho carry no gradient: in expectation this is the gradient of -KL(pi_theta ||
    pi_teacher), token by token (GKD, arXiv 2306.13649; MiniLLM, arXiv 2306.08543). The teacher's
    log-probs are the column `algorithm.reference_column`; rewards are reported but not trained on.
    """

    def __init__(self, config: TrainerConfig) -> None:
        """Build the algorithm from `config`.

        Raises:
            ValueError: `algorithm.reference_column` is not set.
        """
        if not config.algorithm.reference_column:
            raise ValueError(
                "algorithm.reference_column is not set: give the column of the teacher's log-probs"
            )
        super().__init__(
            config,
            baseline=lambda rollouts: np.zeros(len(rollouts.rewards_R)),
            importance=Importance.bounded(config),
            aggregation="token_mean",
            of_logprobs=True,
        )

    def loss(self, tokens: PolicyTokens) -> LossTerms:
        advantages_BT = tokens.reference_logprobs_BT - tokens.logprobs_BT.detach()
        return super().loss(replace(tokens, advantages_BT=advantages_BT))


def _standardised(config: TrainerConfig) -> _Baseline:
    return partial(standardised, epsilon=config.algorithm.advantage_epsilon)


def _whitened(config: TrainerConfig, baseline: _Baseline) -> PolicyGradient:
    epsilon = config.algorithm.advantage_epsilon
    return PolicyGradient(
        config,
        baseline=lambda all_: whitened(baseline(all_), all_.num_tokens_R, epsilon),
        importance=Importance.clipped(config, low=0.2, high=0.2),
        aggregation="token_mean",
        whole_step=True,
    )
