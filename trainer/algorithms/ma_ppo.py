"""MA-PPO of MA-RLHF (arXiv 2410.02743): a few tokens in a row are one action.

Its fixed n-grams, which never cross the end of a turn: values are learnt and advantages estimated
over n times fewer steps. See `actor_critic.py`.
"""

from __future__ import annotations

from trainer.algorithms.terms.actor_critic import ActorCritic
from trainer.config import TrainerConfig

__all__ = ["build"]


def build(config: TrainerConfig) -> ActorCritic:
    """As configured."""
    return ActorCritic(config, action_tokens=config.macro_action_tokens)
