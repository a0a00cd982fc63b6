"""What is known of a rollout without its turns."""

from __future__ import annotations

from typing import NamedTuple


class RolloutSummary(NamedTuple):
    """A rollout as lists show it; enums are the contract's numbers."""

    rollout_id: str
    purpose: int
    state: int
    failure_class: int
    finish_reason: int
    """FinishReason of its last turn; 0 while that runs."""
    truncated: bool
    in_group: bool
    num_turns: int
    num_tokens: int
    num_policy_tokens: int
    min_weight_version: int
    """Oldest version that sampled some; -1: nothing is sampled."""
    max_weight_version: int
    """Newest such version; -1 likewise."""
    reward: float | None
    """Of the run's name; None: it has none."""
    create_time: float
    finish_time: float
    step: int
