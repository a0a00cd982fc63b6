"""The agent runner: runs an `Agent` on leased tasks, many rollouts concurrently.

    python -m seamflow.runner --agent my_package.my_module:MyAgent --run-id demo

It uses the public client only: lease a rollout, run the agent, finish the rollout. Leases are
extended while agents work; a lost lease cancels its rollout.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

from seamflow.agent import Agent
from seamflow.client import Client, Rollout
from seamflow.client.plain_values import named_rewards
from seamflow.common.v1 import tokens_pb2
from seamflow.credentials import Credentials
from seamflow.errors import SeamflowError
from seamflow.network.host_port import check_target
from seamflow.retry import Backoff
from seamflow.rollout.v1 import rollout_service_pb2 as pb
from seamflow.runner.rollout_workers import MAX_MESSAGE, RolloutWorkers
from seamflow.user_code.user_calls import awaited, user_place
from seamflow.user_code.user_modules import import_user_module

_log = logging.getLogger("seamflow.runner")
_EVALUATION_WORKERS = 16


class TokenLog:
    """A file that any number of processes may append to concurrently. Close it, or use `with`."""

    def __init__(self, path: Path) -> None:
        """Open for appending; raises `OSError` where the file cannot be written."""
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, rollout_id: str, turn_id: str, chunk: pb.TokenChunk) -> None:
        """Append one chunk; an observer for `Client`."""
        line = json.dumps(
            {
                "rollout_id": rollout_id,
                "turn_id": turn_id,
                "offset": chunk.offset,
                "token_ids": list(chunk.tokens.token_ids),
                "logprobs": list(chunk.tokens.logprobs),
                "spans": [
                    [span.start, span.num_tokens, span.weight_version, span.server_id]
                    for span in chunk.tokens.spans
                ],
            }
        ).encode()
        # A single write: lines of several runners never mix.
        if os.write(self._file, line + b"\n") != len(line) + 1:
            raise OSError(f"{self._path}: the disk took only part of a line")

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig:
    """Settings of an agent runner."""

    run_id: str
    gateway: str = "127.0.0.1:50052"
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
        check_target(self.gateway)
        if self.concurrency < 1:
            raise ValueError(f"concurrency is {self.concurrency}: must be at least 1")
        if self.rollout_timeout <= 0:
            raise ValueError(f"rollout_timeout is {self.rollout_timeout}: must be above 0 seconds")
        if self.token_log and not Path(self.token_log).parent.is_dir():
            raise ValueError(f"token_log {self.token_log!r}: its folder does not exist; create it")


class AgentRunner:
    """Runs one agent on the tasks of one run until it is stopped or the run ends."""

    def __init__(self, agent: Agent, config: RunnerConfig) -> None:
        self._agent = agent
        self._config = config
        self._token_log = TokenLog(Path(config.token_log)) if config.token_log else None
        self._client = Client(
            config.gateway,
            run_id=config.run_id,
            credentials=config.credentials,
            connect_timeout=None,  # runners and services start in any order
            observer=self._token_log.write if self._token_log else None,
        )
        self._failures = Backoff(first=0.1, longest=10.0)

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set or the run ends; then running rollouts are given back."""
        number = self._config.concurrency
        workers = RolloutWorkers(
            self._client, self._act, rollouts=number, evaluation=min(number, _EVALUATION_WORKERS)
        )
        try:
            await workers.run(stop)
        finally:
            await self._client.close()
            if self._token_log is not None:
                self._token_log.close()

    async def _act(self, rollout: Rollout) -> None:
        task = rollout.task
        assert task is not None  # it was leased
        limit = asyncio.timeout(self._config.rollout_timeout)
        try:
            async with limit:
                returned = await awaited(self._agent.run(task, rollout))
                rewards = named_rewards(f"{type(self._agent).__name__}.run", returned)
        except SeamflowError:
            raise
        except Exception as error:
            if limit.expired():
                reason = f"took over {self._config.rollout_timeout} s"
                await rollout.fail(tokens_pb2.FAILURE_CLASS_TIMEOUT, reason)
                return
            _log.exception("agent failed on task %s", task.task_id)
            message = f"agent on task {task.task_id!r} raised {error!r}{user_place(error)}"
            await rollout.fail(tokens_pb2.FAILURE_CLASS_ENVIRONMENT, message[:MAX_MESSAGE])
            # A broken environment must not use up tasks as fast as they can be leased.
            await self._failures.wait()
        else:
            await rollout.finish(rewards)
            self._failures.reset()


def load_agent(name: str) -> Agent:
    """Construct the agent that "package.module:Class" names.

    Raises `ValueError` that names what is missing.
    """
    module_name, colon, class_name = name.partition(":")
    if not colon:
        raise ValueError(f"agent {name!r}: write it as 'package.module:Class'")
    try:
        kind = getattr(import_user_module(module_name), class_name)
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
