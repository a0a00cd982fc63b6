"""What a run has recorded, compared with what its environments have done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from seamflow.common.v1 import tokens_pb2
from seamflow.enum_names import enum_name
from seamflow.trajectory.v1 import trajectory_pb2

from services.environments.episode import episode_seed


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Counts over one run."""

    rewards_from_failures: int
    """Rollouts with a reward that no environment gave."""
    groups_lost: int
    """Tasks without a complete group."""
    rollouts_finished: int
    """With rewards."""
    failures: dict[str, int]
    """Failed rollouts, which were replaced, by class."""

    @property
    def violations(self) -> int:
        """What must not be."""
        return self.rewards_from_failures + self.groups_lost


def check(
    trajectories: Iterable[trajectory_pb2.Trajectory],
    ended: Collection[tuple[str, int]],
    task_ids: Sequence[str],
    group_size: int,
    reward: float,
) -> Verdict:
    """Compare rollouts with the episodes (task, seed) that `ended`, each with `reward`."""
    finished: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    made_up = 0
    for each in trajectories:
        if each.HasField("failure"):
            failures[enum_name(tokens_pb2.FailureClass, each.failure.failure_class)] += 1
        if not each.HasField("rewards"):
            continue
        task_id = _task_of(each.rollout_id)
        finished[task_id] += 1
        given = {(reward.name, reward.value) for reward in each.rewards.rewards}
        is_real = (task_id, episode_seed(0, task_id, each.rollout_id)) in ended
        made_up += given != {("reward", reward)} or not is_real
    return Verdict(
        rewards_from_failures=made_up,
        groups_lost=sum(finished[task_id] != group_size for task_id in task_ids),
        rollouts_finished=finished.total(),
        failures=dict(failures),
    )


def _task_of(rollout_id: str) -> str:
    """Of a leased rollout, "<task>/<place in the group>/<attempt>"."""
    return rollout_id.rsplit("/", 2)[0]
