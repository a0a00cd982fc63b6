"""Holds what a trainer did, and its ledger, against what it should have done.

The metrics file is the history that survived: each step that led to the weights once, with its
samples. The ledger is the trajectory manager's: the step that consumed each sample.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What became of a run."""

    trained: Sequence[tuple[int, Sequence[str]]]
    """Step and samples of each line of the metrics file."""
    committed: Mapping[str, int]
    """Sample -> the step for which the ledger consumed it."""
    losses: Sequence[float] = ()
    """Of the steps that had one."""

    @property
    def steps(self) -> dict[str, int]:
        """Sample -> the step that trained it."""
        return {sample: step for step, samples in self.trained for sample in samples}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Violations found, and how much was looked at."""

    samples_trained: int = 0
    """Samples in the histories that survived."""
    samples_committed_twice: int = 0
    """Times that a sample was trained beyond the first, or handed out after it was trained."""
    samples_skipped: int = 0
    """Consumed, or due by now, and part of no step."""
    samples_moved: int = 0
    """Trained in another step than in the ledger, or than without a crash."""
    steps_wrong: int = 0
    """Steps that are missing, there twice, or not of whole groups."""
    losses_not_finite: int = 0
    """Losses that are no number."""
    tensors_compared: int = 0
    """Tensors of final weights and checkpoints."""
    tensors_unequal: int = 0
    """Of these, those in which a bit differs from the undisturbed run's, or that it lacks."""

    VIOLATIONS: ClassVar[tuple[str, ...]] = (
        "samples_committed_twice",
        "samples_skipped",
        "samples_moved",
        "steps_wrong",
        "losses_not_finite",
        "tensors_unequal",
    )
    """The fields that must be 0."""

    @property
    def violations(self) -> int:
        """All of them."""
        return sum(getattr(self, name) for name in self.VIOLATIONS)

    def __add__(self, other: Verdict) -> Verdict:
        """Both together."""
        return Verdict(
            **{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        )


def check_recorded(history: History, reference: History) -> Verdict:
    """A run against an undisturbed one on the same recording: the same samples, step by step."""
    found, expected = history.steps, reference.steps
    return _check_steps(history, num_steps=len(reference.trained)) + Verdict(
        samples_skipped=len((expected.keys() | history.committed.keys()) - found.keys()),
        samples_moved=sum(
            not step == expected.get(sample) == history.committed.get(sample)
            for sample, step in found.items()
        ),
    )


def check_delivery(
    history: History,
    *,
    num_steps: int,
    finished: Sequence[str],
    available: Sequence[str],
    group_size: int,
    groups_per_step: int,
) -> Verdict:
    """A run on what producers wrote meanwhile: each complete group is trained, or still to be had.

    Args:
        history: what became of the run.
        num_steps: it was to take.
        finished: rollouts whose end was acknowledged to their agent.
        available: samples that the ledger gives out after the last step.
        group_size: rollouts of a complete group.
        groups_per_step: complete groups of each step.
    """
    found = history.steps
    reached = {rollout_of(sample) for sample in (*found, *available)}
    sizes = Counter(map(group_of, finished))
    due = {name for name in finished if sizes[group_of(name)] >= group_size}
    handed_out = Counter(available)
    twice = handed_out.total() - len(handed_out) + len(handed_out.keys() & found.keys())
    return _check_steps(history, num_steps=num_steps) + Verdict(
        samples_committed_twice=twice,
        samples_skipped=len(due - reached) + len(history.committed.keys() - found.keys()),
        samples_moved=sum(history.committed.get(sample) != step for sample, step in found.items()),
        steps_wrong=sum(
            sorted(Counter(group_of(rollout_of(sample)) for sample in samples).values())
            != [group_size] * groups_per_step
            for _, samples in history.trained
        ),
    )


def rollout_of(sample: str) -> str:
    """The rollout that a sample is of."""
    return sample.rpartition("#")[0]


def group_of(rollout: str) -> str:
    """The group that a rollout is of."""
    return rollout.rsplit("/", 2)[0]


def _check_steps(history: History, *, num_steps: int) -> Verdict:
    """Steps 1, 2, 3 and so on, each once; no sample in two of them."""
    steps = Counter(step for step, _ in history.trained)
    samples = Counter(sample for _, samples in history.trained for sample in samples)
    missing = set(range(1, num_steps + 1)) - steps.keys()
    return Verdict(
        samples_trained=len(samples),
        samples_committed_twice=samples.total() - len(samples),
        steps_wrong=len(missing) + steps.total() - len(steps),
        losses_not_finite=sum(not math.isfinite(loss) for loss in history.losses),
    )
