"""Leases tasks and runs an episode for each, many concurrently."""

from __future__ import annotations

import asyncio

from seamflow.client import Client, Rollout
from seamflow.common.v1 import tokens_pb2
from seamflow.environment import EnvironmentClient, Transcript
from seamflow.environment.v1 import environment_service_pb2 as pb
from seamflow.errors import (
    DeadlineError,
    NotFoundError,
    RunEndedError,
    SeamflowError,
    UnavailableError,
)
from seamflow.retry import OF_ONE_CALL, Backoff

from services.chassis.errors import ConfigError
from services.chassis.log import get_logger
from services.environments.config import EnvironmentsConfig
from services.environments.episode import Outcome, run_self_driving, run_stepped
from services.environments.failures import failure_class
from services.environments.reward_collector import RewardCollector

_log = get_logger()
_MAX_LEASES = 8
_MAX_MESSAGE = 4096
_POLL_SECONDS = 0.5
_EVALUATION_PLACES = 16
"""For evaluation alone, at most a quarter of the environment's: training may have to wait for the
rollout server that an evaluation holds, so its episodes must not keep the evaluation's out."""


class _Places:
    """Room for so many episodes at once."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._free = asyncio.Semaphore(most)

    async def take(self, number: int) -> int:
        """Wait for one free place, then take up to `number` of those that are free."""
        await self._free.acquire()
        taken = 1
        while taken < min(self._most, number) and not self._free.locked():
            await self._free.acquire()
            taken += 1
        return taken

    def give_back(self, number: int) -> None:
        """Give places back to those who wait."""
        for _ in range(number):
            self._free.release()


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
        """Work until the run ends or the call is cancelled; its episodes are then abandoned."""
        described = await self._described()
        if described.kind == pb.ENVIRONMENT_KIND_SELF_DRIVING:
            self._run = run_self_driving
        reserved = min(_EVALUATION_PLACES, described.max_episodes // 4)
        most = min(self._config.max_episodes, described.max_episodes - reserved)
        _log.info("environment found", name=described.name, max_episodes=most)
        async with asyncio.TaskGroup() as episodes:
            episodes.create_task(self._episodes(most))
            if reserved:
                episodes.create_task(self._episodes(reserved, train=False))

    async def _episodes(self, most: int, train: bool | None = None) -> None:
        """Run up to `most` episodes at once until the run ends; `train` False: of evaluations."""
        places = _Places(most)
        async with asyncio.TaskGroup() as episodes:
            try:
                while True:
                    await self._start_some(episodes, places, train)
            except RunEndedError as error:
                _log.info("run ended", why=str(error))

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

    async def _start_some(
        self, episodes: asyncio.TaskGroup, places: _Places, train: bool | None
    ) -> None:
        """Wait for a free place, lease as many rollouts as there are free ones, start them."""
        taken = await places.take(_MAX_LEASES)
        rollouts: list[Rollout] = []
        try:
            rollouts = await self._lease(taken, train)
        finally:
            places.give_back(taken - len(rollouts))
        for rollout in rollouts:
            episodes.create_task(self._episode(rollout, places))

    async def _lease(self, number: int, train: bool | None) -> list[Rollout]:
        try:
            return await self._client.lease_rollouts(number, train=train)
        except NotFoundError:  # the run does not exist yet
            pass
        except OF_ONE_CALL as error:
            _log.warning("no rollout leased", error=str(error))
        await asyncio.sleep(_POLL_SECONDS)
        return []

    async def _episode(self, rollout: Rollout, places: _Places) -> None:
        """One rollout from lease to end; one whose lease is lost is abandoned."""
        working = asyncio.create_task(self._work(rollout))
        lost = asyncio.create_task(rollout.lost.wait())
        try:
            await asyncio.wait([working, lost], return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
        finally:
            working.cancel()
            lost.cancel()
            await asyncio.gather(working, lost, return_exceptions=True)
            places.give_back(1)

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
            policy_failure=outcome.policy_failure[:_MAX_MESSAGE],
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
            await rollout.fail(failure_class(error), message[:_MAX_MESSAGE])
        except SeamflowError as ended:  # it has ended already, or its lease is lost
            _log.info("failure not recorded", rollout=rollout.rollout_id, why=str(ended))
