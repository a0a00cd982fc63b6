"""seamflow: whole trajectories through gRPC and Redis in series, one by one or in batches.

Each trajectory is a group of its own, recorded by RecordGroups and read by the trainer's leases.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import uvloop
from seamflow.channel import connect
from seamflow.common.v1 import tokens_pb2
from seamflow.stubs import async_stub
from seamflow.trajectory.v1 import trajectory_pb2
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb
from seamflow.trajectory.v1.trajectory_service_pb2_grpc import TrajectoryServiceStub

from bench.baselines.store.child import Child
from bench.baselines.store.seamflow_run import RUN_ID, create_run, manager, packed, read
from bench.baselines.store.workload import (
    Options,
    Reads,
    Result,
    Trajectory,
    Writes,
    make_parser,
    make_trajectories,
)
from bench.harness.store_calls import unpacked

if TYPE_CHECKING:
    from seamflow.trajectory.v1.trajectory_service_pb2_grpc import TrajectoryServiceAsyncStub

_MAX_GROUPS = 32
_MAX_UNDER_WAY = 2


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
        store = async_stub(TrajectoryServiceStub, channel)
        recorder = GroupRecorder(store)
        puts = [work[i : i + options.batch] for i in range(0, len(work), options.batch)]
        with Child(read, options, target) as reader:
            await asyncio.to_thread(reader.receive)
            sending = asyncio.create_task(recorder.keep_sending())
            try:
                if batched:
                    writes = await _write(recorder, puts, num_writers=1)
                else:
                    writes = await _write(recorder, [[one] for one in work], options.writers)
            finally:
                sending.cancel()
            return writes, await asyncio.to_thread(reader.receive)


class GroupRecorder:
    """RecordGroups for many writers: what waits goes out together, a few messages at a time."""

    def __init__(self, store: TrajectoryServiceAsyncStub) -> None:
        self._store = store
        self._waiting: asyncio.Queue[tuple[pb.RecordedGroup, asyncio.Future[None]]]
        self._waiting = asyncio.Queue()

    async def record(self, trajectory: Trajectory) -> None:
        """Return when the trajectory is stored and its group complete."""
        stored: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.put_nowait((_group(trajectory), stored))
        await stored

    async def keep_sending(self) -> None:
        """Runs until cancelled."""
        async with asyncio.TaskGroup() as senders:
            for _ in range(_MAX_UNDER_WAY):
                senders.create_task(self._send_messages())

    async def _send_messages(self) -> None:
        while True:
            message = [await self._waiting.get()]
            while len(message) < _MAX_GROUPS and not self._waiting.empty():
                message.append(self._waiting.get_nowait())
            groups = [group for group, _ in message]
            await self._store.RecordGroups(pb.RecordGroupsRequest(run_id=RUN_ID, groups=groups))
            for _, stored in message:
                stored.set_result(None)


async def _write(
    recorder: GroupRecorder, puts: Sequence[Sequence[Trajectory]], num_writers: int
) -> Writes:
    untaken = iter(puts)
    latencies: list[float] = []

    async def write() -> None:
        for put in untaken:
            sent = time.monotonic()
            await asyncio.gather(*map(recorder.record, put))
            latencies.append(time.monotonic() - sent)

    started = time.monotonic()
    async with asyncio.TaskGroup() as writers:
        for _ in range(num_writers):
            writers.create_task(write())
    return Writes(started=started, ended=time.monotonic(), latencies=latencies)


def _group(trajectory: Trajectory) -> pb.RecordedGroup:
    turn = trajectory_pb2.Turn(
        turn_id="turn",
        tokens=unpacked(packed(trajectory.segments)),
        finish_reason=tokens_pb2.FINISH_REASON_STOP,
    )
    rewards = tokens_pb2.Rewards(rewards=[tokens_pb2.Reward(name="reward", value=1.0)])
    rollout = pb.RecordedRollout(turns=[turn], rewards=rewards)
    return pb.RecordedGroup(task_id=str(trajectory.index), rollouts=[rollout])


if __name__ == "__main__":
    main()
