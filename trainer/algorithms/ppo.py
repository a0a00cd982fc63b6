"""PPO (arXiv 1707.06347) with a critic: every token is an action. See `actor_critic.py`."""

from __future__ import annotations

from trainer.algorithms.terms.actor_critic import ActorCritic
from trainer.config import TrainerConfig


def build(config: TrainerConfig) -> ActorCritic:
    """Build the algorithm from `config`."""
    return ActorCritic(config, action_tokens=1)
