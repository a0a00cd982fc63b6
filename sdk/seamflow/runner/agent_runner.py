"""The agent runner: runs an `Agent` on leased tasks, many rollouts concurrently.

    python -m seamflow.runner --agent my_package.my_module:MyAgent --run-id demo

It uses the public client only: lease a task, start a rollout, run the agent, finish the rollout.
Leases are extended while agents work; a lost lease cancels its rollout.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import logging
import math
import signal
import socket
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from google.protobuf.duration_pb2 import Duration

from seamflow.agent import Agent, Task
from seamflow.channel import connect
from seamflow.client import Client, Rollout
from seamflow.common.v1 import tokens_pb2
from seamflow.credentials import Credentials
from seamflow.durations import seconds_of
from seamflow.errors import SeamflowError
from seamflow.retry import Backoff, retrying
from seamflow.stubs import async_stub
from seamflow.token_log import TokenLog
from seamflow.trajectory.v1 import task_service_pb2 as pb
from seamflow.trajectory.v1.task_service_pb2_grpc import TaskServiceStub

__all__ = ["AgentRunner", "RunnerConfig", "load_agent"]

_log = logging.getLogger("seamflow.runner")
_LEASE_WAIT = Duration(seconds=20)
_MAX_LEASES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig:
    """Settings of an agent runner."""

    run_id: str
    """Training job."""
    gateway: str = "127.0.0.1:50052"
    """Address of the rollout gateway."""
    trajectory_manager: str = "127.0.0.1:50051"
    """Address of the trajectory manager, which leases tasks."""
    concurrency: int = 32
    """Rollouts that run concurrently."""
    rollout_timeout: float = 3600.0
    """Timeout of a rollout in seconds; after it the rollout fails and is replaced."""
    credentials: Credentials = field(default_factory=Credentials)
    """Token and certificates, where the services require them."""
    token_log: str | None = None
    """File that every received chunk is appended to, one JSON line each, for an audit of the
    store. Runners may share it."""

    def __post_init__(self) -> None:
        """Raise `ValueError` for invalid settings."""
        if self.concurrency < 1:
            raise ValueError(f"concurrency is {self.concurrency}: must be at least 1")
        if self.rollout_timeout <= 0:
            raise ValueError(f"rollout_timeout is {self.rollout_timeout}: must be above 0 seconds")
        if self.token_log and not Path(self.token_log).parent.is_dir():
            raise ValueError(f"token_log {self.token_log!r}: its folder does not exist; create it")


class AgentRunner:
    """Runs one agent on the tasks of one run until it is stopped."""

    def __init__(self, agent: Agent, config: RunnerConfig) -> None:
        self._agent = agent
        self._config = config
        # Runners and services start in any order.
        self._channel = connect(config.trajectory_manager, config.credentials, connect_timeout=None)
        self._tasks = async_stub(TaskServiceStub, self._channel)
        self._token_log = TokenLog(Path(config.token_log)) if config.token_log else None
        self._client = Client(
            config.gateway,
            run_id=config.run_id,
            credentials=config.credentials,
            connect_timeout=None,
            observer=self._token_log.write if self._token_log else None,
        )
        self._failures = Backoff(first=0.1, longest=10.0)
        # One of the idle workers leases tasks for all of them.
        self._leasing = asyncio.Lock()
        self._num_idle = 0
        self._leased: deque[pb.TaskLease] = deque()
        self._leases: dict[str, asyncio.Task[None]] = {}
        self._lease_seconds = 1.0  # short until the first lease names its duration

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set, then abandon running rollouts, which are replaced."""
        workers = [asyncio.create_task(self._work()) for _ in range(self._config.concurrency)]
        extender = asyncio.create_task(self._keep_leases())
        stopped = asyncio.create_task(stop.wait())
        try:
            done, _ = await asyncio.wait(
                [*workers, extender, stopped], return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                task.result()
        finally:
            for task in (*workers, extender, stopped):
                task.cancel()
            await asyncio.gather(*workers, extender, stopped, return_exceptions=True)
            await self._client.close()
            await self._channel.close()
            if self._token_log is not None:
                self._token_log.close()

    async def _work(self) -> None:
        while True:
            lease = await self._lease()
            rollout = asyncio.create_task(self._rollout(lease))
            self._leases[lease.lease_token] = rollout
            try:
                await rollout
            except asyncio.CancelledError:
                rollout.cancel()
                if asyncio.current_task().cancelling():  # type: ignore[union-attr]
                    raise
                _log.info("lease of rollout %s was lost", lease.rollout_id)
            finally:
                del self._leases[lease.lease_token]

    async def _lease(self) -> pb.TaskLease:
        self._num_idle += 1
        try:
            async with self._leasing:
                while not self._leased:
                    await self._lease_more()
                return self._leased.popleft()
        finally:
            self._num_idle -= 1

    async def _lease_more(self) -> None:
        request = pb.LeaseTaskRequest(
            run_id=self._config.run_id,
            agent_id=socket.gethostname(),
            wait=_LEASE_WAIT,
            max_leases=min(self._num_idle, _MAX_LEASES),
        )
        answer = await retrying(lambda: self._tasks.LeaseTask(request))
        if answer.HasField("task"):
            duration = answer.lease_duration
            self._lease_seconds = seconds_of(duration)
            first = pb.TaskLease(
                task=answer.task, rollout_id=answer.rollout_id, lease_token=answer.lease_token
            )
            self._leased.extend((first, *answer.more))

    async def _rollout(self, lease: pb.TaskLease) -> None:
        """Run one rollout from lease to end."""
        try:
            rollout = await self._client.start_rollout(
                lease.rollout_id,
                lease_token=lease.lease_token,
                train=lease.task.purpose == tokens_pb2.PURPOSE_TRAIN,
            )
            await self._act(lease.task, rollout)
        except SeamflowError as error:
            _log.warning("rollout %s: %s", lease.rollout_id, error)
            await self._give_back(lease)

    async def _give_back(self, lease: pb.TaskLease) -> None:
        """Complete the task of an unfinished rollout, which fails and is replaced."""
        request = pb.CompleteTaskRequest(run_id=self._config.run_id, lease_token=lease.lease_token)
        await retrying(lambda: self._tasks.CompleteTask(request))

    async def _act(self, leased: pb.Task, rollout: Rollout) -> None:
        task = Task(task_id=leased.task_id, payload=json.loads(leased.payload_json))
        limit = asyncio.timeout(self._config.rollout_timeout)
        try:
            async with limit:
                rewards = _checked(await self._agent.run(task, rollout))
        except SeamflowError:
            raise
        except Exception as error:
            if limit.expired():
                reason = f"took over {self._config.rollout_timeout} s"
                await rollout.fail(tokens_pb2.FAILURE_CLASS_TIMEOUT, reason)
                return
            _log.exception("agent failed on task %s", task.task_id)
            await rollout.fail(tokens_pb2.FAILURE_CLASS_ENVIRONMENT, repr(error))
            # A broken environment must not use up tasks as fast as they can be leased.
            await self._failures.wait()
        else:
            await rollout.finish(rewards)
            self._failures.reset()

    async def _keep_leases(self) -> None:
        while True:
            await asyncio.sleep(self._lease_seconds / 3)
            if not self._leases:
                continue
            request = pb.ExtendTasksRequest(
                run_id=self._config.run_id, lease_tokens=list(self._leases)
            )
            await self._extend(request)

    async def _extend(self, request: pb.ExtendTasksRequest) -> None:
        response = await retrying(lambda: self._tasks.ExtendTasks(request))
        for token in response.lost_lease_tokens:
            if token in self._leases:
                self._leases[token].cancel()


def _checked(rewards: Mapping[str, float] | float) -> Mapping[str, float] | float:
    numbers = rewards.values() if isinstance(rewards, Mapping) else [rewards]
    if not all(isinstance(number, int | float) and math.isfinite(number) for number in numbers):
        raise ValueError(
            f"Agent.run returned {rewards!r}: return a finite float, or a mapping of names to them"
        )
    return rewards


def load_agent(name: str) -> Agent:
    """Construct the agent that "package.module:Class" names.

    Raises `ValueError` that names what is missing.
    """
    module_name, colon, class_name = name.partition(":")
    if not colon:
        raise ValueError(f"agent {name!r}: write it as 'package.module:Class'")
    try:
        kind = getattr(importlib.import_module(module_name), class_name)
    except ModuleNotFoundError as error:
        raise ValueError(f"agent {name!r}: {error}; is its folder on PYTHONPATH?") from error
    except AttributeError as error:
        raise ValueError(f"agent {name!r}: {error}") from error
    agent: Any = kind() if inspect.isclass(kind) else kind
    if not inspect.iscoroutinefunction(getattr(agent, "run", None)):
        raise ValueError(f"agent {name!r}: has no 'async def run(self, task, rollout)'")
    return cast(Agent, agent)


async def run_until_signalled(agent: Agent, config: RunnerConfig) -> None:
    """Run the agent until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await AgentRunner(agent, config).run(stop)
