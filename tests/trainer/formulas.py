"""The papers' objectives as printed, in float64: what the algorithms are compared with.

They know nothing of weights, masks and score functions, and are differentiated numerically.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

LOW, HIGH, EPSILON, LENGTH, BETA = 0.2, 0.28, 1e-4, 32, 0.3
"""Clip range, what is added to deviations, the constant length of Dr. GRPO, and the weight of the
distance from the reference where there is one."""


@dataclass
class Rollout:
    """What a formula is made of."""

    reward: float
    group: str
    behaviour: np.ndarray
    """Log-prob of each trainable token when it was sampled."""
    start: np.ndarray
    """The same under the weights at the beginning of the step."""
    reference: np.ndarray
    """The same under a frozen model."""


Objective = Callable[[Sequence[Rollout], Sequence[np.ndarray]], float]


def group_of(rollout: Rollout, rollouts: Sequence[Rollout]) -> np.ndarray:
    """Rewards of its group."""
    return np.array([other.reward for other in rollouts if other.group == rollout.group])


def group_relative(rollout: Rollout, rollouts: Sequence[Rollout]) -> float:
    """GRPO's advantage."""
    rewards = group_of(rollout, rollouts)
    return (rollout.reward - rewards.mean()) / (rewards.std() + EPSILON)


def less_mean(rollout: Rollout, rollouts: Sequence[Rollout]) -> float:
    """Dr. GRPO's."""
    return rollout.reward - group_of(rollout, rollouts).mean()


def surrogate(ratio: np.ndarray, advantage: float) -> np.ndarray:
    """PPO's clipped one."""
    return np.minimum(ratio * advantage, np.clip(ratio, 1 - LOW, 1 + HIGH) * advantage)


def grpo(rollouts: Sequence[Rollout], now: Sequence[np.ndarray]) -> float:
    """Mean over rollouts of means over tokens."""
    return np.mean(
        [
            surrogate(np.exp(logprobs - r.behaviour), group_relative(r, rollouts)).mean()
            for r, logprobs in zip(rollouts, now, strict=True)
        ]
    )


def distances(logprobs: np.ndarray, reference: np.ndarray, estimator: str) -> np.ndarray:
    """From the reference, token by token."""
    ratio = np.exp(reference - logprobs)
    return {
        "k1": -np.log(ratio),
        "k2": np.log(ratio) ** 2 / 2,
        "k3": ratio - 1 - np.log(ratio),
    }[estimator]


def grpo_near_reference(estimator: str) -> Objective:
    """Each token's distance is taken off, before the means."""

    def objective(rollouts: Sequence[Rollout], now: Sequence[np.ndarray]) -> float:
        far = [
            distances(logprobs, r.reference, estimator).mean()
            for r, logprobs in zip(rollouts, now, strict=True)
        ]
        return grpo(rollouts, now) - BETA * np.mean(far)

    return objective


def distillation(rollouts: Sequence[Rollout], now: Sequence[np.ndarray]) -> float:
    """The teacher's log-prob less the student's own stands for the advantage of each token."""
    terms = [
        np.exp(r.start - r.behaviour) * (r.reference - r.start) * logprobs
        for r, logprobs in zip(rollouts, now, strict=True)
    ]
    return np.concatenate(terms).mean()


def dapo(rollouts: Sequence[Rollout], now: Sequence[np.ndarray]) -> float:
    """Mean over all tokens."""
    terms = [
        surrogate(np.exp(logprobs - r.behaviour), group_relative(r, rollouts))
        for r, logprobs in zip(rollouts, now, strict=True)
    ]
    return np.concatenate(terms).mean()


def dr_grpo(rollouts: Sequence[Rollout], now: Sequence[np.ndarray]) -> float:
    """Sums over tokens, by a constant."""
    return np.mean(
        [
            surrogate(np.exp(logprobs - r.behaviour), less_mean(r, rollouts)).sum() / LENGTH
            for r, logprobs in zip(rollouts, now, strict=True)
        ]
    )


