"""One episode of a stepped environment: its object, and the answers given so far."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from seamflow.client.messages import Tool, from_message
from seamflow.client.turn import Task
from seamflow.environment.call_error import CallError, from_user
from seamflow.environment.episode_thread import EpisodeThread
from seamflow.environment.returned_values import MAX_OBSERVATION_BYTES, to_reset, to_step
from seamflow.environment.v1 import environment_service_pb2 as pb
from seamflow.user_code.user_calls import awaited

_log = logging.getLogger("seamflow.environment")


class UserObject:
    """An object of the user's class: async methods run on the event loop, others in its thread."""

    def __init__(self, make: Callable[[], Any], name: str) -> None:
        self._make = make
        self._thread = EpisodeThread(name)
        self._object: Any = None

    async def call(self, method: str, *arguments: Any) -> Any:
        """The result of `object.method(*arguments)`; the first call makes the object."""
        if self._object is None:
            self._object = await self._thread.run(self._make)
        function = getattr(self._object, method)
        if inspect.iscoroutinefunction(function):
            return await awaited(function(*arguments))
        result = await self._thread.run(function, *arguments)
        return await awaited(result) if inspect.isawaitable(result) else result

    async def close(self) -> None:
        """Call the object's `close`, if it has one, and end the thread; errors are logged."""
        try:
            if hasattr(self._object, "close"):
                await self.call("close")
        except Exception:
            _log.exception("close of an environment failed")
        finally:
            self._thread.end()


class Episode:
    """An episode from Reset to Close. A repeated call gets the answer of the first."""

    def __init__(
        self,
        make: Callable[[], Any],
        tools: Sequence[Tool],
        task: Task,
        request: pb.ResetRequest,
        max_bytes: int = MAX_OBSERVATION_BYTES,
    ) -> None:
        self._user = UserObject(make, f"episode {request.episode_id}")
        self._task = task
        self._request = request
        self._max_bytes = max_bytes
        self._reset = asyncio.create_task(self._resetting(tools))
        self._steps: tuple[pb.StepRequest, asyncio.Task[pb.StepResponse]] | None = None
        self.last_call = time.monotonic()
        """When it was last called, in seconds of the monotonic clock."""

    async def reset(self, request: pb.ResetRequest) -> pb.ResetResponse:
        """The first answer.

        Raises:
            CallError: ALREADY_EXISTS for another task or seed; the environment's failure.
        """
        self.last_call = time.monotonic()
        if request != self._request:
            raise _other_content("episode", request.episode_id)
        return await asyncio.shield(self._reset)

    async def step(self, request: pb.StepRequest) -> pb.StepResponse:
        """The answer to a message.

        Raises:
            CallError: STEP_OUT_OF_ORDER, WRONG_STATE, ALREADY_EXISTS for another message under the
                same index; the environment's failure.
        """
        self.last_call = time.monotonic()
        last = self._steps
        if last is not None and last[0].step_index == request.step_index:
            if last[0] != request:
                raise _other_content("step", str(request.step_index))
            return await asyncio.shield(last[1])
        self._check_next(request.step_index)
        answering = asyncio.create_task(self._stepping(request))
        self._steps = (request, answering)
        return await asyncio.shield(answering)

    async def close(self) -> None:
        """Stop what runs, and free the object without waiting for a call that blocks."""
        running = [self._reset, *([self._steps[1]] if self._steps else [])]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._user.close()

    def _check_next(self, index: int) -> None:
        """Raise `CallError` unless `index` follows an answered step and the episode goes on."""
        before = self._steps[1] if self._steps else self._reset
        expected = self._steps[0].step_index + 1 if self._steps else 0
        if index != expected or not before.done():
            raise CallError(
                grpc.StatusCode.FAILED_PRECONDITION,
                "STEP_OUT_OF_ORDER",
                f"step_index is {index}: the next is {expected}, after the answer to the one "
                "before",
            )
        if self._has_ended(before):
            raise CallError(
                grpc.StatusCode.FAILED_PRECONDITION,
                "WRONG_STATE",
                f"step_index is {index}: the episode ended before it; reset another one",
            )

    def _has_ended(self, before: asyncio.Task[Any]) -> bool:
        if before.cancelled() or before.exception() is not None:
            return True
        answer = before.result()
        return isinstance(answer, pb.StepResponse) and (answer.is_done or answer.is_truncated)

    async def _resetting(self, tools: Sequence[Tool]) -> pb.ResetResponse:
        try:
            returned = await self._user.call("reset", self._task, self._request.seed)
            return to_reset(returned, tools, self._max_bytes)
        except Exception as error:
            raise from_user(error, f"reset of task {self._task.task_id!r}") from error

    async def _stepping(self, request: pb.StepRequest) -> pb.StepResponse:
        try:
            returned = await self._user.call("step", from_message(request.message))
            return to_step(returned, self._max_bytes)
        except Exception as error:
            what = f"step {request.step_index} of task {self._task.task_id!r}"
            raise from_user(error, what) from error


def _other_content(what: str, name: str) -> CallError:
    message = f"{what} {name!r} already exists with different content"
    return CallError(grpc.StatusCode.ALREADY_EXISTS, "ALREADY_EXISTS", message)
