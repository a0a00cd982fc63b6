"""The command of each rank that computes the gradient of a chunk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from trainer.algorithms.base import make_algorithm
from trainer.commands import Accumulate, Predict
from trainer.config import TrainerConfig
from trainer.data.advantages import SequenceAdvantages, compute_advantages
from trainer.data.micro_batch import MicroBatch, plan_micro_batches, weightless
from trainer.data.row_cost import model_cost
from trainer.data.token_sequence import TokenSequence, trainable_tokens, without_truncated
from trainer.pipeline.layout import layout_of
from trainer.pipeline.pipeline_backend import critic_stages
from trainer.pipeline.schedule import Schedules

_PER_STAGE = 2
"""Micro-batches of a pipeline, relative to its stages: fewer leave ranks idle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniBatch:
    """The commands of a mini-batch, in rank order."""

    predict: list[Predict]
    """At the start of the step: with the rows, which the ranks keep."""
    accumulate: list[Accumulate]
    """Before each of its updates, without rows."""


class ChunkCommands:
    """Cuts chunks into micro-batches, and plans who computes which when."""

    def __init__(self, config: TrainerConfig, world_size: int, *, packed: bool) -> None:
        self._config = config
        self.world_size = world_size
        self._packed = packed
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
        first_number: int = 0,
    ) -> list[Accumulate]:
        """The commands, in rank order.

        Args:
            shuffle: permutes the rewards, if given.
            first_number: of the sequences in the step.
        """
        numbers = range(first_number, first_number + len(sequences))
        advantages = compute_advantages(sequences, self._algorithm, self._config, shuffle)
        return self._commands(sequences, advantages, weight_version, None, numbers)

    def mini_batches(
        self,
        sequences: Sequence[TokenSequence],
        weight_version: int,
        order: np.random.Generator,
        shuffle: np.random.Generator | None = None,
    ) -> list[MiniBatch]:
        """The commands of each mini-batch; advantages are those of the whole step.

        Args:
            order: deals the groups to the mini-batches.
            shuffle: permutes the rewards, if given.
        """
        whole = compute_advantages(sequences, self._algorithm, self._config, shuffle)
        return [
            self._mini_batch(
                self._commands(
                    [sequences[row] for row in rows],
                    self._part(sequences, whole, rows),
                    weight_version,
                    number,
                    rows,
                )
            )
            for number, rows in enumerate(self._dealt(sequences, order))
        ]

    def _mini_batch(self, commands: Sequence[Accumulate]) -> MiniBatch:
        """Rows go to the ranks once, to be predicted."""
        actions = (
            [()] * self.world_size
            if self._schedules is None
            else self._schedules.predictions(len(commands[0].micro_batches))
        )
        return MiniBatch(
            predict=[
                Predict(
                    mini_batch=each.mini_batch or 0, micro_batches=each.micro_batches, actions=mine
                )
                for each, mine in zip(commands, actions, strict=True)
            ],
            accumulate=[replace(each, micro_batches=()) for each in commands],
        )

    def _dealt(
        self, sequences: Sequence[TokenSequence], order: np.random.Generator
    ) -> list[list[int]]:
        """The rows of each mini-batch: whole groups, about as many in each."""
        names = list(dict.fromkeys(item.group_id for item in sequences))
        parts = np.array_split(
            order.permutation(len(names)), self._config.algorithm.num_mini_batches
        )
        chosen = [{names[place] for place in part} for part in parts if len(part)] or [set()]
        return [
            [row for row, item in enumerate(sequences) if item.group_id in each] for each in chosen
        ]

    def _part(
        self, sequences: Sequence[TokenSequence], whole: SequenceAdvantages, rows: Sequence[int]
    ) -> SequenceAdvantages:
        """Of some rollouts; their weights and denominators depend on no others."""
        own = compute_advantages([sequences[row] for row in rows], self._algorithm, self._config)
        return replace(
            own,
            advantages_N=whole.advantages_N[list(rows)],
            turn_rewards_N=[whole.turn_rewards_N[row] for row in rows],
        )

    def _commands(
        self,
        sequences: Sequence[TokenSequence],
        advantages: SequenceAdvantages,
        weight_version: int,
        mini_batch: int | None,
        numbers: Sequence[int],
    ) -> list[Accumulate]:
        if self._config.algorithm.mask_truncated:
            sequences = without_truncated(sequences)
        shares = self._shares(sequences, advantages, numbers)
        actions = (
            [()] * self.world_size
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
                mini_batch=mini_batch,
            )
            for share, mine in zip(shares, actions, strict=True)
        ]

    def report(self, answers: Sequence[Mapping[str, float]]) -> None:
        """Take note of what the ranks answered to the commands of a chunk."""
        if self._schedules is not None:
            self._schedules.report(answers)

    def _shares(
        self,
        sequences: Sequence[TokenSequence],
        advantages: SequenceAdvantages,
        numbers: Sequence[int],
    ) -> Sequence[tuple[MicroBatch, ...]]:
        """Of each rank; all ranks of a pipeline get all, and those of a context group the same."""
        pipelined = self._schedules is not None
        together = self._config.context_parallel
        shares = plan_micro_batches(
            sequences,
            advantages,
            num_ranks=1 if pipelined else self.world_size // together,
            micro_batch_tokens=self._config.batch.micro_batch_tokens,
            packed=self._packed,
            whole_groups=self._algorithm.whole_groups,
            at_least=_PER_STAGE * self.world_size if pipelined else 1,
            cost=model_cost(self._config.model),
            numbers=numbers,
        )
        if self._schedules is None:
            # After the loss of a rank some may be in no group.
            given = [share for share in shares for _ in range(together)]
            spare = (weightless(),) * len(shares[0])
            return given + [spare] * (self.world_size - len(given))
        if not shares[0]:
            return shares * self.world_size
        missing = max(0, self._schedules.least_micro_batches - len(shares[0]))
        return [shares[0] + (weightless(),) * missing] * self.world_size
