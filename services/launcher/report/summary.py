"""Statistics of a run, computed from its recorded data."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from seamflow.common.v1 import tokens_pb2
from seamflow.trajectory.v1 import trajectory_pb2

from services.lib.evaluation.pinned_task import label_of

_ENDED = (tokens_pb2.FINISH_REASON_STOP, tokens_pb2.FINISH_REASON_LENGTH)


@dataclass(slots=True)
class TrajectoryFigures:
    """Counts over recorded trajectories, added one by one."""

    num_rollouts: int = 0
    """Rollouts that finished with rewards."""
    num_turns: int = 0
    """Stored turns."""
    tokens_recorded: int = 0
    """Sampled tokens in the store."""
    turns_interrupted: int = 0
    """Turns whose tokens come from at least two weight versions or two servers."""
    turns_resumed: int = 0
    """Of those, turns that were completed."""
    failed_rollouts: int = 0
    """Rollouts that ended without rewards, for whatever reason, and were replaced."""
    infrastructure_failures: int = 0
    """Of those, rollouts that failed because a process, machine or network broke."""
    min_turns_per_rollout: int = 0
    """Fewest turns of a finished rollout."""
    turn_lengths: dict[str, list[int]] = field(default_factory=dict)
    """Sampled tokens per turn, by the evaluation the rollout belongs to ("" for training)."""
    rollout_lengths: dict[str, list[int]] = field(default_factory=dict)
    """Sampled tokens per rollout, likewise."""

    def add(self, trajectory: trajectory_pb2.Trajectory) -> None:
        """Count one trajectory."""
        lengths = [self._add_turn(turn) for turn in trajectory.turns]
        self.failed_rollouts += trajectory.HasField("failure")
        if trajectory.failure.failure_class == tokens_pb2.FAILURE_CLASS_INFRASTRUCTURE:
            self.infrastructure_failures += 1
        if trajectory.state != trajectory_pb2.ROLLOUT_STATE_FINISHED:
            return
        fewest = self.min_turns_per_rollout if self.num_rollouts else len(lengths)
        self.min_turns_per_rollout = min(fewest, len(lengths))
        self.num_rollouts += 1
        label = evaluation_of(trajectory)
        self.turn_lengths.setdefault(label, []).extend(lengths)
        self.rollout_lengths.setdefault(label, []).append(sum(lengths))

    def _add_turn(self, turn: trajectory_pb2.Turn) -> int:
        sampled = [s for s in turn.tokens.spans if s.origin == tokens_pb2.ORIGIN_POLICY]
        is_cut = (
            len({s.weight_version for s in sampled}) > 1 or len({s.server_id for s in sampled}) > 1
        )
        num_tokens = sum(span.num_tokens for span in sampled)
        self.num_turns += 1
        self.tokens_recorded += num_tokens
        self.turns_interrupted += is_cut
        self.turns_resumed += is_cut and turn.finish_reason in _ENDED
        return num_tokens


def evaluation_of(trajectory: trajectory_pb2.Trajectory) -> str:
    """ "before", "after" or "step-N" for a held-out rollout, "" for one of training."""
    if trajectory.purpose != tokens_pb2.PURPOSE_EVAL:
        return ""
    return label_of(trajectory.group_id)


def tail_ratio(lengths: Sequence[int]) -> float:
    """99th percentile over median; 0 without data."""
    if len(lengths) < 2:
        return 0.0
    return statistics.quantiles(lengths, n=100)[98] / max(statistics.median(lengths), 1)


def num_weight_updates(steps: Iterable[Mapping[str, Any]]) -> int:
    """Distinct versions that the steps began to publish.

    The line of a step that was restored from a checkpoint has no version: it was written before.
    """
    return len({step.get("weight_version", 0) for step in steps} - {0})


def package_versions() -> dict[str, str]:
    """Of Python and of the packages that a run's results depend on."""
    packages = ("seamflow", "torch", "transformers", "grpcio", "protobuf", "redis")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}
