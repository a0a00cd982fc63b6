"""MA-PPO of MA-RLHF (arXiv 2410.02743): n consecutive tokens are one action.

These are the paper's fixed n-grams, which never cross the end of a turn: values are learned and
advantages estimated over n times fewer actions. See `actor_critic.py`.
"""

from __future__ import annotations

from trainer.algorithms.terms.actor_critic import ActorCritic
from trainer.config import TrainerConfig


def build(config: TrainerConfig) -> ActorCritic:
    """Build the algorithm from `config`."""
    return ActorCritic(config, action_tokens=config.algorithm.macro_action_tokens)
