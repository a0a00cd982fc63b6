"""What is known of a rollout without its turns, and what a search asks of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple


class RolloutSummary(NamedTuple):
    """A rollout as lists show it; enums are the contract's numbers."""

    rollout_id: str
    purpose: int
    """Purpose."""
    state: int
    """RolloutState."""
    failure_class: int
    """FailureClass."""
    finish_reason: int
    """FinishReason of its last turn; 0 while that runs."""
    truncated: bool
    """Whether its agent says that a limit cut it off."""
    in_group: bool
    """Whether it was made from a lease."""
    num_turns: int
    num_tokens: int
    """Tokens of all its turns."""
    num_policy_tokens: int
    """Sampled ones among these."""
    min_weight_version: int
    """Oldest version that sampled some; -1: nothing is sampled."""
    max_weight_version: int
    """Newest such version; -1 likewise."""
    reward: float | None
    """Of the run's name; None: it has none."""
    create_time: float
    """Unix seconds by the store's clock."""
    finish_time: float
    """Unix seconds; 0 while it runs."""
    step: int
    """Step that trained it; 0: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What must hold for a rollout; a field at its default asks for nothing."""

    purpose: int = 0
    """Purpose."""
    state: int = 0
    """RolloutState."""
    failure_class: int = 0
    """FailureClass."""
    min_reward: float = -math.inf
    max_reward: float = math.inf
    min_tokens: int = 0
    max_tokens: int = 0
    """Greatest number of tokens; 0: any."""
    min_turns: int = 0
    max_turns: int = 0
    """Greatest number of turns; 0: any."""

    @property
    def anything(self) -> bool:
        """Whether every rollout will do."""
        return self == Wanted()

    def matches(self, found: RolloutSummary) -> bool:
        """Whether a rollout is wanted."""
        return (
            self.purpose in (0, found.purpose)
            and self.state in (0, found.state)
            and self.failure_class in (0, found.failure_class)
            and found.num_tokens >= self.min_tokens
            and (not self.max_tokens or found.num_tokens <= self.max_tokens)
            and found.num_turns >= self.min_turns
            and (not self.max_turns or found.num_turns <= self.max_turns)
            and self._has_reward(found.reward)
        )

    def _has_reward(self, reward: float | None) -> bool:
        if self.min_reward == -math.inf and self.max_reward == math.inf:
            return True
        return reward is not None and self.min_reward <= reward <= self.max_reward
