"""An agent that plays the rollouts of evaluations, on a trajectory manager."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable

from google.protobuf.duration_pb2 import Duration
from seamflow.common.v1 import tokens_pb2
from seamflow.trajectory.v1 import task_service_pb2 as task_pb
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb

from bench.harness.store_calls import send_async
from tests.lib.trajectory_manager.client import CREDENTIAL, Client, message


async def lease(client: Client) -> task_pb.TaskLease | None:
    """An EVAL rollout; None: nothing is queued."""
    request = task_pb.LeaseTasksRequest(
        run_id="run",
        request_id=uuid.uuid4().hex,
        purpose=tokens_pb2.PURPOSE_EVAL,
        wait=Duration(nanos=20_000_000),
        max_leases=1,
    )
    answer = await client.tasks.LeaseTasks(request)
    return answer.leases[0] if answer.leases else None


async def play(client: Client, given: task_pb.TaskLease, version: int) -> None:
    """Start the rollout and sample one turn."""
    start = pb.NewRollout(
        run_id="run",
        rollout_id=given.rollout_id,
        lease_token=given.lease_token,
        purpose=tokens_pb2.PURPOSE_EVAL,
        credential_digest=CREDENTIAL,
        pinned_weight_version=given.task.pinned_weight_version,
    )
    await send_async(client.trajectories, start)
    begun = await client.begin(given.rollout_id, "t", [1])
    await client.append(given.rollout_id, "t", begun.epoch, 0, message([1]))
    sampled = message([2], tokens_pb2.ORIGIN_POLICY, version)
    await client.append(given.rollout_id, "t", begun.epoch, 1, sampled)
    await client.end(given.rollout_id, "t", begun.epoch)


async def agent(
    client: Client, finish: Callable[[str], Awaitable[None]], version: int | None = None
) -> None:
    """Play all that is leased, with one version or with the pinned one."""
    while True:
        given = await lease(client)
        if given is not None:
            pinned = given.task.pinned_weight_version
            await play(client, given, pinned if version is None else version)
            await finish(given.rollout_id)
