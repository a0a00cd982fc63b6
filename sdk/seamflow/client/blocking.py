"""The client for agents without asyncio: the same calls, which block.

    with BlockingClient("127.0.0.1:50052", run_id="demo") as client:
        rollout = client.start_rollout()
        turn = rollout.generate([{"role": "user", "content": "2+2?"}])
        rollout.finish({"reward": float(turn.text == "4")})

One event loop in a thread of its own serves all threads of the agent; leases are kept alive there.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from seamflow.client.client import Client
from seamflow.client.rollout_client import Rollout
from seamflow.client.turn import Task, Turn
from seamflow.common.v1 import tokens_pb2

T = TypeVar("T")


class BlockingClient:
    """`Client` with calls that block. Close it, or use `with`."""

    def __init__(self, gateway: str, *, run_id: str, **options: Any) -> None:
        """`options` are those of `Client`."""
        self.run_id = run_id
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._client = self._wait(_created(gateway, run_id, options))

    def lease_rollouts(self, max_rollouts: int = 1, **options: Any) -> list[BlockingRollout]:
        """As `Client.lease_rollouts`."""
        leased = self._wait(self._client.lease_rollouts(max_rollouts, **options))
        return [BlockingRollout(rollout, self) for rollout in leased]

    def start_rollout(self, rollout_id: str | None = None, **options: Any) -> BlockingRollout:
        """As `Client.start_rollout`."""
        return BlockingRollout(self._wait(self._client.start_rollout(rollout_id, **options)), self)

    def tokenize(self, prompt: str | Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """As `Client.tokenize`."""
        return self._wait(self._client.tokenize(prompt, **options))

    def close(self) -> None:
        """Close the connection; open calls fail."""
        self._wait(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _wait(self, call: Coroutine[Any, Any, T]) -> T:
        """The result of a call; an interrupt of this thread cancels it."""
        running = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return running.result()
        except BaseException:
            running.cancel()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class BlockingRollout:
    """`Rollout` with calls that block."""

    def __init__(self, rollout: Rollout, client: BlockingClient) -> None:
        self.rollout_id = rollout.rollout_id
        self.task: Task | None = rollout.task
        """The leased task; None: the rollout was started without one."""
        self._rollout = rollout
        self._wait = client._wait

    @property
    def is_lost(self) -> bool:
        """Whether its lease is lost: it is replaced, so stop working on it."""
        return self._rollout.lost.is_set()

    def generate(
        self,
        messages: Sequence[Mapping[str, Any]] = (),
        sampling: tokens_pb2.SamplingParams | None = None,
        **options: Any,
    ) -> Turn:
        """As `Rollout.generate`; `on_tokens` is called in the client's thread."""
        return self._wait(self._rollout.generate(messages, sampling, **options))

    def finish(self, rewards: Mapping[str, float] | float, **options: Any) -> None:
        """As `Rollout.finish`."""
        self._wait(self._rollout.finish(rewards, **options))

    def fail(self, failure_class: tokens_pb2.FailureClass.ValueType, message: str) -> None:
        """As `Rollout.fail`."""
        self._wait(self._rollout.fail(failure_class, message))


async def _created(gateway: str, run_id: str, options: Mapping[str, Any]) -> Client:
    return Client(gateway, run_id=run_id, **options)
