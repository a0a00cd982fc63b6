"""environment.v1.RewardService of a user's reward function."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import grpc.aio

from seamflow.environment.call_error import Guard, from_user, invalid_field
from seamflow.environment.environment import RewardFunction
from seamflow.environment.episode_thread import EpisodeThread
from seamflow.environment.request_fields import check_name, to_dict, to_task
from seamflow.environment.returned_values import to_rewards
from seamflow.environment.v1 import reward_service_pb2 as pb
from seamflow.environment.v1.reward_service_pb2_grpc import RewardServiceServicer
from seamflow.user_code.user_calls import awaited

__all__ = ["RewardServicer"]

_MAX_TRANSCRIPTS = 256
_MAX_THREADS = 64


class RewardServicer(RewardServiceServicer):
    """Scores with one function; a function that is not `async` runs in threads."""

    def __init__(self, reward: RewardFunction, guard: Guard) -> None:
        self._reward = reward
        self._guard = guard
        self._room = asyncio.Semaphore(_MAX_THREADS)

    async def Score(  # noqa: N802
        self, request: pb.ScoreRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ScoreResponse:
        """Score each transcript."""
        return await self._guard.answer(context, lambda: self._score_all(request))

    async def _score_all(self, request: pb.ScoreRequest) -> pb.ScoreResponse:
        number = len(request.transcripts)
        if not 1 <= number <= _MAX_TRANSCRIPTS:
            cure = f"send 1 to {_MAX_TRANSCRIPTS} transcripts"
            raise invalid_field("transcripts", f"{number} transcripts", cure)
        for index, transcript in enumerate(request.transcripts):
            check_name(f"transcripts[{index}].rollout_id", transcript.rollout_id)
        results = await asyncio.gather(
            *(self._score(index, each) for index, each in enumerate(request.transcripts))
        )
        return pb.ScoreResponse(results=results)

    async def _in_thread(self, *arguments: Any) -> Any:
        """What the function returns; one that never does holds neither others nor the end."""
        async with self._room:
            thread = EpisodeThread("reward")
            try:
                return await thread.run(self._reward, *arguments)
            finally:
                thread.end()

    async def _score(self, index: int, transcript: pb.Transcript) -> pb.ScoreResult:
        task = to_task(f"transcripts[{index}].task", transcript.task)
        messages = [to_dict(message) for message in transcript.messages]
        try:
            if inspect.iscoroutinefunction(self._reward):
                returned = await awaited(self._reward(task, messages))
            else:
                returned = await self._in_thread(task, messages)
            rewards = to_rewards("reward", returned)
        except Exception as error:
            what = f"reward of rollout {transcript.rollout_id!r} on task {task.task_id!r}"
            return pb.ScoreResult(error=from_user(error, what).status())
        return pb.ScoreResult(rewards=pb.TranscriptRewards(rewards=rewards))
