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
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

from seamflow.agent import Agent
from seamflow.client import Client, Rollout
from seamflow.client.plain_values import named_rewards
from seamflow.common.v1 import tokens_pb2
from seamflow.credentials import Credentials
from seamflow.errors import NotFoundError, RunEndedError, SeamflowError
from seamflow.network.host_port import check_target
from seamflow.retry import OF_ONE_CALL, Backoff
from seamflow.rollout.v1 import rollout_service_pb2 as pb
from seamflow.user_code.user_calls import awaited, user_place
from seamflow.user_code.user_modules import import_user_module

_log = logging.getLogger("seamflow.runner")
_MAX_LEASES = 8
_MAX_MESSAGE = 4096
_POLL_SECONDS = 0.5
_GIVE_BACK_SECONDS = 5.0
_EVALUATION_WORKERS = 16
"""Further rollouts at once, of evaluations alone: training may have to wait for the rollout server
that an evaluation holds, so its rollouts must not keep the evaluation's out."""


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


class _Leases:
    """Leases rollouts for several workers; one of the idle ones does it for all of them."""

    def __init__(self, client: Client, train: bool | None) -> None:
        self._client, self._train = client, train
        self._leasing = asyncio.Lock()
        self._num_idle = 0
        self._leased: deque[Rollout] = deque()
        self._failures = Backoff(first=0.1, longest=10.0)

    async def next(self) -> Rollout:
        """Wait for a rollout. Raises `RunEndedError` when there will be no more."""
        self._num_idle += 1
        try:
            async with self._leasing:
                while not self._leased:
                    await self._lease_more()
                return self._leased.popleft()
        finally:
            self._num_idle -= 1

    def left(self) -> list[Rollout]:
        """Those that no worker has begun."""
        return list(self._leased)

    async def _lease_more(self) -> None:
        try:
            most = min(self._num_idle, _MAX_LEASES)
            self._leased.extend(await self._client.lease_rollouts(most, train=self._train))
        except NotFoundError:
            _log.info("run %s does not exist yet", self._client.run_id)
            await asyncio.sleep(_POLL_SECONDS)
        except OF_ONE_CALL as error:
            # Rollouts that run go on, and the next call may succeed.
            _log.warning("no rollout could be leased: %s", error)
            await self._failures.wait()
        else:
            self._failures.reset()


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
        self._any = _Leases(self._client, None)
        self._evaluation = _Leases(self._client, False)
        self._cut_short: list[Rollout] = []

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set or the run ends; then running rollouts are given back."""
        number = self._config.concurrency
        sources = [self._any] * number + [self._evaluation] * min(number, _EVALUATION_WORKERS)
        workers = [asyncio.create_task(self._work(source)) for source in sources]
        stopped = asyncio.create_task(stop.wait())
        try:
            while not stopped.done() and not all(worker.done() for worker in workers):
                running = [worker for worker in workers if not worker.done()]
                done, _ = await asyncio.wait(
                    [*running, stopped], return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    task.result()
        finally:
            for task in (*workers, stopped):
                task.cancel()
            await asyncio.gather(*workers, stopped, return_exceptions=True)
            await self._give_all_back()
            await self._client.close()
            if self._token_log is not None:
                self._token_log.close()

    async def _work(self, source: _Leases) -> None:
        """Work on one rollout after the other until the run ends."""
        try:
            while True:
                await self._rollout(await source.next())
        except RunEndedError as error:
            _log.info("%s", error)

    async def _rollout(self, rollout: Rollout) -> None:
        """Run one rollout from lease to end; one whose lease is lost is abandoned."""
        working = asyncio.create_task(self._act(rollout))
        lost = asyncio.create_task(rollout.lost.wait())
        try:
            await asyncio.wait([working, lost], return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
        except SeamflowError as error:
            _log.warning("rollout %s: %s", rollout.rollout_id, error)
            await self._give_back(rollout, tokens_pb2.FAILURE_CLASS_INFRASTRUCTURE, str(error))
        except asyncio.CancelledError:
            self._cut_short.append(rollout)
            raise
        finally:
            working.cancel()
            lost.cancel()
            await asyncio.gather(working, lost, return_exceptions=True)

    async def _give_all_back(self) -> None:
        """Let others have what was under way at once, not when its leases run out."""
        left = [*self._cut_short, *self._any.left(), *self._evaluation.left()]
        reason = "its agent runner was stopped"
        with suppress(TimeoutError):
            async with asyncio.timeout(_GIVE_BACK_SECONDS):
                cancelled = tokens_pb2.FAILURE_CLASS_CANCELLED
                await asyncio.gather(*(self._give_back(each, cancelled, reason) for each in left))

    async def _give_back(
        self, rollout: Rollout, failure: tokens_pb2.FailureClass.ValueType, message: str
    ) -> None:
        """Fail an unfinished rollout, which is replaced."""
        with suppress(SeamflowError):  # it has ended already
            await rollout.fail(failure, message[:_MAX_MESSAGE])

    async def _act(self, rollout: Rollout) -> None:
        task = rollout.task
        assert task is not None  # it was leased
        limit = asyncio.timeout(self._config.rollout_timeout)
        try:
            async with limit:
                returned = await awaited(self._agent.run(task, rollout))
                rewards = named_rewards("Agent.run", returned)
        except SeamflowError:
            raise
        except Exception as error:
            if limit.expired():
                reason = f"took over {self._config.rollout_timeout} s"
                await rollout.fail(tokens_pb2.FAILURE_CLASS_TIMEOUT, reason)
                return
            _log.exception("agent failed on task %s", task.task_id)
            message = f"agent on task {task.task_id!r} raised {error!r}{user_place(error)}"
            await rollout.fail(tokens_pb2.FAILURE_CLASS_ENVIRONMENT, message[:_MAX_MESSAGE])
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
