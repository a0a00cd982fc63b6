"""Which rank holds which stage of which model, and what the ranks send each other.

The policy's model is number 0, with stage s on rank s. A critic's own model lies in the opposite
direction over the same ranks, in one or more replicas, numbers 1 and up, which take turns at the
micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trainer.pipeline.fused_schedule.problem import BACKWARD, FORWARD

POLICY = 0
"""Number of the policy's model."""
VALUES = 2
"""Kind of the messages with a critic's values, and of the task that takes them without a gradient;
the other kinds are FORWARD and BACKWARD."""
_KINDS = 3


@dataclass(frozen=True, slots=True)
class Channel:
    """Messages of one model and one kind from one rank to another, in order."""

    model: int
    kind: int
    sender: int
    receiver: int

    @property
    def tag(self) -> int:
        """No other channel between the same ranks has it."""
        return _KINDS * self.model + self.kind


@dataclass(frozen=True, slots=True)
class Layout:
    """The stages of all models."""

    ranks: tuple[tuple[int, ...], ...]
    """By model: the rank of each stage."""

    @property
    def num_replicas(self) -> int:
        """Of the critic's own model; 0: there is none."""
        return len(self.ranks) - 1

    def stages_on(self, rank: int) -> dict[int, int]:
        return {model: ranks.index(rank) for model, ranks in enumerate(self.ranks) if rank in ranks}

    def is_last(self, model: int, stage: int) -> bool:
        return stage == len(self.ranks[model]) - 1

    def source(self, model: int, kind: int, stage: int, micro_batch: int) -> Channel | None:
        """Where the input of a task comes from; None: it needs none of another stage."""
        ranks = self.ranks[model]
        if kind == FORWARD:
            return None if stage == 0 else Channel(model, kind, ranks[stage - 1], ranks[stage])
        if kind == BACKWARD and not self.is_last(model, stage):
            return Channel(model, kind, ranks[stage + 1], ranks[stage])
        return self._values(1 + micro_batch % self.num_replicas) if self._needs(model) else None

    def target(self, model: int, kind: int, stage: int) -> Channel | None:
        """Where the output of a task goes to; None: no other stage needs it."""
        ranks = self.ranks[model]
        if kind == VALUES:
            return None
        if kind == BACKWARD:
            return None if stage == 0 else Channel(model, kind, ranks[stage], ranks[stage - 1])
        if not self.is_last(model, stage):
            return Channel(model, kind, ranks[stage], ranks[stage + 1])
        return None if model == POLICY else self._values(model)

    def channels(self) -> Iterator[Channel]:
        """All between different ranks, in the same order on every rank."""
        for model, ranks in enumerate(self.ranks):
            for stage in range(len(ranks)):
                for kind in (FORWARD, BACKWARD):
                    channel = self.target(model, kind, stage)
                    if channel is not None and channel.sender != channel.receiver:
                        yield channel

    def _needs(self, model: int) -> bool:
        """Whether the loss of a model needs the values of another."""
        return model == POLICY and self.num_replicas > 0

    def _values(self, critic: int) -> Channel:
        return Channel(critic, VALUES, self.ranks[critic][-1], self.ranks[POLICY][-1])


def layout_of(world_size: int, critic_stages: int) -> Layout:
    """A stage of the policy on each rank, and as many replicas of a critic as there is room for.

    Args:
        critic_stages: of the critic's own model; 0: there is none.

    Raises:
        ValueError: the critic's stages do not divide the ranks.
    """
    if not critic_stages:
        return Layout((tuple(range(world_size)),))
    if world_size % critic_stages:
        raise ValueError(
            f"pipeline.critic_stages is {critic_stages}: give a number that divides the "
            f"{world_size} ranks"
        )
    starts = range(0, world_size, critic_stages)
    replicas = tuple(tuple(reversed(range(at, at + critic_stages))) for at in starts)
    return Layout((tuple(range(world_size)), *replicas))
