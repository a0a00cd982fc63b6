"""What the outcome of a rollout must hold, beyond the form of its fields."""

from __future__ import annotations

from collections.abc import Collection

from services.chassis.errors import ServiceError, invalid_argument
from trajectory_manager.model.records import Outcome, RolloutState


def missing_reward(
    outcome: Outcome, reward_name: str, field: str = "rewards"
) -> ServiceError | None:
    """INVALID_ARGUMENT for a TRAIN rollout that counts without the reward it is trained on.

    Args:
        outcome: of the rollout.
        reward_name: the run's reward_name; empty: any reward will do.
        field: name of the `Rewards` in the request.
    """
    if outcome.state is not RolloutState.FINISHED:
        return None
    names = sorted({reward.name for reward in outcome.rewards})
    if not names:
        cure = "a TRAIN rollout finishes with at least one reward, or with a failure"
        return invalid_argument(f"{field}.rewards", names, cure)
    if reward_name and reward_name not in names:
        cure = f"one of them must be {reward_name!r}, the run's reward_name"
        return invalid_argument(f"{field}.rewards", names, cure)
    return None


def names_turns(outcome: Outcome) -> bool:
    """Whether the outcome is about single turns too."""
    return bool(outcome.untrained_turn_ids) or any(r.turn_id for r in outcome.rewards)


def unknown_turn(
    outcome: Outcome, turn_ids: Collection[str], field: str = "rewards"
) -> ServiceError | None:
    """INVALID_ARGUMENT for a reward or an untrained turn that is none of `turn_ids`."""
    cure = "a turn of the rollout that has begun"
    for index, reward in enumerate(outcome.rewards):
        if reward.turn_id and reward.turn_id not in turn_ids:
            name = f"{field}.rewards[{index}].turn_id"
            return invalid_argument(name, reward.turn_id, cure)
    for index, turn_id in enumerate(outcome.untrained_turn_ids):
        if turn_id not in turn_ids:
            return invalid_argument(f"untrained_turn_ids[{index}]", turn_id, cure)
    return None
