"""seamflow: appends through gRPC and Redis in series, as the gateway sends them.

Tasks are leased and turns opened beforehand; what is timed is each append until its
acknowledgement, the end of each rollout included, and the batches that the trainer leases.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc.aio
import uvloop
from seamflow.channel import connect
from seamflow.common.v1 import tokens_pb2
from seamflow.stubs import async_stub
from seamflow.trajectory.v1 import task_service_pb2, trajectory_pb2
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb
from seamflow.trajectory.v1.task_service_pb2_grpc import TaskServiceStub
from seamflow.trajectory.v1.trajectory_service_pb2_grpc import TrajectoryServiceStub

from bench.baselines.store.child import Child
from bench.baselines.store.seamflow_run import CREDENTIAL, RUN_ID, create_run, manager, pack, read
from bench.baselines.store.workload import (
    Options,
    Reads,
    Result,
    Trajectory,
    Writes,
    make_parser,
    make_trajectories,
    write_segments,
)
from bench.harness.store_calls import send_async
from rollout.gateway.record.recorder import Recorder

if TYPE_CHECKING:
    from seamflow.trajectory.v1.task_service_pb2_grpc import TaskServiceAsyncStub

_TURN = "turn"
_MAX_OPENING = 32


@dataclass(slots=True)
class _OpenTurn:
    """A rollout with its only turn."""

    rollout_id: str
    epoch: int
    num_tokens: int = 0


def main() -> None:
    """Write in this process, read in another, record in a third."""
    parser = make_parser(__doc__)
    parser.add_argument("--durability", choices=("fast", "durable", "replicated"), default="fast")
    arguments = parser.parse_args()
    options = Options.of(arguments)
    work = make_trajectories(options)
    writes, reads = uvloop.run(run(work, options, arguments.durability))
    Result.of(f"seamflow_{arguments.durability}", work, writes, reads).print()


async def run(
    work: Sequence[Trajectory], options: Options, durability: str
) -> tuple[Writes, Reads]:
    """Start the manager, open a turn for each trajectory, and move the workload."""
    async with manager(options, durability) as target, connect(target) as channel:
        await create_run(
            channel, options, trajectory_pb2.Durability.Value(f"DURABILITY_{durability.upper()}")
        )
        turns = await open_turns(channel, len(work))
        with Child(read, options, target) as reader:
            await asyncio.to_thread(reader.receive)
            writes = await write(channel, work, options, turns)
            return writes, await asyncio.to_thread(reader.receive)


async def open_turns(channel: grpc.aio.Channel, number: int) -> list[_OpenTurn]:
    """Submit, lease, start and open as many rollouts."""
    tasks = async_stub(TaskServiceStub, channel)
    submitted = [
        trajectory_pb2.Task(task_id=str(i), purpose=tokens_pb2.PURPOSE_TRAIN) for i in range(number)
    ]
    await tasks.SubmitTasks(task_service_pb2.SubmitTasksRequest(run_id=RUN_ID, tasks=submitted))
    room = asyncio.Semaphore(_MAX_OPENING)

    async def opened() -> _OpenTurn:
        async with room:
            return await _open_turn(channel, tasks)

    return await asyncio.gather(*(opened() for _ in range(number)))


async def _open_turn(channel: grpc.aio.Channel, tasks: TaskServiceAsyncStub) -> _OpenTurn:
    store = async_stub(TrajectoryServiceStub, channel)
    request = task_service_pb2.LeaseTasksRequest(run_id=RUN_ID, request_id=uuid.uuid4().hex)
    (lease,) = (await tasks.LeaseTasks(request)).leases
    start = pb.NewRollout(
        run_id=RUN_ID,
        rollout_id=lease.rollout_id,
        lease_token=lease.lease_token,
        purpose=tokens_pb2.PURPOSE_TRAIN,
        credential_digest=CREDENTIAL,
    )
    await send_async(store, start)
    begin = pb.NewTurn(
        run_id=RUN_ID,
        rollout_id=lease.rollout_id,
        turn_id=_TURN,
        attempt_id="bench",
        token_ids=bytes([1, 0, 0, 0]),
        credential_digest=CREDENTIAL,
    )
    return _OpenTurn(lease.rollout_id, (await send_async(store, begin)).epoch)


async def write(
    channel: grpc.aio.Channel,
    work: Sequence[Trajectory],
    options: Options,
    turns: Sequence[_OpenTurn],
) -> Writes:
    """Append through the gateway's recorder; the last append ends the turn."""
    store = async_stub(TrajectoryServiceStub, channel)
    recorder = Recorder(store)

    async def append(trajectory: Trajectory, index: int) -> None:
        turn = turns[trajectory.index]
        last = index + 1 == len(trajectory.segments)
        message = pb.TokenAppend(
            run_id=RUN_ID,
            rollout_id=turn.rollout_id,
            turn_id=_TURN,
            epoch=turn.epoch,
            offset=turn.num_tokens,
            finish_reason=tokens_pb2.FINISH_REASON_STOP if last else 0,  # type: ignore[arg-type]
        )
        pack(message.tokens, [trajectory.segments[index]])
        turn.num_tokens = await recorder.record(message)
        if last:
            await recorder.finish(_finish(turn.rollout_id))

    sending = asyncio.create_task(recorder.keep_sending())
    try:
        return await write_segments(work, options.writers, append)
    finally:
        sending.cancel()


def _finish(rollout_id: str) -> pb.RolloutFinish:
    return pb.RolloutFinish(
        run_id=RUN_ID,
        rollout_id=rollout_id,
        credential_digest=CREDENTIAL,
        rewards=tokens_pb2.Rewards(rewards=[tokens_pb2.Reward(name="reward", value=1.0)]),
    )


if __name__ == "__main__":
    main()
