"""Runs an episode for each leased rollout, many concurrently."""

from __future__ import annotations

import asyncio

from seamflow.client import Client, Rollout
from seamflow.common.v1 import tokens_pb2
from seamflow.environment import EnvironmentClient, Transcript
from seamflow.environment.v1 import environment_service_pb2 as pb
from seamflow.errors import (
    DeadlineError,
    ExhaustedError,
    InvalidRequestError,
    SeamflowError,
    UnavailableError,
)
from seamflow.retry import Backoff
from seamflow.runner.rollout_workers import MAX_MESSAGE, RolloutWorkers

from services.chassis.errors import ConfigError
from services.chassis.log import get_logger
from services.environments.config import EnvironmentsConfig
from services.environments.episode import Outcome, run_self_driving, run_stepped
from services.environments.reward_collector import RewardCollector

_log = get_logger()
_EVALUATION_PLACES = 16
"""For evaluation alone, at most a quarter of the environment's."""


class EpisodeLoop:
    """Runs episodes of one environment for the tasks of one run."""

    def __init__(
        self,
        config: EnvironmentsConfig,
        client: Client,
        environment: EnvironmentClient,
        rewards: RewardCollector | None = None,
    ) -> None:
        self._config = config
        self._client = client
        self._environment = environment
        self._rewards = rewards
        self._failures = Backoff(first=0.1, longest=10.0)
        self._run = run_stepped

    async def run(self) -> None:
        """Work until the run ends or the call is cancelled; its episodes are then given back."""
        described = await self._described()
        if described.kind == pb.ENVIRONMENT_KIND_SELF_DRIVING:
            self._run = run_self_driving
        reserved = min(_EVALUATION_PLACES, described.max_episodes // 4)
        most = min(self._config.max_episodes, described.max_episodes - reserved)
        _log.info("environment found", name=described.name, max_episodes=most)
        workers = RolloutWorkers(self._client, self._work, rollouts=most, evaluation=reserved)
        await workers.run(asyncio.Event())

    async def _described(self) -> pb.DescribeResponse:
        try:
            described = await self._environment.describe(timeout=None)
        except SeamflowError as error:
            raise ConfigError(f"environment is {self._config.environment!r}: {error}") from error
        drives = described.kind == pb.ENVIRONMENT_KIND_SELF_DRIVING
        if drives and self._config.reward_server is not None:
            raise ConfigError(
                f"reward_server is {self._config.reward_server!r}, and environment "
                f"{described.name!r} is self-driving, so that its conversations are not known "
                "here: let its run() give the rewards"
            )
        return described

    async def _work(self, rollout: Rollout) -> None:
        try:
            async with asyncio.timeout(self._config.episode_timeout_seconds) as limit:
                outcome = await self._outcome(rollout)
            await self._add_rewards_of_server(rollout, outcome, limit.when())
            await self._finish(rollout, outcome)
        except Exception as error:
            await self._fail(rollout, error)
            if failure_class(error) == tokens_pb2.FAILURE_CLASS_ENVIRONMENT:
                # It must not use up tasks as fast as they can be leased.
                await self._failures.wait()
        else:
            self._failures.reset()

    async def _outcome(self, rollout: Rollout) -> Outcome:
        assert rollout.task is not None  # it was leased
        return await self._run(self._config, self._environment, rollout.task, rollout)

    async def _add_rewards_of_server(
        self, rollout: Rollout, outcome: Outcome, deadline: float | None
    ) -> None:
        """Wait for them, if there is a reward server, until `deadline` of the loop's clock."""
        address, task = self._config.reward_server, rollout.task
        if self._rewards is None or address is None or task is None:
            return
        transcript = Transcript(rollout_id=rollout.rollout_id, task=task, messages=outcome.messages)
        try:
            async with asyncio.timeout_at(deadline):
                outcome.add_of_server(await self._rewards.score(transcript), address)
        except TimeoutError as error:
            raise UnavailableError(
                f"reward_server {address} gave no rewards before the episode had lasted "
                f"{self._config.episode_timeout_seconds:g} s: check that it runs, or raise "
                "episode_timeout_seconds"
            ) from error

    async def _finish(self, rollout: Rollout, outcome: Outcome) -> None:
        await rollout.finish(
            outcome.rewards,
            turn_rewards=outcome.turn_rewards,
            policy_failure=outcome.policy_failure[:MAX_MESSAGE],
            truncated=outcome.truncated,
        )

    async def _fail(self, rollout: Rollout, error: Exception) -> None:
        task_id = rollout.task.task_id if rollout.task else ""
        message = str(error) or repr(error)
        if isinstance(error, TimeoutError):
            message = f"the episode took over {self._config.episode_timeout_seconds:g} s"
        elif isinstance(error, DeadlineError):
            message += "; raise reset_timeout_seconds or step_timeout_seconds if it needs longer"
        _log.warning("episode failed", task=task_id, rollout=rollout.rollout_id, why=message)
        try:
            await rollout.fail(failure_class(error), message[:MAX_MESSAGE])
        except SeamflowError as ended:  # it has ended already, or its lease is lost
            _log.info("failure not recorded", rollout=rollout.rollout_id, why=str(ended))


_OF_ENVIRONMENTS: dict[str, tokens_pb2.FailureClass.ValueType] = {
    "ENVIRONMENT": tokens_pb2.FAILURE_CLASS_ENVIRONMENT,
    "INFRASTRUCTURE": tokens_pb2.FAILURE_CLASS_INFRASTRUCTURE,
    "TIMEOUT": tokens_pb2.FAILURE_CLASS_TIMEOUT,
    "CANCELLED": tokens_pb2.FAILURE_CLASS_CANCELLED,
}


def failure_class(error: Exception) -> tokens_pb2.FailureClass.ValueType:
    """The class of what ended an episode.

    ENVIRONMENT for the user's code and for requests that its values made invalid or too large,
    TIMEOUT for a passed deadline, INFRASTRUCTURE for a server that cannot be reached or has
    forgotten the episode, and for what is unknown.
    """
    if isinstance(error, SeamflowError) and error.reason == "ENVIRONMENT_FAILED":
        given = error.metadata.get("failure_class", "")
        return _OF_ENVIRONMENTS.get(given, tokens_pb2.FAILURE_CLASS_ENVIRONMENT)
    if isinstance(error, TimeoutError | DeadlineError):
        return tokens_pb2.FAILURE_CLASS_TIMEOUT
    if isinstance(error, ExhaustedError) and error.retry_after is None:
        return tokens_pb2.FAILURE_CLASS_ENVIRONMENT  # an observation that no message takes
    if isinstance(error, InvalidRequestError | ValueError):
        return tokens_pb2.FAILURE_CLASS_ENVIRONMENT
    return tokens_pb2.FAILURE_CLASS_INFRASTRUCTURE
