"""The papers' objectives as printed, in float64: what the algorithms are compared with.

They know nothing of weights, masks and score functions, and are differentiated numerically.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

LOW, HIGH, EPSILON, LENGTH, BETA = 0.2, 0.28, 1e-4, 32, 0.3
"""Clip range, what is added to deviations, the constant length of Dr. GRPO, and the weight of the
distance from the reference where there is one."""
GAMMA, LAMBDA, VALUE_WEIGHT, MACRO = 0.97, 0.9, 0.4, 3
"""Of GAE, of the critic's error, and the tokens of an action of MA-PPO."""


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
    values: np.ndarray
    """What a critic expects before each."""
    turns: np.ndarray
    """Number of the turn of each."""


Objective = Callable[[Sequence[Rollout], Sequence[np.ndarray]], float]


def group_of(rollout: Rollout, rollouts: Sequence[Rollout]) -> np.ndarray:
    """Rewards of its group."""
    return np.array([other.reward for other in rollouts if other.group == rollout.group])


def group_relative(rollout: Rollout, rollouts: Sequence[Rollout]) -> float:
    """GRPO's advantage."""
    rewards = group_of(rollout, rollouts)
    return float((rollout.reward - rewards.mean()) / (rewards.std() + EPSILON))


def less_mean(rollout: Rollout, rollouts: Sequence[Rollout]) -> float:
    """Dr. GRPO's."""
    return float(rollout.reward - group_of(rollout, rollouts).mean())


def surrogate(ratio: np.ndarray, advantage: float) -> np.ndarray:
    """PPO's clipped one."""
    found: np.ndarray = np.minimum(ratio * advantage, np.clip(ratio, 1 - LOW, 1 + HIGH) * advantage)
    return found


def grpo(rollouts: Sequence[Rollout], now: Sequence[np.ndarray]) -> float:
    """Mean over rollouts of means over tokens."""
    return float(
        np.mean(
            [
                surrogate(np.exp(logprobs - r.behaviour), group_relative(r, rollouts)).mean()
                for r, logprobs in zip(rollouts, now, strict=True)
            ]
        )
    )


def distances(logprobs: np.ndarray, reference: np.ndarray, estimator: str) -> np.ndarray:
    """From the reference, token by token."""
    ratio = np.exp(reference - logprobs)
    found: np.ndarray = {
        "k1": -np.log(ratio),
        "k2": np.log(ratio) ** 2 / 2,
        "k3": ratio - 1 - np.log(ratio),
    }[estimator]
    return found


def grpo_near_reference(estimator: str) -> Objective:
    """Each token's distance is taken off, before the means."""

    def objective(rollouts: Sequence[Rollout], now: Sequence[np.ndarray]) -> float:
        far = [
            distances(logprobs, r.reference, estimator).mean()
            for r, logprobs in zip(rollouts, now, strict=True)
        ]
        return float(grpo(rollouts, now) - BETA * np.mean(far))

    return objective


def distillation(rollouts: Sequence[Rollout], now: Sequence[np.ndarray]) -> float:
    """The teacher's log-prob less the student's own stands for the advantage of each token."""
    terms = [
        np.exp(r.start - r.behaviour) * (r.reference - r.start) * logprobs
        for r, logprobs in zip(rollouts, now, strict=True)
    ]
    return float(np.concatenate(terms).mean())


def dapo(rollouts: Sequence[Rollout], now: Sequence[np.ndarray]) -> float:
    """Mean over all tokens."""
    terms = [
        surrogate(np.exp(logprobs - r.behaviour), group_relative(r, rollouts))
        for r, logprobs in zip(rollouts, now, strict=True)
    ]
    return float(np.concatenate(terms).mean())


def dr_grpo(rollouts: Sequence[Rollout], now: Sequence[np.ndarray]) -> float:
    """Sums over tokens, by a constant."""
    return float(
        np.mean(
            [
                surrogate(np.exp(logprobs - r.behaviour), less_mean(r, rollouts)).sum() / LENGTH
                for r, logprobs in zip(rollouts, now, strict=True)
            ]
        )
    )


def gspo(rollouts: Sequence[Rollout], now: Sequence[np.ndarray]) -> float:
    """One ratio for a whole sequence."""
    return float(
        np.mean(
            [
                surrogate(np.exp((logprobs - r.behaviour).mean()), group_relative(r, rollouts))
                for r, logprobs in zip(rollouts, now, strict=True)
            ]
        )
    )


def cispo(rollouts: Sequence[Rollout], now: Sequence[np.ndarray]) -> float:
    """A clipped weight without gradient, times the log-prob."""
    terms = [
        np.minimum(np.exp(r.start - r.behaviour), 1 + HIGH) * group_relative(r, rollouts) * logprobs
        for r, logprobs in zip(rollouts, now, strict=True)
    ]
    return float(np.concatenate(terms).mean())


