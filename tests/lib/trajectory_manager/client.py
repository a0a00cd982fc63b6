"""A small client for the trajectory manager's tests: stubs, and an agent that uses them."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc.aio
from google.protobuf.duration_pb2 import Duration
from seamflow.common.v1 import error_pb2, tokens_pb2
from seamflow.stubs import async_stub
from seamflow.trajectory.v1 import (
    run_service_pb2,
    sample_service_pb2,
    task_service_pb2,
    trajectory_pb2,
    trajectory_service_pb2,
)
from seamflow.trajectory.v1.run_service_pb2_grpc import RunServiceStub
from seamflow.trajectory.v1.sample_service_pb2_grpc import SampleServiceStub
from seamflow.trajectory.v1.task_service_pb2_grpc import TaskServiceStub
from seamflow.trajectory.v1.trajectory_service_pb2_grpc import TrajectoryServiceStub

from bench.harness.store_calls import packed, send_async
from services.chassis.rpc.server import started
from services.lib.token_bytes import pack_ids
from tests.lib.trajectory_manager.memory.store import memory_store
from trajectory_manager.cli import service
from trajectory_manager.config import TrajectoryManagerConfig

if TYPE_CHECKING:
    from seamflow.trajectory.v1.run_service_pb2_grpc import RunServiceAsyncStub
    from seamflow.trajectory.v1.sample_service_pb2_grpc import SampleServiceAsyncStub
    from seamflow.trajectory.v1.task_service_pb2_grpc import TaskServiceAsyncStub
    from seamflow.trajectory.v1.trajectory_service_pb2_grpc import TrajectoryServiceAsyncStub

    from trajectory_manager.store.redis.connect import Store

CREDENTIAL = hashlib.sha256(b"credential").hexdigest()
RULES = trajectory_pb2.RunConfig(
    group_size=2,
    groups_per_step=1,
    max_staleness=1,
    staleness_policy=trajectory_pb2.STALENESS_POLICY_DROP,
    lease_duration=Duration(seconds=60),
    durability=trajectory_pb2.DURABILITY_FAST,
)


@asynccontextmanager
async def running_manager(store: Store | None = None, **settings: object) -> AsyncIterator[int]:
    """Port of a trajectory manager on `store`; without one it keeps all in memory."""
    usual = TrajectoryManagerConfig(
        redis_url="redis://oracle", port=0, admin_port=-1, drain_seconds=0.2
    )
    config = usual.replace(**settings)
    async with started(service(config, store or memory_store()), config) as port:
        yield port


def message(
    ids: Sequence[int],
    origin: tokens_pb2.Origin.ValueType = tokens_pb2.ORIGIN_ENVIRONMENT,
    version: int = 0,
) -> tokens_pb2.Tokens:
    """`ids` as one span."""
    sampled = origin == tokens_pb2.ORIGIN_POLICY
    source = tokens_pb2.VERSION_SOURCE_ENGINE if sampled else tokens_pb2.VERSION_SOURCE_UNSPECIFIED
    span = tokens_pb2.Span(
        start=0,
        num_tokens=len(ids),
        origin=origin,
        weight_version=version,
        version_source=source,
        server_id="server-1" if sampled else "",
    )
    logprobs = [-0.5 if sampled else 0.0] * len(ids)
    return tokens_pb2.Tokens(token_ids=ids, logprobs=logprobs, spans=[span])


def rewards(value: float = 1.0, policy_failure: str = "") -> tokens_pb2.Rewards:
    """One reward of the whole rollout."""
    given = [tokens_pb2.Reward(name="reward", value=value)]
    return tokens_pb2.Rewards(rewards=given, policy_failure=policy_failure)


@dataclass(slots=True)
class Client:
    """One caller of the three services of a run."""

    channel: grpc.aio.Channel
    run_id: str

    @property
    def runs(self) -> RunServiceAsyncStub:
        """Stub of RunService."""
        return async_stub(RunServiceStub, self.channel)

    @property
    def trajectories(self) -> TrajectoryServiceAsyncStub:
        """Stub of TrajectoryService."""
        return async_stub(TrajectoryServiceStub, self.channel)

    @property
    def tasks(self) -> TaskServiceAsyncStub:
        """Stub of TaskService."""
        return async_stub(TaskServiceStub, self.channel)

    @property
    def samples(self) -> SampleServiceAsyncStub:
        """Stub of SampleService."""
        return async_stub(SampleServiceStub, self.channel)

    async def create_run(self, config: trajectory_pb2.RunConfig = RULES) -> bool:
        """Create the run; whether it is new."""
        request = run_service_pb2.CreateRunRequest(run_id=self.run_id, config=config)
        answer = await self.runs.CreateRun(request, wait_for_ready=True)
        return bool(answer.created)

    async def submit(self, *task_ids: str, payload_json: str = "") -> None:
        """Queue TRAIN tasks."""
        task = trajectory_pb2.Task(purpose=tokens_pb2.PURPOSE_TRAIN, payload_json=payload_json)
        tasks = [trajectory_pb2.Task(task_id=name) for name in task_ids]
        for each in tasks:
            each.MergeFrom(task)
        request = task_service_pb2.SubmitTasksRequest(run_id=self.run_id, tasks=tasks)
        await self.tasks.SubmitTasks(request)

    async def lease(self, wait: int = 0) -> task_service_pb2.TaskLease:
        """Lease a rollout, waiting up to `wait` seconds; an empty message if there is none."""
        leases = (await self.ask(wait=wait)).leases
        return leases[0] if leases else task_service_pb2.TaskLease()

    async def ask(
        self,
        wait: int = 0,
        most: int = 0,
        request_id: str = "",
        task: trajectory_pb2.Task | None = None,
    ) -> task_service_pb2.LeaseTasksResponse:
        """Lease up to `most` rollouts, or one of the agent's own `task`."""
        request = task_service_pb2.LeaseTasksRequest(
            run_id=self.run_id,
            request_id=request_id or uuid.uuid4().hex,
            wait=Duration(seconds=wait),
            max_leases=most,
            task=task,
        )
        return await self.tasks.LeaseTasks(request)

    async def start(self, rollout_id: str, lease_token: str = "") -> None:
        """Start a rollout, EVAL unless leased."""
        purpose = tokens_pb2.PURPOSE_TRAIN if lease_token else tokens_pb2.PURPOSE_EVAL
        request = trajectory_service_pb2.NewRollout(
            run_id=self.run_id,
            rollout_id=rollout_id,
            lease_token=lease_token,
            purpose=purpose,
            credential_digest=CREDENTIAL,
        )
        await send_async(self.trajectories, request)

    async def begin(
        self,
        rollout_id: str,
        turn_id: str,
        prompt: Sequence[int],
        attempt_id: str = "a",
        sampling: tokens_pb2.SamplingParams | None = None,
    ) -> trajectory_service_pb2.BegunTurn:
        """Begin a turn."""
        request = trajectory_service_pb2.NewTurn(
            run_id=self.run_id,
            rollout_id=rollout_id,
            turn_id=turn_id,
            attempt_id=attempt_id,
            token_ids=pack_ids(prompt),
            sampling=sampling,
            credential_digest=CREDENTIAL,
        )
        begun: trajectory_service_pb2.BegunTurn = await send_async(self.trajectories, request)
        return begun

    async def append(
        self, rollout_id: str, turn_id: str, epoch: int, offset: int, tokens: tokens_pb2.Tokens
    ) -> int:
        """Append tokens; return how many the turn has."""
        request = trajectory_service_pb2.TokenAppend(
            run_id=self.run_id,
            rollout_id=rollout_id,
            turn_id=turn_id,
            epoch=epoch,
            offset=offset,
            tokens=packed(tokens),
        )
        return int((await send_async(self.trajectories, request)).num_tokens)

    async def end(self, rollout_id: str, turn_id: str, epoch: int) -> None:
        """End a turn with STOP."""
        request = trajectory_service_pb2.TokenAppend(
            run_id=self.run_id,
            rollout_id=rollout_id,
            turn_id=turn_id,
            epoch=epoch,
            finish_reason=tokens_pb2.FINISH_REASON_STOP,
        )
        await send_async(self.trajectories, request)

    async def finish(self, rollout_id: str, value: float = 1.0) -> None:
        """Finish a rollout with a reward."""
        request = trajectory_service_pb2.RolloutFinish(
            run_id=self.run_id,
            rollout_id=rollout_id,
            credential_digest=CREDENTIAL,
            rewards=rewards(value),
        )
        await send_async(self.trajectories, request)

    async def fail(self, rollout_id: str) -> None:
        """Finish a rollout in which the policy failed, which counts."""
        request = trajectory_service_pb2.RolloutFinish(
            run_id=self.run_id,
            rollout_id=rollout_id,
            credential_digest=CREDENTIAL,
            rewards=rewards(0.0, policy_failure="it said nothing"),
        )
        await send_async(self.trajectories, request)

    async def get(self, rollout_id: str) -> trajectory_pb2.Trajectory:
        """Read a trajectory."""
        request = trajectory_service_pb2.GetTrajectoryRequest(
            run_id=self.run_id, rollout_id=rollout_id
        )
        return (await self.trajectories.GetTrajectory(request)).trajectory

    async def dead_letters(self) -> list[task_service_pb2.DeadLetter]:
        """Of the run."""
        request = task_service_pb2.ListDeadLettersRequest(run_id=self.run_id)
        return list((await self.tasks.ListDeadLetters(request)).dead_letters)

    async def play(
        self,
        version: int = 0,
        value: float = 1.0,
        lease: task_service_pb2.TaskLease | None = None,
    ) -> str:
        """One whole rollout of two turns, the second continuing the first; return its name."""
        lease = lease or await self.lease()
        name = lease.rollout_id
        await self.start(name, lease.lease_token)
        prompt, answers = [1, 2], ([3, 4], [6])
        for turn_id, answer in zip(("t1", "t2"), answers, strict=True):
            opened = await self.begin(name, turn_id, prompt)
            new = prompt[len(opened.prefix_token_ids) // 4 :]
            await self.append(name, turn_id, opened.epoch, 0, message(new))
            sampled = message(answer, tokens_pb2.ORIGIN_POLICY, version)
            await self.append(name, turn_id, opened.epoch, len(new), sampled)
            await self.end(name, turn_id, opened.epoch)
            prompt = [*prompt, *answer, 5]
        await self.finish(name, value)
        return name

    async def reconcile(self, trainer_id: str = "trainer", step: int = 0) -> int:
        """Take over as trainer; return the epoch."""
        request = sample_service_pb2.ReconcileRequest(
            run_id=self.run_id, step=step, trainer_id=trainer_id
        )
        return int((await self.samples.Reconcile(request)).epoch)

    async def lease_samples(
        self, epoch: int, step: int, base: int = 0, wait: int = 0, num_groups: int = 0
    ) -> sample_service_pb2.LeaseSamplesResponse:
        """Lease the samples of a step."""
        request = sample_service_pb2.LeaseSamplesRequest(
            run_id=self.run_id,
            epoch=epoch,
            step=step,
            base_weight_version=base,
            wait=Duration(seconds=wait),
            num_groups=num_groups,
        )
        return await self.samples.LeaseSamples(request)


def reason_of(error: grpc.aio.AioRpcError) -> str:
    """The ErrorInfo reason in the trailers of a failed call."""
    details = dict(error.trailing_metadata() or ())["grpc-status-details-bin"]
    assert isinstance(details, bytes)
    info = error_pb2.ErrorInfo()
    info.ParseFromString(error_pb2.Status.FromString(details).details[0].value)
    return info.reason
