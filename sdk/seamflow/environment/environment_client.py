"""Calls an environment server and a reward server."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from seamflow.channel import CONNECT_TIMEOUT, connect
from seamflow.client.messages import Message, to_dict, to_messages, tool_dict
from seamflow.client.turn import Task
from seamflow.common.v1 import tokens_pb2
from seamflow.credentials import Credentials
from seamflow.environment.environment import Endpoint, Observation, Step
from seamflow.environment.returned_values import rewards_of
from seamflow.environment.v1 import environment_service_pb2 as pb
from seamflow.environment.v1 import reward_service_pb2 as reward_pb
from seamflow.environment.v1.environment_service_pb2_grpc import EnvironmentServiceStub
from seamflow.environment.v1.reward_service_pb2_grpc import RewardServiceStub
from seamflow.errors import SeamflowError, from_status
from seamflow.pages import pages
from seamflow.retry import retrying
from seamflow.stubs import async_stub
from seamflow.trajectory.v1 import trajectory_pb2

_CLOSE_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """A conversation to score."""

    rollout_id: str
    """Names the rollout in errors."""
    task: Task
    messages: Sequence[Message]
    """All of it, the policy's answers included."""


class EnvironmentClient:
    """A connection to an environment or reward server. Close it, or use `async with`.

    Calls are repeated while the server is unavailable or full, for at most their `timeout` seconds,
    and then raise `DeadlineError`. Other failures raise `SeamflowError`; one of the environment
    itself has reason "ENVIRONMENT_FAILED" and `metadata["failure_class"]`.
    """

    def __init__(
        self,
        address: str,
        *,
        credentials: Credentials | None = None,
        connect_timeout: float | None = CONNECT_TIMEOUT,
    ) -> None:
        self._channel = connect(address, credentials, connect_timeout=connect_timeout)
        self._stub = async_stub(EnvironmentServiceStub, self._channel)
        self._rewards = async_stub(RewardServiceStub, self._channel)

    async def describe(self, timeout: float | None = 60.0) -> pb.DescribeResponse:
        """What the environment is."""
        request = pb.DescribeRequest()
        return await retrying(lambda: self._stub.Describe(request), timeout=timeout)

    async def tasks(self, timeout: float | None = 60.0) -> AsyncIterator[Task]:
        """The tasks of the environment in order; `timeout` counts for each page."""

        async def page(request: pb.ListTasksRequest) -> pb.ListTasksResponse:
            return await retrying(lambda: self._stub.ListTasks(request), timeout=timeout)

        async for response in pages(page, pb.ListTasksRequest()):
            for task in response.tasks:
                payload = json.loads(task.payload_json or "{}")
                yield Task(task_id=task.task_id, payload=payload)

    async def reset(
        self,
        task: Task,
        seed: int = 0,
        *,
        episode_id: str | None = None,
        timeout: float | None = 60.0,
    ) -> OpenEpisode:
        """Start an episode of a stepped environment; close it in the end."""
        request = pb.ResetRequest(
            episode_id=episode_id or uuid.uuid4().hex, task=_task(task), seed=seed
        )
        try:
            response = await retrying(lambda: self._stub.Reset(request), timeout=timeout)
        except BaseException:
            await self.close_episode(request.episode_id)
            raise
        return OpenEpisode(self, request.episode_id, response)

    async def run_episode(
        self,
        task: Task,
        endpoint: Endpoint,
        seed: int = 0,
        *,
        episode_id: str | None = None,
        timeout: float | None = None,
    ) -> tokens_pb2.Rewards:
        """Run an episode of a self-driving environment; its rewards, those of turns included.

        Not repeated once the environment has begun: a rollout has one episode.
        """
        request = pb.RunEpisodeRequest(
            episode_id=episode_id or uuid.uuid4().hex,
            task=_task(task),
            seed=seed,
            **asdict(endpoint),
        )
        return await retrying(lambda: self._run_episode(request), timeout=timeout)

    async def score(
        self, transcripts: Sequence[Transcript], *, timeout: float | None = 60.0
    ) -> list[dict[str, float] | SeamflowError]:
        """Rewards of each transcript by name, or why it could not be scored."""
        request = reward_pb.ScoreRequest(
            transcripts=[
                reward_pb.Transcript(
                    rollout_id=each.rollout_id,
                    task=_task(each.task),
                    messages=to_messages(each.messages).messages,
                )
                for each in transcripts
            ]
        )
        answer = await retrying(lambda: self._rewards.Score(request), timeout=timeout)
        return [
            from_status(result.error)
            if result.HasField("error")
            else rewards_of(result.rewards.rewards)
            for result in answer.results
        ]

    async def close(self) -> None:
        """Close the connection; open calls fail."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def step(self, request: pb.StepRequest, timeout: float | None) -> pb.StepResponse:
        """One call of Step, for `OpenEpisode`."""
        return await retrying(lambda: self._stub.Step(request), timeout=timeout)

    async def _run_episode(self, request: pb.RunEpisodeRequest) -> tokens_pb2.Rewards:
        async for response in self._stub.RunEpisode(request):
            if response.HasField("rewards"):
                return response.rewards
        raise SeamflowError(
            f"episode {request.episode_id!r} ended without rewards: the environment broke its "
            "contract"
        )

    async def close_episode(self, episode_id: str) -> None:
        """End an episode. Failures are left to the server, which closes idle episodes itself."""
        request = pb.CloseRequest(episode_id=episode_id)
        try:
            await retrying(lambda: self._stub.Close(request), timeout=_CLOSE_SECONDS)
        except SeamflowError:
            return


class OpenEpisode:
    """An episode of a stepped environment. Close it, or use `async with`."""

    def __init__(
        self, client: EnvironmentClient, episode_id: str, response: pb.ResetResponse
    ) -> None:
        self.episode_id = episode_id
        self.observation = Observation(
            messages=[to_dict(message) for message in response.messages],
            tools=[tool_dict(tool) for tool in response.tools],
            info=_info(response.info_json),
        )
        """What it started with."""
        self._client = client
        self._num_steps = 0

    async def step(self, message: Message, *, timeout: float | None = 60.0) -> Step:
        """The environment's answer to a message of the policy."""
        request = pb.StepRequest(
            episode_id=self.episode_id,
            step_index=self._num_steps,
            message=to_messages([message]).messages[0],
        )
        response = await self._client.step(request, timeout)
        self._num_steps += 1
        return Step(
            messages=[to_dict(each) for each in response.messages],
            rewards=rewards_of(response.rewards),
            done=response.is_done,
            truncated=response.is_truncated,
            info=_info(response.info_json),
            policy_failure=response.policy_failure,
        )

    async def close(self) -> None:
        await self._client.close_episode(self.episode_id)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()


def _task(task: Task) -> trajectory_pb2.Task:
    purpose = tokens_pb2.PURPOSE_TRAIN if task.train else tokens_pb2.PURPOSE_EVAL
    payload = json.dumps(dict(task.payload))
    return trajectory_pb2.Task(task_id=task.task_id, payload_json=payload, purpose=purpose)


def _info(text: str) -> Mapping[str, Any]:
    info: Mapping[str, Any] = json.loads(text or "{}")
    return info
