"""What the command line asks, served as one small run called "demo"."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.timestamp_pb2 import Timestamp
from grpc_health.v1 import health, health_pb2_grpc
from seamflow.common.v1 import tokens_pb2
from seamflow.rollout.v1 import rollout_server_service_pb2 as server_pb
from seamflow.rollout.v1 import rollout_server_service_pb2_grpc as server_grpc
from seamflow.scheduler.v1 import scheduler_service_pb2 as scheduler_pb
from seamflow.scheduler.v1 import scheduler_service_pb2_grpc as scheduler_grpc
from seamflow.trainer.v1 import trainer_service_pb2 as trainer_pb
from seamflow.trainer.v1 import trainer_service_pb2_grpc as trainer_grpc
from seamflow.trajectory.v1 import sample_service_pb2 as sample_pb
from seamflow.trajectory.v1 import sample_service_pb2_grpc as sample_grpc
from seamflow.trajectory.v1 import trajectory_pb2
from seamflow.trajectory.v1 import trajectory_service_pb2 as trajectory_service_pb
from seamflow.trajectory.v1 import trajectory_service_pb2_grpc as trajectory_grpc
from seamflow.weights.v1 import weight_service_pb2 as weight_pb
from seamflow.weights.v1 import weight_service_pb2_grpc as weight_grpc

from tests.lib.sdk.support import Added

ADDRESSES = ("trajectory_manager", "rollout_gateway", "scheduler", "trainer", "weights")


def write_addresses(folder: Path, address: str, **other: str) -> None:
    """What the launcher writes."""
    folder.mkdir(parents=True, exist_ok=True)
    addresses = {"run_id": "demo", **dict.fromkeys(ADDRESSES, address), **other}
    (folder / "addresses.json").write_text(json.dumps(addresses))


def now() -> Timestamp:
    """The present."""
    return Timestamp(seconds=int(time.time()))


def policy(start: int, num_tokens: int, version: int) -> tokens_pb2.Span:
    """Sampled tokens."""
    return tokens_pb2.Span(
        start=start,
        num_tokens=num_tokens,
        origin=tokens_pb2.ORIGIN_POLICY,
        weight_version=version,
        server_id="s0",
    )


def environment(start: int, num_tokens: int) -> tokens_pb2.Span:
    """Prompt tokens."""
    return tokens_pb2.Span(start=start, num_tokens=num_tokens, origin=tokens_pb2.ORIGIN_ENVIRONMENT)


def turn(
    name: str, ids: list[int], *spans: tokens_pb2.Span, ended: bool = False
) -> trajectory_pb2.Turn:
    """A stored turn."""
    return trajectory_pb2.Turn(
        turn_id=name,
        tokens=tokens_pb2.Tokens(token_ids=ids, logprobs=[0.0] * len(ids), spans=spans),
        finish_reason=tokens_pb2.FINISH_REASON_STOP if ended else 0,  # type: ignore[arg-type]
    )


def trajectory(*turns: trajectory_pb2.Turn, reward: float | None = None) -> Any:
    """A stored rollout; with a reward it is finished."""
    given = tokens_pb2.Reward(name="reward", value=reward or 0.0)
    rewards = None if reward is None else tokens_pb2.Rewards(rewards=[given])
    state = "RUNNING" if reward is None else "FINISHED"
    return trajectory_pb2.Trajectory(
        run_id="demo",
        rollout_id="r1",
        state=trajectory_pb2.RolloutState.Value(f"ROLLOUT_STATE_{state}"),
        turns=turns,
        rewards=rewards,
        create_time=now(),
    )


class Run(  # type: ignore[misc]  # TrainerService and RolloutServerService each have a Resume
    sample_grpc.SampleServiceServicer,
    trajectory_grpc.TrajectoryServiceServicer,
    scheduler_grpc.SchedulerServiceServicer,
    trainer_grpc.TrainerServiceServicer,
    weight_grpc.WeightServiceServicer,
    server_grpc.RolloutServerServiceServicer,
):
    """Every service of a run whose trainer waits for groups."""

    def __init__(self) -> None:
        self.node = scheduler_pb.Node(
            node_id="n0",
            capability_tags=["rollout", "train"],
            assignment=scheduler_pb.Assignment(tag="rollout", epoch=7, lent=True),
            state=scheduler_pb.NODE_STATE_ACTIVE,
            reported_epoch=7,
            heartbeat_time=now(),
        )
        """The only node."""
        self.snapshots: list[list[trajectory_pb2.Trajectory]] = []
        """What WatchTrajectory sends on each call; all but the last break the stream."""

    def offer_server(self, address: str) -> None:
        """Let the node run a rollout server at this address."""
        self.node.workers.add(tag="rollout", address=address)

    async def GetReadiness(self, request: Any, context: Any) -> Any:
        """Two of four groups are ready."""
        if request.run_id != "demo":
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no run {request.run_id!r}")
        readiness = sample_pb.Readiness(
            num_ready_groups=2,
            num_running_groups=3,
            num_running_rollouts=12,
            num_admissible_groups=1,
            num_queued_tasks=40,
            groups_per_step=4,
            leased_step=7,
            committed_step=6,
            num_admitted_groups=31,
            num_discarded_groups=2,
            num_replaced_samples=5,
            num_dead_letters=2,
            num_stored_tokens=123_456,
        )
        return sample_pb.GetReadinessResponse(readiness=readiness)

    async def ListTrajectories(self, request: Any, context: Any) -> Any:
        """A finished rollout on the first page, a running one on the second."""
        if not request.page_token:
            return trajectory_service_pb.ListTrajectoriesResponse(
                trajectories=[trajectory(reward=1.0)], next_page_token="2"
            )
        return trajectory_service_pb.ListTrajectoriesResponse(trajectories=[trajectory()])

    async def WatchTrajectory(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """The next list of snapshots."""
        for snapshot in self.snapshots.pop(0):
            yield trajectory_service_pb.WatchTrajectoryResponse(trajectory=snapshot)
        if self.snapshots:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the store restarts")

    async def ListNodes(self, request: Any, context: Any) -> Any:
        """The node."""
        return scheduler_pb.ListNodesResponse(nodes=[self.node])

    async def WatchAllocations(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """One entry, then silence."""
        event = scheduler_pb.AllocationEvent(
            sequence=1, event_time=now(), node=self.node, kind="assigned"
        )
        yield scheduler_pb.WatchAllocationsResponse(events=[event])
        await asyncio.Event().wait()

    async def DrainNode(self, request: Any, context: Any) -> Any:
        """Mark the node."""
        if request.node_id != self.node.node_id:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no node {request.node_id!r}")
        self.node.draining = request.drain
        return scheduler_pb.DrainNodeResponse(node=self.node)

    async def GetStatus(self, request: Any, context: Any) -> Any:
        """Waits after step 6."""
        return trainer_pb.GetStatusResponse(
            run_id="demo",
            state=trainer_pb.TRAINER_STATE_WAITING,
            step=6,
            num_steps=200,
            weight_version=6,
            world_size=2,
            checkpoint_step=5,
            metrics={"loss": 0.125},
        )

    async def GetManifest(self, request: Any, context: Any) -> Any:
        """Version 6."""
        manifest = weight_pb.Manifest(weight_version=6, step=6, commit_time=now())
        return weight_pb.GetManifestResponse(manifest=manifest)

    async def GetServerInfo(self, request: Any, context: Any) -> Any:
        """Serves version 6."""
        return server_pb.GetServerInfoResponse(
            server_id="s0",
            state=server_pb.SERVER_STATE_SERVING,
            weight_version=6,
            num_running=8,
            max_running=16,
            tokens_per_second=930.0,
        )

    def added(self) -> list[Added]:
        """For `serving`: every service, and the health that a gateway has."""
        checks = health.aio.HealthServicer()
        return [
            (sample_grpc.add_SampleServiceServicer_to_server, self),
            (trajectory_grpc.add_TrajectoryServiceServicer_to_server, self),
            (scheduler_grpc.add_SchedulerServiceServicer_to_server, self),
            (trainer_grpc.add_TrainerServiceServicer_to_server, self),
            (weight_grpc.add_WeightServiceServicer_to_server, self),
            (server_grpc.add_RolloutServerServiceServicer_to_server, self),
            (health_pb2_grpc.add_HealthServicer_to_server, checks),
        ]
