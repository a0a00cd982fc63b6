"""PPO with a critic of turns, after ArCHer (arXiv 2402.19446): a whole turn is one action.

The critic estimates the value before each turn, and all tokens of the turn share its advantage, as
in ArCHer's hierarchy of an utterance-level critic over a token-level policy. Unlike ArCHer's, the
critic is trained on-policy by TD(lambda): no replay buffer, no target network, no second critic.
See `actor_critic.py`.
"""

from __future__ import annotations

from trainer.algorithms.terms.actor_critic import ActorCritic
from trainer.config import TrainerConfig


def build(config: TrainerConfig) -> ActorCritic:
    """Build the algorithm from `config`."""
    return ActorCritic(config, action_tokens=None)