def decoupled_ppo(rollouts: Sequence[Rollout], now: Sequence[np.ndarray]) -> float:
    """The trust region is around the weights at the beginning of the step."""
    terms = [
        np.exp(r.start - r.behaviour)
        * surrogate(np.exp(logprobs - r.start), group_relative(r, rollouts))
        for r, logprobs in zip(rollouts, now, strict=True)
    ]
    return float(np.concatenate(terms).mean())


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
    return float(np.minimum(ratios * advantages, clipped * advantages).mean())


def action_starts(rollout: Rollout, size: int | None) -> list[int]:
    """First tokens of actions: `size` tokens of a turn, or the turn."""
    starts = []
    for turn in sorted(set(rollout.turns.tolist())):
        places = np.nonzero(rollout.turns == turn)[0].tolist()
        starts += places[:: size or len(places)]
    return starts


def recursive_advantages(rewards: Sequence[float], values: Sequence[float]) -> list[float]:
    """GAE as it is usually written, from the last action to the first."""
    found, after, advantage = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        advantage = reward + GAMMA * after - value + GAMMA * LAMBDA * advantage
        found.append(advantage)
        after = value
    return found[::-1]


class ActorCriticObjective(Protocol):
    """An objective that may be given a critic's values instead of those of the rollouts."""

    def __call__(
        self,
        rollouts: Sequence[Rollout],
        now: Sequence[np.ndarray],
        values: Sequence[np.ndarray] | None = None,
    ) -> float:
        """The objective under the log-probs `now`."""
        ...


def actor_critic(size: int | None) -> ActorCriticObjective:
    """PPO's surrogate by the advantages of actions, less the critic's squared error."""

    def objective(
        rollouts: Sequence[Rollout],
        now: Sequence[np.ndarray],
        values: Sequence[np.ndarray] | None = None,
    ) -> float:
        gains, errors = [], []
        for number, (r, logprobs) in enumerate(zip(rollouts, now, strict=True)):
            starts = action_starts(r, size)
            rewards = [0.0] * (len(starts) - 1) + [r.reward]
            old = r.values[starts]
            advantages = np.array(recursive_advantages(rewards, old.tolist()))
            lengths = np.diff([*starts, len(r.start)])
            of_tokens = np.repeat(advantages, lengths)
            gains.append(surrogate_of(np.exp(logprobs - r.behaviour), of_tokens))
            expected = old if values is None else values[number][starts]
            errors.append(np.repeat((expected - (advantages + old)) ** 2, lengths))
        return float(np.concatenate(gains).mean() - VALUE_WEIGHT * np.concatenate(errors).mean())

    return objective


def surrogate_of(ratio: np.ndarray, advantages: np.ndarray) -> np.ndarray:
    """PPO's clipped one, of tokens that differ."""
    found: np.ndarray = np.minimum(
        ratio * advantages, np.clip(ratio, 1 - LOW, 1 + HIGH) * advantages
    )
    return found


def tba(rollouts: Sequence[Rollout], now: Sequence[np.ndarray]) -> float:
    """How far each rollout is out of balance with the others of its group."""
    total = 0.0
    for r, logprobs in zip(rollouts, now, strict=True):
        terms = [
            other.reference.sum() + other.reward / BETA - other.start.sum()
            for other in rollouts
            if other.group == r.group
        ]
        log_z = np.mean(terms)
        total += (log_z + logprobs.sum() - r.reference.sum() - r.reward / BETA) ** 2
    return -total / len(rollouts)


def dpo(rollouts: Sequence[Rollout], now: Sequence[np.ndarray]) -> float:
    """The best of each group against its worst."""
    found = []
    for group in dict.fromkeys(r.group for r in rollouts):
        members = [(r, p) for r, p in zip(rollouts, now, strict=True) if r.group == group]
        ordered = sorted(members, key=lambda member: member[0].reward)
        far = [logprobs.sum() - r.reference.sum() for r, logprobs in ordered]
        found.append(-np.log1p(np.exp(-BETA * (far[-1] - far[0]))))
    return float(np.mean(found))


OBJECTIVES: dict[str, Objective] = {
    "cispo": cispo,
    "dapo": dapo,
    "decoupled_ppo": decoupled_ppo,
    "distillation": distillation,
    "dpo": dpo,
    "dr_grpo": dr_grpo,
    "grpo": grpo,
    "gspo": gspo,
    "ma_ppo": actor_critic(MACRO),
    "ppo": actor_critic(1),
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "rloo": rloo,
    "tba": tba,
    "turn_ppo": actor_critic(None),
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
