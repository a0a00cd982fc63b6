"""Leased samples that can be trained; the trajectory manager replaces the groups of the others."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from seamflow.trajectory.v1 import sample_service_pb2 as sample_pb2
from seamflow.trajectory.v1 import trajectory_pb2

from services.chassis import metrics
from services.chassis.errors import ConfigError
from services.lib.routed_experts import RoutingShape
from trainer.clients.sample_client import SampleClient
from trainer.config import TrainerConfig
from trainer.data.gradient_chunks import GroupChunker
from trainer.data.sample_reader import SampleReader
from trainer.data.token_sequence import TokenSequence
from trainer.data.trained_reward import unknown_rewards
from trainer.tracking.alarms import Alarms

_MAX_REJECTED_GROUPS = 64
"""A group that cannot be trained is replaced; after more than this many in a row the trainer
ends, since all agents err."""


class AcceptedSamples:
    """Checks what a step has leased before any rank gets it.

    Args:
        config: of the trainer.
        samples: client of the trajectory manager.
        alarms: get a line for each rejected group.
        vocabulary_size: token ids of the model are below it.
        routing: how its routers choose, or why they cannot replay recorded experts.
    """

    def __init__(
        self,
        config: TrainerConfig,
        samples: SampleClient,
        alarms: Alarms,
        vocabulary_size: int,
        routing: RoutingShape | str,
    ) -> None:
        self._samples, self._alarms = samples, alarms
        replayed = routing if config.batch.replay_routed_experts else None
        self._reader = SampleReader(config.algorithm, vocabulary_size, replayed)
        self._num_in_a_row = 0
        self.named_rewards: Mapping[str, Collection[str]] = {}
        """Names of rewards in settings, by setting; empty once rollouts have shown theirs."""
        self._rejections = metrics.counter(
            "trainer", "rejected_groups_total", "Groups that could not be trained"
        )

    async def read(
        self,
        step: int,
        leased: sample_pb2.LeaseSamplesResponse,
        chunker: GroupChunker | None = None,
    ) -> list[TokenSequence] | None:
        """The sequences of a page of `step`; None: groups were rejected, lease the page again.

        Args:
            step: leased under this trainer's epoch.
            leased: a page of it, or all.
            chunker: has the earlier samples of a streamed step; forgets those of rejected groups.

        Raises:
            ConfigError: too many groups in a row cannot be trained.
        """
        found = self._reader.read(leased.samples)
        if found.sequences:
            self._num_in_a_row = 0
            self._check_names(leased.samples)
        if not found.rejected:
            return found.sequences
        await self.reject(step, found.rejected)
        if chunker is not None:
            chunker.drop(found.rejected)
        return None

    def _check_names(self, samples: Iterable[trajectory_pb2.Sample]) -> None:
        named, self.named_rewards = self.named_rewards, {}
        if named:
            found = {reward.name for sample in samples for reward in sample.rewards}
            if text := unknown_rewards(named, found):
                self._alarms.add(text)

    async def reject(self, step: int, messages: Mapping[str, str]) -> None:
        """Let the manager replace groups; `messages` by group say why. Raises as `read`."""
        self._num_in_a_row += len(messages)
        group_id, message = next(iter(messages.items()))
        if self._num_in_a_row > _MAX_REJECTED_GROUPS:
            raise ConfigError(
                f"{self._num_in_a_row} groups in a row cannot be trained, the last one because "
                f"{message}"
            )
        await self._samples.reject(step, messages)
        for group_id, message in messages.items():
            self._rejections.inc()
            self._alarms.add(
                f"group {group_id!r} of step {step} cannot be trained and was replaced: {message}"
            )