def gspo(rollouts: Sequence[Rollout], now: Sequence[np.ndarray]) -> float:
    """One ratio for a whole sequence."""
    return np.mean(
        [
            surrogate(np.exp((logprobs - r.behaviour).mean()), group_relative(r, rollouts))
            for r, logprobs in zip(rollouts, now, strict=True)
        ]
    )


def cispo(rollouts: Sequence[Rollout], now: Sequence[np.ndarray]) -> float:
    """A clipped weight without gradient, times the log-prob."""
    terms = [
        np.minimum(np.exp(r.start - r.behaviour), 1 + HIGH) * group_relative(r, rollouts) * logprobs
        for r, logprobs in zip(rollouts, now, strict=True)
    ]
    return np.concatenate(terms).mean()


def decoupled_ppo(rollouts: Sequence[Rollout], now: Sequence[np.ndarray]) -> float:
    """The trust region is around the weights at the beginning of the step."""
    terms = [
        np.exp(r.start - r.behaviour)
        * surrogate(np.exp(logprobs - r.start), group_relative(r, rollouts))
        for r, logprobs in zip(rollouts, now, strict=True)
    ]
    return np.concatenate(terms).mean()


def rloo(rollouts: Sequence[Rollout], now: Sequence[np.ndarray]) -> float:
    """Log-probs of whole rollouts; each token has a weight without gradient."""
    total = 0.0
    for r, logprobs in zip(rollouts, now, strict=True):
        rewards = group_of(r, rollouts)
        others = (rewards.sum() - r.reward) / (len(rewards) - 1)
        total += ((r.reward - others) * np.exp(r.start - r.behaviour) * logprobs).sum()
    return total / len(rollouts)


def reinforce_pp(rollouts: Sequence[Rollout], now: Sequence[np.ndarray]) -> float:
    """Each token has its rollout's reward, whitened over all tokens."""
    return whitened_surrogate(rollouts, now, [r.reward for r in rollouts])


def reinforce_pp_baseline(rollouts: Sequence[Rollout], now: Sequence[np.ndarray]) -> float:
    """The same, less the group's mean first."""
    return whitened_surrogate(rollouts, now, [less_mean(r, rollouts) for r in rollouts])


def whitened_surrogate(
    rollouts: Sequence[Rollout], now: Sequence[np.ndarray], rewards: Sequence[float]
) -> float:
    """With a reward for each token."""
    of_tokens = np.concatenate(
        [np.full(len(r.start), reward) for r, reward in zip(rollouts, rewards, strict=True)]
    )
    advantages = (of_tokens - of_tokens.mean()) / (of_tokens.std() + EPSILON)
    behaviour = np.concatenate([r.behaviour for r in rollouts])
    ratios = np.exp(np.concatenate(now) - behaviour)
    clipped = np.clip(ratios, 1 - LOW, 1 + HIGH)
    return np.minimum(ratios * advantages, clipped * advantages).mean()


OBJECTIVES: dict[str, Objective] = {
    "cispo": cispo,
    "dapo": dapo,
    "decoupled_ppo": decoupled_ppo,
    "distillation": distillation,
    "dr_grpo": dr_grpo,
    "grpo": grpo,
    "gspo": gspo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "rloo": rloo,
}


def differences(objective: Objective, rollouts: Sequence[Rollout]) -> list[np.ndarray]:
    """dJ / d log-prob of each token, by central differences."""
    step = 1e-6
    found = [np.zeros_like(r.start) for r in rollouts]
    for r, gradient in enumerate(found):
        for t in range(len(gradient)):
            values = []
            for sign in (1, -1):
                now = [rollout.start.copy() for rollout in rollouts]
                now[r][t] += sign * step
                values.append(objective(rollouts, now))
            gradient[t] = (values[0] - values[1]) / (2 * step)
    return found
