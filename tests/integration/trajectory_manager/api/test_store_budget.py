"""The bytes in flight to the store are bounded over all calls."""

from __future__ import annotations

from typing import Any

import pytest
from seamflow.common.v1 import tokens_pb2
from seamflow.trajectory.v1 import trajectory_pb2
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb

from services.chassis.errors import Reason, ServiceError
from tests.lib.trajectory_manager.client import rewards
from tests.lib.trajectory_manager.support import Run
from trajectory_manager.api.trajectory_servicer import TrajectoryServicer
from trajectory_manager.cli import store_budget


def test_one_message_alone_always_passes() -> None:
    """Whatever its size: otherwise it could never be sent."""
    inflight = store_budget(100)
    with inflight.reserve(1000), pytest.raises(ServiceError), inflight.reserve(1):
        pass
    with inflight.reserve(60), inflight.reserve(40):
        pass


async def test_every_call_that_brings_tokens_is_bounded(run: Run) -> None:
    """Beyond the bound each gets STORE_FULL with a retry time."""
    inflight = store_budget(100)
    servicer: Any = TrajectoryServicer(run.store, run.rollouts, inflight, max_turn_tokens=1000)
    span = tokens_pb2.Span(num_tokens=1, origin=tokens_pb2.ORIGIN_ENVIRONMENT)
    packed = tokens_pb2.PackedTokens(token_ids=bytes(4), logprobs=bytes(4), spans=[span])
    tokens = tokens_pb2.Tokens(token_ids=[0], logprobs=[0.0], spans=[span])
    stop = tokens_pb2.FINISH_REASON_STOP
    rollout = pb.RecordedRollout(
        turns=[trajectory_pb2.Turn(turn_id="t", tokens=tokens, finish_reason=stop)],
        rewards=rewards(),
    )
    groups = [pb.RecordedGroup(task_id="a", rollouts=[rollout])]
    append = pb.TokenAppend(run_id=run.run_id, rollout_id="a", turn_id="t", tokens=packed)
    requests = {
        "AppendTokens": pb.AppendTokensRequest(appends=[append]),
        "RecordGroups": pb.RecordGroupsRequest(run_id=run.run_id, groups=groups),
    }
    for method, request in requests.items():
        with inflight.reserve(100), pytest.raises(ServiceError) as caught:
            await getattr(servicer, method)(request, None)
        assert caught.value.reason is Reason.STORE_FULL
        assert caught.value.retry_after
