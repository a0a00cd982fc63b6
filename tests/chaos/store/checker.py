"""Holds a history against what the store gives back.

Every id is sampled once (`writers.py` counts up), so an id that is stored twice was duplicated, and
one that is acknowledged and not where it was acknowledged is lost, even if the turn was filled up
with other tokens since.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar

from seamflow.trajectory.v1 import trajectory_pb2

from tests.chaos.store.history import History, TurnName, logprob_of

Stored = Mapping[TurnName, Sequence[int]]
"""Turn -> the ids it added, in order; -1 where a token came back with another log-prob."""

_DAMAGED = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Violations found, and how much was looked at."""

    tokens_acked: int = 0
    """Distinct places at which a token was acknowledged."""
    tokens_lost: int = 0
    """Acknowledged, and not stored at that place as acknowledged."""
    tokens_duplicated: int = 0
    """Stored more than once in a rollout."""
    samples_committed: int = 0
    """Samples in durable checkpoints."""
    samples_committed_twice: int = 0
    """Samples in more than one committed step."""
    samples_lost: int = 0
    """Samples of groups whose every rollout was acknowledged as finished, in no committed step."""
    stale_writes_accepted: int = 0
    """Writes that were accepted behind a fence."""
    steps_refused: int = 0
    """Times that the store contradicted a trainer that kept to its answers."""
    rollouts_given_up: int = 0
    """Rollouts that failed by an answer other than "try again": no data is lost, but work is."""

    VIOLATIONS: ClassVar[tuple[str, ...]] = (
        "tokens_lost",
        "tokens_duplicated",
        "samples_committed_twice",
        "samples_lost",
        "stale_writes_accepted",
        "steps_refused",
    )
    """The fields that speak of data, which must be 0."""

    @property
    def violations(self) -> int:
        """All of them."""
        return sum(getattr(self, name) for name in self.VIOLATIONS)

    def __add__(self, other: Verdict) -> Verdict:
        """Both together."""
        return Verdict(
            **{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        )


def stored_tokens(trajectories: Iterable[trajectory_pb2.Trajectory]) -> Stored:
    """What the store gives back, by turn."""
    return {
        (trajectory.rollout_id, turn.turn_id): [
            token_id if logprob == logprob_of(token_id) else _DAMAGED
            for token_id, logprob in zip(turn.tokens.token_ids, turn.tokens.logprobs, strict=True)
        ]
        for trajectory in trajectories
        for turn in trajectory.turns
    }


def check_tokens(history: History, stored: Stored) -> Verdict:
    """Count lost and duplicated tokens."""
    lost = history.conflicting
    for name, tokens in history.tokens.items():
        kept = stored.get(name, ())
        lost += sum(
            offset >= len(kept) or kept[offset] != token_id for offset, token_id in tokens.items()
        )
    return Verdict(
        tokens_acked=sum(map(len, history.tokens.values())),
        tokens_lost=lost,
        tokens_duplicated=_duplicated(stored),
        rollouts_given_up=sum(history.abandoned.values()),
    )


def _duplicated(stored: Stored) -> int:
    by_rollout: dict[str, Counter[int]] = {}
    for (rollout_id, _), ids in stored.items():
        by_rollout.setdefault(rollout_id, Counter()).update(ids)
    return sum(
        count - 1
        for ids in by_rollout.values()
        for token_id, count in ids.items()
        if token_id != _DAMAGED
    )


def check_steps(steps: Mapping[int, Sequence[str]]) -> Verdict:
    """Count samples in two committed steps. `steps`: step -> sample ids of its checkpoint."""
    seen = Counter(sample_id for samples in steps.values() for sample_id in samples)
    return Verdict(samples_committed=len(seen), samples_committed_twice=seen.total() - len(seen))


def untrained_groups(
    finished: Iterable[str], trained: Iterable[str], group_size: int, still_stored: int
) -> Verdict:
    """Count samples of complete groups that no step trained.

    `finished` and `trained` are rollout_ids; `still_stored` groups wait for a later step.
    """
    groups = Counter(rollout_id.rsplit("/", 2)[0] for rollout_id in finished)
    reached = {rollout_id.rsplit("/", 2)[0] for rollout_id in trained}
    complete = {group for group, size in groups.items() if size == group_size}
    return Verdict(samples_lost=max(0, len(complete - reached) - still_stored) * group_size)
