"""The command of each rank that computes the gradient of a chunk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from trainer.algorithms.base import make_algorithm
from trainer.config import TrainerConfig
from trainer.data.advantages import SequenceAdvantages, compute_advantages
from trainer.data.micro_batch import MicroBatch, plan_micro_batches, weightless
from trainer.data.token_sequence import TokenSequence, trainable_tokens
from trainer.pipeline.layout import layout_of
from trainer.pipeline.pipelined_policy import critic_stages
from trainer.pipeline.schedule import Schedules
from trainer.policy.commands import Accumulate

__all__ = ["ChunkCommands"]

_PER_STAGE = 2
"""Micro-batches of a pipeline, relative to its stages: fewer leave ranks idle."""


class ChunkCommands:
    """Cuts chunks into micro-batches, and plans who computes which when.

    Args:
        config: of the trainer.
        world_size: number of ranks.
        packed: whether the models compute packed rows.
    """

    def __init__(self, config: TrainerConfig, world_size: int, *, packed: bool) -> None:
        self._config = config
        self._world_size, self._packed = world_size, packed
        self._algorithm = make_algorithm(config)
        self._schedules: Schedules | None = None
        if config.backend == "pipeline":
            layout = layout_of(world_size, critic_stages(config, world_size))
            self._schedules = Schedules(layout, config.pipeline, config.seed)

    def of(
        self,
        sequences: Sequence[TokenSequence],
        weight_version: int,
        shuffle: np.random.Generator | None = None,
    ) -> list[Accumulate]:
        """The commands, in rank order.

        Args:
            sequences: of the chunk.
            weight_version: base version of the step.
            shuffle: permutes the rewards, if given.
        """
        advantages = compute_advantages(sequences, self._algorithm, self._config, shuffle)
        shares = self._shares(sequences, advantages)
        actions = (
            [()] * self._world_size
            if self._schedules is None
            else self._schedules.actions(len(shares[0]))
        )
        return [
            Accumulate(
                weight_version=weight_version,
                num_tokens=trainable_tokens(sequences),
                denominator=advantages.denominator,
                micro_batches=share,
                actions=mine,
            )
            for share, mine in zip(shares, actions, strict=True)
        ]

    def report(self, answers: Sequence[Mapping[str, float]]) -> None:
        """Take note of what the ranks answered to the commands of a chunk."""
        if self._schedules is not None:
            self._schedules.report(answers)

    def _shares(
        self, sequences: Sequence[TokenSequence], advantages: SequenceAdvantages
    ) -> Sequence[tuple[MicroBatch, ...]]:
        """Of each rank; all ranks of a pipeline get all."""
        pipelined = self._schedules is not None
        shares = plan_micro_batches(
            sequences,
            advantages,
            num_ranks=1 if pipelined else self._world_size,
            micro_batch_tokens=self._config.batch.micro_batch_tokens,
            packed=self._packed,
            whole_groups=self._algorithm.whole_groups,
            at_least=_PER_STAGE * self._world_size if pipelined else 1,
        )
        if self._schedules is None or not shares[0]:
            return shares * (self._world_size // len(shares))
        missing = max(0, self._schedules.least_micro_batches - len(shares[0]))
        return [shares[0] + (weightless(),) * missing] * self._world_size
