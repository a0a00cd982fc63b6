"""environment.v1.EnvironmentService of a user's environment class."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import fields
from typing import Any

import grpc
import grpc.aio

from seamflow.client.messages import to_messages
from seamflow.client.turn import Task
from seamflow.common.v1 import tokens_pb2
from seamflow.environment.call_error import CallError, Guard, from_user, invalid_field
from seamflow.environment.environment import Endpoint
from seamflow.environment.environment_class import EnvironmentClass
from seamflow.environment.episode import Episode, UserObject
from seamflow.environment.request_fields import check_name, to_task
from seamflow.environment.returned_values import MAX_OBSERVATION_BYTES, to_rewards
from seamflow.environment.v1 import environment_service_pb2 as pb
from seamflow.environment.v1.environment_service_pb2_grpc import EnvironmentServiceServicer
from seamflow.trajectory.v1 import trajectory_pb2

_RETRY_SECONDS = 1.0

Context = grpc.aio.ServicerContext[Any, Any]

_MAX_PAGE = 1000
_ALIVE_SECONDS = 5.0


class EpisodeTable:
    """Open episodes by name."""

    def __init__(self, max_episodes: int, idle_seconds: float) -> None:
        """Episodes without a call for `idle_seconds` make room for others."""
        self._max_episodes = max_episodes
        self._idle_seconds = idle_seconds
        self._episodes: dict[str, Episode] = {}
        self._reserved: set[str] = set()
        self._closing: set[asyncio.Task[None]] = set()

    def get(self, name: str) -> Episode:
        """The episode of this name.

        Raises:
            CallError: NOT_FOUND.
        """
        if name not in self._episodes:
            raise CallError(
                grpc.StatusCode.NOT_FOUND,
                "NOT_FOUND",
                f"episode {name!r} does not exist: it was closed, was idle for more than "
                f"{self._idle_seconds:g} s, or the server was restarted; reset it again",
                metadata={"what": "episode", "name": name},
            )
        return self._episodes[name]

    def get_or_open(self, name: str, make: Callable[[], Episode]) -> Episode:
        """The episode of this name; a new one if there is none.

        Raises:
            CallError: RESOURCE_EXHAUSTED with a RetryInfo while all places are taken.
        """
        if name not in self._episodes:
            self.reserve(name)
            self._reserved.discard(name)
            self._episodes[name] = make()
        return self._episodes[name]

    def reserve(self, name: str) -> None:
        """Take a place for an episode that runs by itself, until `release`.

        Raises:
            CallError: ALREADY_EXISTS while it runs; RESOURCE_EXHAUSTED as in `get_or_open`.
        """
        if name in self._reserved:
            message = f"episode {name!r} runs already"
            raise CallError(grpc.StatusCode.ALREADY_EXISTS, "ALREADY_EXISTS", message)
        if self._num_open() >= self._max_episodes:
            self._close_idle()
        if self._num_open() >= self._max_episodes:
            raise CallError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "TOO_MANY_REQUESTS",
                f"all {self._max_episodes} episodes are taken; raise max_episodes for more",
                retry_after=_RETRY_SECONDS,
            )
        self._reserved.add(name)

    def release(self, name: str) -> None:
        self._reserved.discard(name)

    def close(self, name: str) -> None:
        """Close an episode, if it is open; its place is free at once."""
        episode = self._episodes.pop(name, None)
        if episode is not None:
            closing = asyncio.create_task(episode.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def close_all(self, timeout: float) -> None:
        """Close all episodes, waiting for them at most `timeout` seconds."""
        for name in list(self._episodes):
            self.close(name)
        if self._closing:
            await asyncio.wait(self._closing, timeout=timeout)

    def _num_open(self) -> int:
        return len(self._episodes) + len(self._reserved)

    def _close_idle(self) -> None:
        oldest = time.monotonic() - self._idle_seconds
        for name in [n for n, e in self._episodes.items() if e.last_call < oldest]:
            self.close(name)


class EnvironmentServicer(EnvironmentServiceServicer):
    """Serves one environment class: an object for each episode."""

    def __init__(
        self,
        environment: EnvironmentClass,
        guard: Guard,
        idle_seconds: float,
        max_bytes: int = MAX_OBSERVATION_BYTES,
    ) -> None:
        """Answers whose messages and info are larger than `max_bytes` fail their episode."""
        self._environment = environment
        self._max_bytes = max_bytes
        self._guard = guard
        self.episodes = EpisodeTable(environment.max_episodes, idle_seconds)

    async def Describe(  # noqa: N802
        self, request: pb.DescribeRequest, context: Context
    ) -> pb.DescribeResponse:
        return await self._guard.answer(context, self._describe)

    async def ListTasks(  # noqa: N802
        self, request: pb.ListTasksRequest, context: Context
    ) -> pb.ListTasksResponse:
        return await self._guard.answer(context, lambda: self._list_tasks(request))

    async def Reset(  # noqa: N802
        self, request: pb.ResetRequest, context: Context
    ) -> pb.ResetResponse:
        return await self._guard.answer(context, lambda: self._reset(request))

    async def Step(self, request: pb.StepRequest, context: Context) -> pb.StepResponse:  # noqa: N802
        return await self._guard.answer(context, lambda: self._step(request))

    async def Close(self, request: pb.CloseRequest, context: Context) -> pb.CloseResponse:  # noqa: N802
        return await self._guard.answer(context, lambda: self._close(request))

    async def RunEpisode(  # noqa: N802
        self, request: pb.RunEpisodeRequest, context: Context
    ) -> AsyncIterator[pb.RunEpisodeResponse]:
        try:
            self._guard.check(context)
            async for response in self._run_episode(request):
                yield response
        except CallError as error:
            await self._guard.abort(context, error)

    async def _describe(self) -> pb.DescribeResponse:
        environment = self._environment
        return pb.DescribeResponse(
            name=environment.name,
            kind=environment.kind,
            tools=to_messages((), environment.tools).tools,
            num_tasks=len(environment.tasks),
            max_episodes=environment.max_episodes,
            is_seeded=environment.is_seeded,
        )

    async def _list_tasks(self, request: pb.ListTasksRequest) -> pb.ListTasksResponse:
        if not 0 <= request.page_size <= _MAX_PAGE:
            cure = f"must be 1 to {_MAX_PAGE}, or 0 for {_MAX_PAGE}"
            raise invalid_field("page_size", request.page_size, cure)
        token = request.page_token or "0"
        if not (token.isascii() and token.isdigit()):
            cure = "send the next_page_token of the page before"
            raise invalid_field("page_token", request.page_token, cure)
        start, tasks = int(token), self._environment.tasks
        end = start + (request.page_size or _MAX_PAGE)
        return pb.ListTasksResponse(
            tasks=[_listed(task) for task in tasks[start:end]],
            next_page_token=str(end) if end < len(tasks) else "",
        )

    async def _reset(self, request: pb.ResetRequest) -> pb.ResetResponse:
        self._check_kind(pb.ENVIRONMENT_KIND_STEPPED, "Reset", "RunEpisode")
        task = _checked(request)
        episode = self.episodes.get_or_open(
            request.episode_id,
            lambda: Episode(
                self._environment.make, self._environment.tools, task, request, self._max_bytes
            ),
        )
        try:
            return await episode.reset(request)
        except CallError as error:
            if error.code is grpc.StatusCode.RESOURCE_EXHAUSTED:  # it has not started
                self.episodes.close(request.episode_id)
            raise

    async def _step(self, request: pb.StepRequest) -> pb.StepResponse:
        check_name("episode_id", request.episode_id)
        if request.message.role != "assistant":
            cure = 'send the message of the policy, whose role is "assistant"'
            raise invalid_field("message.role", request.message.role, cure)
        return await self.episodes.get(request.episode_id).step(request)

    async def _close(self, request: pb.CloseRequest) -> pb.CloseResponse:
        check_name("episode_id", request.episode_id)
        self.episodes.close(request.episode_id)
        return pb.CloseResponse()

    async def _run_episode(
        self, request: pb.RunEpisodeRequest
    ) -> AsyncIterator[pb.RunEpisodeResponse]:
        self._check_kind(pb.ENVIRONMENT_KIND_SELF_DRIVING, "RunEpisode", "Reset and Step")
        task = _checked(request)
        self.episodes.reserve(request.episode_id)
        user = UserObject(self._environment.make, f"episode {request.episode_id}")
        running = asyncio.create_task(_run(user, task, request))
        try:
            while not running.done():
                yield pb.RunEpisodeResponse(alive=pb.EpisodeAlive())
                await asyncio.wait([running], timeout=_ALIVE_SECONDS)
            yield running.result()
        finally:
            running.cancel()
            self.episodes.release(request.episode_id)
            await asyncio.gather(running, return_exceptions=True)
            await user.close()

    def _check_kind(self, kind: int, rpc: str, other: str) -> None:
        if self._environment.kind != kind:
            raise CallError(
                grpc.StatusCode.FAILED_PRECONDITION,
                "UNSUPPORTED",
                f"{rpc} is not served by environment {self._environment.name!r}: call {other}, "
                "as its kind in Describe says",
            )


async def _run(
    user: UserObject, task: Task, request: pb.RunEpisodeRequest
) -> pb.RunEpisodeResponse:
    endpoint = Endpoint(**{field.name: getattr(request, field.name) for field in fields(Endpoint)})
    try:
        rewards = to_rewards("run", await user.call("run", task, endpoint, request.seed))
    except Exception as error:
        raise from_user(error, f"run of task {task.task_id!r}") from error
    return pb.RunEpisodeResponse(rewards=tokens_pb2.Rewards(rewards=rewards))


def _checked(request: pb.ResetRequest | pb.RunEpisodeRequest) -> Task:
    """The task of a valid request."""
    check_name("episode_id", request.episode_id)
    if request.seed < 0:
        raise invalid_field("seed", request.seed, "must be at least 0")
    return to_task("task", request.task)


def _listed(task: Task) -> trajectory_pb2.Task:
    return trajectory_pb2.Task(task_id=task.task_id, payload_json=json.dumps(dict(task.payload)))
