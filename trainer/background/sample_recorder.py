"""Records what each step trained on, for people: never in the way of training.

IDLE -> (`start` after a step) RECORDING -> IDLE. A step that finishes meanwhile is not recorded.

Shape suffixes: T tokens of a sequence, N trained ones.
"""
# ruff: noqa: N803, N806 -- tensors carry shape suffixes

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from seamflow.trajectory.v1 import trajectory_pb2

from services.chassis.log import get_logger
from trainer.clients.sample_client import SampleClient
from trainer.config import TrainerConfig
from trainer.data.token_sequence import TokenSequence, without_truncated
from trainer.policy.forward import TokenValues
from trainer.ranks.rank_group import RankGroup

_RANK_SECONDS = 30.0
"""Longest wait for what the ranks send."""
_RECORD_SECONDS = 60.0
"""Longest time for a step to be received and recorded."""


class SampleRecorder:
    """Sends samples of finished steps to the trajectory manager."""

    def __init__(self, config: TrainerConfig, ranks: RankGroup, samples: SampleClient) -> None:
        self._config = config
        self._ranks, self._samples = ranks, samples
        self._task: asyncio.Task[None] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether the next step will be recorded."""
        is_idle = self._task is None or self._task.done()
        return self._config.tracking.recorded_steps > 0 and is_idle

    def start(
        self, step: int, base_weight_version: int, sequences: Sequence[TokenSequence]
    ) -> None:
        """Record a step, whose rows the ranks were told to send while this was ready."""
        self._task = asyncio.create_task(self._record(step, base_weight_version, sequences))

    async def finish(self) -> None:
        """Wait until nothing is in flight."""
        if self._task is not None:
            await asyncio.wait({self._task})

    async def _record(
        self, step: int, base_weight_version: int, sequences: Sequence[TokenSequence]
    ) -> None:
        try:
            async with asyncio.timeout(_RECORD_SECONDS):
                await self._send(step, base_weight_version, sequences)
        except Exception as error:  # people miss a step; training must not
            get_logger().warning("trained_samples_not_recorded", step=step, error=str(error))

    async def _send(
        self, step: int, base_weight_version: int, sequences: Sequence[TokenSequence]
    ) -> None:
        values = await self._ranks.trained_rows(step, _RANK_SECONDS)
        algorithm = self._config.algorithm
        samples = await asyncio.to_thread(
            trained_samples,
            without_truncated(sequences) if algorithm.mask_truncated else sequences,
            values,
            reward=algorithm.trained_reward,
            base_weight_version=base_weight_version,
        )
        await self._samples.record_trained(step, samples, self._config.tracking.recorded_steps)


def trained_samples(
    sequences: Sequence[TokenSequence],
    values: Mapping[int, TokenValues],
    *,
    reward: str,
    base_weight_version: int,
) -> list[trajectory_pb2.TrainedSample]:
    """A message for each sequence.

    Args:
        sequences: of the step, in the order they were numbered in.
        values: of the trained tokens, by number; fields of those without are absent.
        reward: name of the trained reward.
        base_weight_version: staleness is counted from it.
    """
    return [
        _message(item, values.get(number), reward, base_weight_version)
        for number, item in enumerate(sequences)
    ]


def _message(
    item: TokenSequence, values: TokenValues | None, reward: str, base: int
) -> trajectory_pb2.TrainedSample:
    versions = item.weight_versions_T[item.loss_mask_T]
    oldest = int(versions.min()) if len(versions) else base
    message = trajectory_pb2.TrainedSample(
        sample_id=item.sample_id,
        rollout_id=item.rollout_id,
        group_id=item.group_id,
        reward=item.rewards.get(reward),
        staleness=base - oldest,
        min_weight_version=oldest,
        max_weight_version=int(versions.max()) if len(versions) else base,
        num_tokens=len(item.token_ids_T),
        num_trained_tokens=len(versions),
        replayed=item.replayed,
        spans=_spans(item.loss_mask_T),
    )
    # A row that was trained on other tokens than these is none of this sequence.
    if values is not None and 0 < len(values.logprob_differences) == len(versions):
        _add_values(message, values)
    return message


def _add_values(message: trajectory_pb2.TrainedSample, values: TokenValues) -> None:
    difference_N = values.logprob_differences.astype(np.float64)
    ratio_N = np.exp(np.minimum(difference_N, 700.0))  # exp(710) is infinite
    message.ratio_mean, message.ratio_max = float(ratio_N.mean()), float(ratio_N.max())
    message.logprob_difference_mean = float(np.abs(difference_N).mean())
    message.logprob_difference_max = float(np.abs(difference_N).max())
    message.logprob_differences = values.logprob_differences.astype("<f2").tobytes()
    if values.advantages is not None:
        message.advantage_mean = float(values.advantages.astype(np.float64).mean())
        message.advantages = _once(values.advantages.astype("<f2")).tobytes()


def _once(values_N: NDArray[np.float16]) -> NDArray[np.float16]:
    """One value, if all are the same."""
    return values_N[:1] if (values_N == values_N[0]).all() else values_N


def _spans(mask_T: NDArray[np.bool_]) -> Iterator[trajectory_pb2.TrainedSpan]:
    edges = np.flatnonzero(np.diff(mask_T.astype(np.int8), prepend=0, append=0))
    for start, stop in edges.reshape(-1, 2).tolist():
        yield trajectory_pb2.TrainedSpan(start=start, num_tokens=stop - start)
