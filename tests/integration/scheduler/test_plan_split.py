"""PlanSplit over real gRPC."""

from __future__ import annotations

from typing import Any

import grpc.aio
import pytest
from seamflow.durations import seconds_of, to_duration
from seamflow.scheduler.v1 import scheduler_service_pb2 as pb

from tests.lib.scheduler.support import running_scheduler


def profile(seconds: dict[int, float]) -> pb.StageProfile:
    """Number of nodes -> seconds."""
    return pb.StageProfile(durations={n: to_duration(each) for n, each in seconds.items()})


GENERATION = profile({8: 500.0, 64: 62.5})
TRAINING = profile({8: 300.0, 64: 37.5})


def request_batch(**fields: Any) -> pb.PlanSplitRequest:
    """A request with a valid profile of both stages by default."""
    return pb.PlanSplitRequest(**{"generation": GENERATION, "training": TRAINING} | fields)


async def test_one_datacentre_is_split() -> None:
    """Nodes of each stage, and the seconds predicted for it."""
    async with running_scheduler() as (_, stub):
        answer = await stub.PlanSplit(request_batch(num_nodes=64))
    assert (answer.num_generation_nodes, answer.num_training_nodes) == (40, 24)
    assert seconds_of(answer.generation_duration) == pytest.approx(100)
    assert seconds_of(answer.training_duration) == pytest.approx(100)


async def test_the_faster_of_two_datacentres_gives_nodes_back() -> None:
    """Training needs 19 of its 64 to keep up."""
    async with running_scheduler() as (_, stub):
        answer = await stub.PlanSplit(request_batch(num_generation_nodes=32, num_training_nodes=64))
    assert (answer.num_generation_nodes, answer.num_training_nodes) == (32, 19)
    assert seconds_of(answer.generation_duration) == pytest.approx(125)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"generation": None, "num_nodes": 64},
            "generation.durations is '0 points': it has 0",
        ),
        ({"training": profile({0: 1.0})}, "training.durations is '1 points': it has"),
        ({"training": profile({-4: 1.0})}, "give positive counts"),
        ({"training": profile({1: 0.0})}, "1 nodes take 0.0 s: give a pos"),
        ({"training": profile({1: 1.0, 2: 3.0})}, "2 nodes take 3.0 s and 1 take"),
        ({}, "num_nodes is 0: give it, or num_generation_nodes and num_training_nodes"),
        ({"num_nodes": 15}, "num_nodes is 15: give 16, the smallest number in the profile, to"),
        ({"num_nodes": -1}, "num_nodes is -1: give 16"),
        ({"num_nodes": 2**31 - 1}, "to 10000"),
        ({"num_nodes": 64, "num_training_nodes": 8}, "num_training_nodes is 8: omit it"),
        ({"num_generation_nodes": 8}, "num_training_nodes is 0: give 8"),
        ({"num_generation_nodes": 7, "num_training_nodes": 8}, "num_generation_nodes is 7: give 8"),
    ],
)
async def test_invalid_requests_are_rejected(fields: dict[str, Any], message: str) -> None:
    """INVALID_ARGUMENT that names the field, its value and the cure."""
    async with running_scheduler() as (_, stub):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.PlanSplit(request_batch(**fields))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert message in (caught.value.details() or "")


async def test_the_largest_pool_is_answered() -> None:
    """A scheduler has heartbeats to answer: the limit is one it can afford."""
    async with running_scheduler() as (_, stub):
        answer = await stub.PlanSplit(request_batch(num_nodes=10_000))
    assert (answer.num_generation_nodes, answer.num_training_nodes) == (64, 39)
