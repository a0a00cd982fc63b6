"""Everybody who puts work into a trajectory manager, in one process, and what they were told.

Agents play leased tasks and append as the gateway does, a dataloader submits tasks without asking
for room first, and recorders bring whole groups. All of them go at full speed, repeat every call
until it is answered, and come back when a RetryInfo says so.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import TypeVar

import grpc.aio
import numpy as np
import numpy.typing as npt
from google.protobuf.duration_pb2 import Duration
from seamflow.common.v1 import tokens_pb2
from seamflow.errors import (
    DeadlineError,
    ExhaustedError,
    SeamflowError,
    UnavailableError,
    decode,
)
from seamflow.retry import Backoff
from seamflow.stubs import async_stub
from seamflow.trajectory.v1 import task_service_pb2, trajectory_pb2
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb
from seamflow.trajectory.v1.task_service_pb2_grpc import TaskServiceStub
from seamflow.trajectory.v1.trajectory_service_pb2_grpc import TrajectoryServiceStub

from bench.baselines.store.seamflow_run import CREDENTIAL
from bench.harness.store_calls import send_async, unpacked

GROUP_SIZE = 2
TURN = "turn"
_PROMPT_TOKENS = 32
_CHUNK_TOKENS = (128, 384)
_CHUNKS = 16
_TASKS = 32
_GROUPS = 2
_RECORDED_TOKENS = 256
_EXACT = 256
_STOP = tokens_pb2.FINISH_REASON_STOP

Ids = npt.NDArray[np.int32]
Answer = TypeVar("Answer")


@dataclass(slots=True)
class Seen:
    """What producers were told."""

    tokens: defaultdict[str, list[Ids]] = field(default_factory=lambda: defaultdict(list))
    """Rollout -> ids acknowledged, in order; each has one turn."""
    num_tokens: int = 0
    """Of them all."""
    finished: set[str] = field(default_factory=set)
    """Rollouts whose end was acknowledged."""
    exhausted: Counter[str] = field(default_factory=Counter)
    """Method -> RESOURCE_EXHAUSTED answers with a RetryInfo."""
    unexplained: Counter[str] = field(default_factory=Counter)
    """Method -> those without."""
    unavailable: Counter[str] = field(default_factory=Counter)
    """Method -> UNAVAILABLE and DEADLINE_EXCEEDED answers."""
    abandoned: Counter[str] = field(default_factory=Counter)
    """Reason -> rollouts, groups and tasks that were refused for good."""
    messages: Counter[str] = field(default_factory=Counter)
    """Text of a refusal, without its numbers -> how often."""

    def acknowledge(self, rollout_id: str, ids: Ids) -> None:
        """The store has these tokens."""
        self.tokens[rollout_id].append(ids)
        self.num_tokens += ids.size

    def refuse(self, method: str, error: SeamflowError) -> None:
        """The store wants this call to come again."""
        by_method = self.unavailable
        if isinstance(error, ExhaustedError):
            by_method = self.exhausted if error.retry_after else self.unexplained
        by_method[method] += 1
        words = " ".join(word for word in str(error).split() if not any(map(str.isdigit, word)))
        self.messages[f"{method} {error.reason}: {words}"] += 1


class Producers:
    """Agents, a dataloader and recorders of one run."""

    def __init__(self, channel: grpc.aio.Channel, run_id: str, random: Random) -> None:
        """`random` decides how long each chunk is."""
        self._store = async_stub(TrajectoryServiceStub, channel)
        self._tasks = async_stub(TaskServiceStub, channel)
        self._run_id = run_id
        self._random = random
        self._next_id = 0
        self._stopping = asyncio.Event()
        self.seen = Seen()

    async def work(self, agents: int, recorders: int) -> None:
        """Produce until told to stop; rollouts under way are finished."""
        async with asyncio.TaskGroup() as group:
            loader = group.create_task(self._load())
            recording = [group.create_task(self._record(i)) for i in range(recorders)]
            playing = [group.create_task(self._agent()) for _ in range(agents)]
            await self._stopping.wait()
            # Held back by admission, they would not end by themselves; what they sent is repeated
            # by nobody, so it counts neither as acknowledged nor as lost.
            for task in (loader, *recording):
                task.cancel()
            await asyncio.wait(playing)

    def stop(self) -> None:
        """Let `work` end."""
        self._stopping.set()

    async def _agent(self) -> None:
        while not self._stopping.is_set():
            request = task_service_pb2.LeaseTasksRequest(
                run_id=self._run_id, request_id=uuid.uuid4().hex, wait=Duration(seconds=1)
            )
            answer = await self._answer("LeaseTasks", partial(self._tasks.LeaseTasks, request))
            for lease in answer.leases:
                with self._refusals():
                    await self._play(lease)

    async def _play(self, lease: task_service_pb2.TaskLease) -> None:
        rollout_id = lease.rollout_id
        start = pb.NewRollout(
            run_id=self._run_id,
            rollout_id=rollout_id,
            lease_token=lease.lease_token,
            purpose=tokens_pb2.PURPOSE_TRAIN,
            credential_digest=CREDENTIAL,
        )
        await self._answer("BeginTurns", lambda: send_async(self._store, start))
        prompt = self._fresh(_PROMPT_TOKENS)
        begin = pb.NewTurn(
            run_id=self._run_id,
            rollout_id=rollout_id,
            turn_id=TURN,
            attempt_id="bench",
            token_ids=prompt.tobytes(),
            credential_digest=CREDENTIAL,
        )
        epoch = (await self._answer("BeginTurns", lambda: send_async(self._store, begin))).epoch
        await self._append(rollout_id, epoch, prompt)
        finish = pb.RolloutFinish(
            run_id=self._run_id,
            rollout_id=rollout_id,
            credential_digest=CREDENTIAL,
            rewards=_rewards(),
        )
        await self._answer("AppendTokens", lambda: send_async(self._store, finish))
        self.seen.finished.add(rollout_id)

    async def _append(self, rollout_id: str, epoch: int, prompt: Ids) -> None:
        """The prompt, then sampled chunks, the last of which ends the turn."""
        offset = 0
        for index in range(_CHUNKS + 1):
            chunk = self._fresh(self._random.randint(*_CHUNK_TOKENS)) if index else prompt
            append = pb.TokenAppend(
                run_id=self._run_id,
                rollout_id=rollout_id,
                turn_id=TURN,
                epoch=epoch,
                offset=offset,
                tokens=_packed(chunk, sampled=index > 0),
                finish_reason=_STOP if index == _CHUNKS else tokens_pb2.FINISH_REASON_UNSPECIFIED,
            )
            await self._answer("AppendTokens", partial(send_async, self._store, append))
            self.seen.acknowledge(rollout_id, chunk)
            offset += chunk.size

    async def _load(self) -> None:
        for first in itertools.count(0, _TASKS):
            tasks = [
                trajectory_pb2.Task(task_id=f"task-{i}", purpose=tokens_pb2.PURPOSE_TRAIN)
                for i in range(first, first + _TASKS)
            ]
            request = task_service_pb2.SubmitTasksRequest(run_id=self._run_id, tasks=tasks)
            await self._answer("SubmitTasks", partial(self._tasks.SubmitTasks, request))

    async def _record(self, recorder: int) -> None:
        for first in itertools.count(0, _GROUPS):
            names = [f"recorded-{recorder}-{i}" for i in range(first, first + _GROUPS)]
            ids = {
                f"{name}/{slot}/1": self._fresh(_RECORDED_TOKENS)
                for name in names
                for slot in range(GROUP_SIZE)
            }
            groups = [_recorded(name, ids) for name in names]
            request = pb.RecordGroupsRequest(run_id=self._run_id, groups=groups)
            with self._refusals():
                await self._answer("RecordGroups", partial(self._store.RecordGroups, request))
                for rollout_id, chunk in ids.items():
                    self.seen.acknowledge(rollout_id, chunk)
                self.seen.finished.update(ids)

    async def _answer(self, method: str, call: Callable[[], Awaitable[Answer]]) -> Answer:
        """What `call` answers in the end; raises SeamflowError if it is refused for good."""
        backoff = Backoff()
        while True:
            try:
                return await call()
            except grpc.aio.AioRpcError as failure:
                error = decode(failure)
            except SeamflowError as refused:
                error = refused
            if not isinstance(error, ExhaustedError | UnavailableError | DeadlineError):
                raise error
            self.seen.refuse(method, error)
            await backoff.wait(error.retry_after)

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except SeamflowError as error:
            self.seen.abandoned[error.reason or type(error).__name__] += 1

    def _fresh(self, number: int) -> Ids:
        """Ids that nobody sampled before."""
        first, self._next_id = self._next_id, self._next_id + number
        return np.arange(first, first + number, dtype=np.int32)


def logprobs_of(ids: Ids) -> npt.NDArray[np.float32]:
    """The log-probs that every producer stores with its tokens; exact in float32."""
    return -(ids % _EXACT).astype(np.float32) / np.float32(_EXACT)


def _packed(ids: Ids, *, sampled: bool = True) -> tokens_pb2.PackedTokens:
    span = tokens_pb2.Span(num_tokens=ids.size, origin=tokens_pb2.ORIGIN_ENVIRONMENT)
    if sampled:
        span.origin = tokens_pb2.ORIGIN_POLICY
        span.version_source = tokens_pb2.VERSION_SOURCE_ENGINE
        span.server_id = "bench"
    return tokens_pb2.PackedTokens(
        token_ids=ids.tobytes(), logprobs=logprobs_of(ids).tobytes(), spans=[span]
    )


def _recorded(task_id: str, ids: dict[str, Ids]) -> pb.RecordedGroup:
    turns = [
        trajectory_pb2.Turn(
            turn_id=TURN,
            tokens=unpacked(_packed(ids[f"{task_id}/{slot}/1"])),
            finish_reason=_STOP,
        )
        for slot in range(GROUP_SIZE)
    ]
    rollouts = [pb.RecordedRollout(turns=[turn], rewards=_rewards()) for turn in turns]
    return pb.RecordedGroup(task_id=task_id, rollouts=rollouts)


def _rewards() -> tokens_pb2.Rewards:
    return tokens_pb2.Rewards(rewards=[tokens_pb2.Reward(name="reward", value=1.0)])
