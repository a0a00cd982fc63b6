"""Recorded groups whose lengths depend on their prompts, and a manager that holds them."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import grpc.aio
import numpy as np
from seamflow.common.v1 import tokens_pb2
from seamflow.durations import to_duration
from seamflow.stubs import async_stub
from seamflow.trajectory.v1 import trajectory_pb2
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb
from seamflow.trajectory.v1.run_service_pb2 import CreateRunRequest
from seamflow.trajectory.v1.run_service_pb2_grpc import RunServiceStub
from seamflow.trajectory.v1.trajectory_service_pb2_grpc import TrajectoryServiceStub

from services.chassis.rpc.server import started
from tests.lib.trajectory_manager.memory.store import memory_store
from trajectory_manager.cli import build, service
from trajectory_manager.config import TrajectoryManagerConfig

if TYPE_CHECKING:
    from seamflow.trajectory.v1.trajectory_service_pb2_grpc import TrajectoryServiceAsyncStub


@asynccontextmanager
async def manager(
    run_id: str, group_size: int = 1, redis_url: str | None = None
) -> AsyncIterator[tuple[str, Any]]:
    """A manager with a run; its address and its stub."""
    given = redis_url or "redis://oracle"
    config = TrajectoryManagerConfig(redis_url=given, port=0, admin_port=-1, drain_seconds=0.2)
    in_memory = nullcontext(service(config, memory_store()))
    async with (
        build(config) if redis_url else in_memory as served,
        started(served, config) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        stub = async_stub(TrajectoryServiceStub, channel)
        rules = trajectory_pb2.RunConfig(
            group_size=group_size,
            groups_per_step=1000,
            max_staleness=8,
            staleness_policy=trajectory_pb2.STALENESS_POLICY_MASK,
            lease_duration=to_duration(600),
            durability=trajectory_pb2.DURABILITY_FAST,
        )
        runs = async_stub(RunServiceStub, channel)
        await runs.CreateRun(CreateRunRequest(run_id=run_id, config=rules))
        yield f"127.0.0.1:{port}", stub


def turn(
    turn_id: str, prompt: Sequence[int], num_sampled: int, parent: str = "", prefix: int = 0
) -> trajectory_pb2.Turn:
    """A turn that adds `prompt` and samples so many tokens."""
    environment = tokens_pb2.Span(num_tokens=len(prompt), origin=tokens_pb2.ORIGIN_ENVIRONMENT)
    policy = tokens_pb2.Span(
        start=len(prompt),
        num_tokens=num_sampled,
        origin=tokens_pb2.ORIGIN_POLICY,
        version_source=tokens_pb2.VERSION_SOURCE_ENGINE,
    )
    ids = [*prompt, *[7] * num_sampled]
    return trajectory_pb2.Turn(
        turn_id=turn_id,
        prefix_turn_id=parent,
        prefix_length=prefix,
        tokens=tokens_pb2.Tokens(
            token_ids=ids,
            logprobs=[0.0] * len(prompt) + [-0.5] * num_sampled,
            spans=[environment, policy],
        ),
        finish_reason=tokens_pb2.FINISH_REASON_STOP,
    )


def group(task_id: str, *rollouts: Sequence[trajectory_pb2.Turn]) -> pb.RecordedGroup:
    """A group of complete rollouts."""
    rewards = tokens_pb2.Rewards(rewards=[tokens_pb2.Reward(name="reward", value=1.0)])
    recorded = [pb.RecordedRollout(turns=turns, rewards=rewards) for turns in rollouts]
    return pb.RecordedGroup(task_id=task_id, payload_json="{}", rollouts=recorded)


async def record(
    stub: TrajectoryServiceAsyncStub, run_id: str, groups: Sequence[pb.RecordedGroup]
) -> None:
    """As a tool that imports finished groups does."""
    for first in range(0, len(groups), 32):
        batch = groups[first : first + 32]
        await stub.RecordGroups(pb.RecordGroupsRequest(run_id=run_id, groups=batch))


def prompts(number: int, seed: int = 0) -> list[list[int]]:
    """Ids 1 to 40 at random; hard words, from 41 on, make the answer longer, see `length`."""
    random = np.random.default_rng(seed)
    easy = random.integers(1, 41, (number, 20))
    hard = [random.choice(np.arange(41, 49), random.integers(0, 4), replace=False) for _ in easy]
    return [[*a.tolist(), *b.tolist()] for a, b in zip(easy, hard, strict=True)]


def length(prompt: Sequence[int]) -> int:
    """What the hard words of a prompt make of ten tokens."""
    return round(10 * math.exp(sum((word - 40) / 8 for word in prompt if word > 40)))
