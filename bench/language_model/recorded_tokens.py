"""What a finished run generated and trained on, read from its folder by a trajectory manager."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from seamflow.common.v1 import tokens_pb2
from seamflow.stubs import async_stub
from seamflow.trajectory.v1 import sample_service_pb2 as sample_pb
from seamflow.trajectory.v1 import trajectory_pb2
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb
from seamflow.trajectory.v1.sample_service_pb2_grpc import SampleServiceStub
from seamflow.trajectory.v1.trajectory_service_pb2_grpc import TrajectoryServiceStub

from services.console.sources.private_store import private_store

_PAGE = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDifferences:
    """Of the trained tokens of one sample."""

    step: int
    """Step that trained them."""
    staleness: np.ndarray[Any, np.dtype[np.int64]]
    """Versions between the weights that sampled a token and those that the step began with."""
    differences: np.ndarray[Any, np.dtype[np.float32]]
    """Log-prob in the trainer minus that recorded at sampling, nats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """All training rollouts, and all trained tokens."""

    rollouts: Sequence[trajectory_pb2.RolloutSummary]
    """Closed ones that the policy answered in."""
    tokens: Sequence[TokenDifferences]
    """One for each trained sample."""


async def read_run(folder: Path, run_id: str) -> RecordedRun:
    """Read a finished run that recorded all of its steps ([trainer.tracking] recorded_steps)."""
    async with private_store(folder, run_id) as store:
        channel = store.to("trajectory_manager")
        trajectories = async_stub(TrajectoryServiceStub, channel)
        samples = async_stub(SampleServiceStub, channel)
        rollouts = [each async for each in _rollouts(trajectories, run_id)]
        tokens = [each async for each in _tokens(trajectories, samples, run_id)]
    return RecordedRun(rollouts=rollouts, tokens=tokens)


async def _rollouts(stub: Any, run_id: str) -> AsyncIterator[trajectory_pb2.RolloutSummary]:
    request = pb.SearchRolloutsRequest(
        run_id=run_id, page_size=_PAGE, purpose=tokens_pb2.PURPOSE_TRAIN
    )
    while True:
        page = await stub.SearchRollouts(request)
        for each in page.rollouts:
            if each.HasField("finish_time") and each.num_policy_tokens:
                yield each
        request.page_token = page.next_page_token
        if not request.page_token:
            return


async def _tokens(trajectories: Any, samples: Any, run_id: str) -> AsyncIterator[TokenDifferences]:
    newest = await samples.ListTrainedSamples(
        sample_pb.ListTrainedSamplesRequest(run_id=run_id, page_size=1)
    )
    for step in newest.recorded_steps:
        request = sample_pb.ListTrainedSamplesRequest(
            run_id=run_id, step=step, with_tokens=True, page_size=_PAGE
        )
        while True:
            page = await samples.ListTrainedSamples(request)
            for sample in page.samples:
                yield await _differences(trajectories, run_id, step, sample)
            request.page_token = page.next_page_token
            if not request.page_token:
                break


async def _differences(
    trajectories: Any, run_id: str, step: int, sample: trajectory_pb2.TrainedSample
) -> TokenDifferences:
    _, _, leaf = sample.sample_id.partition("#")
    answer = await trajectories.ReadTokens(
        pb.ReadTokensRequest(
            run_id=run_id,
            rollout_id=sample.rollout_id,
            turn_id=leaf,
            num_tokens=sample.num_tokens,
        )
    )
    versions = np.array(list(_versions(answer.tokens)))
    trained = [np.arange(each.start, each.start + each.num_tokens) for each in sample.spans]
    base = sample.staleness + sample.min_weight_version
    return TokenDifferences(
        step=step,
        staleness=base - versions[np.concatenate(trained)],
        differences=np.frombuffer(sample.logprob_differences, "<f2").astype(np.float32),
    )


def _versions(tokens: tokens_pb2.PackedTokens) -> Iterator[int]:
    """The weight version of each token; 0 of those that none sampled."""
    for span in tokens.spans:
        for _ in range(span.num_tokens):
            yield span.weight_version
