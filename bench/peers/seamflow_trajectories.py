"""seamflow: whole trajectories through gRPC and Redis in series, one by one or in batches.

Each trajectory is a group of its own, recorded by RecordGroups and read by the trainer's leases.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import uvloop
from seamflow.channel import connect
from seamflow.common.v1 import tokens_pb2
from seamflow.trajectory.v1 import trajectory_pb2
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb
from seamflow.trajectory.v1.trajectory_service_pb2_grpc import TrajectoryServiceStub

from bench.peers.child import Child
from bench.peers.seamflow_run import RUN_ID, create_run, manager, packed, read
from bench.peers.workload import (
    Options,
    Reads,
    Result,
    Trajectory,
    Writes,
    make_parser,
    make_trajectories,
)

if TYPE_CHECKING:
    from seamflow.trajectory.v1.trajectory_service_pb2_grpc import TrajectoryServiceAsyncStub

__all__ = ["main"]


def main() -> None:
    """Write in this process, read in another, record in a third."""
    parser = make_parser(__doc__)
    parser.add_argument("--put", choices=("one", "batch"), default="one")
    arguments = parser.parse_args()
    options = Options.of(arguments)
    work = make_trajectories(options)
    writes, reads = uvloop.run(run(work, options, arguments.put == "batch"))
    Result.of(f"seamflow_put_{arguments.put}", work, writes, reads).print()


async def run(work: Sequence[Trajectory], options: Options, batched: bool) -> tuple[Writes, Reads]:
    """Start the manager and move the workload."""
    async with manager(options) as target, connect(target) as channel:
        await create_run(channel, options, trajectory_pb2.DURABILITY_FAST)
        store: TrajectoryServiceAsyncStub = TrajectoryServiceStub(channel)  # type: ignore[assignment]
        with Child(read, options, target) as reader:
            await asyncio.to_thread(reader.receive)
            if batched:
                puts = [work[i : i + options.batch] for i in range(0, len(work), options.batch)]
                writes = await _write(store, puts, num_writers=1)
            else:
                writes = await _write(store, [[one] for one in work], options.writers)
            return writes, await asyncio.to_thread(reader.receive)


async def _write(
    store: TrajectoryServiceAsyncStub, puts: Sequence[Sequence[Trajectory]], num_writers: int
) -> Writes:
    untaken = iter(puts)
    latencies: list[float] = []

    async def write() -> None:
        for put in untaken:
            sent = time.monotonic()
            request = pb.RecordGroupsRequest(run_id=RUN_ID, groups=_groups(put))
            await store.RecordGroups(request)
            latencies.append(time.monotonic() - sent)

    started = time.monotonic()
    async with asyncio.TaskGroup() as writers:
        for _ in range(num_writers):
            writers.create_task(write())
    return Writes(started=started, ended=time.monotonic(), latencies=latencies)


def _groups(put: Sequence[Trajectory]) -> Iterator[pb.RecordedGroup]:
    for trajectory in put:
        turn = pb.RecordedTurn(
            turn_id="turn",
            tokens=packed(trajectory.segments),
            finish_reason=tokens_pb2.FINISH_REASON_STOP,
            temperature=1.0,
        )
        rewards = [tokens_pb2.Reward(name="reward", value=1.0)]
        rollout = pb.RecordedRollout(turns=[turn], rewards=rewards)
        yield pb.RecordedGroup(task_id=str(trajectory.index), rollouts=[rollout])


if __name__ == "__main__":
    main()
