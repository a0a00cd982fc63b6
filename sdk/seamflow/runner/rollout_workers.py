"""Workers on the rollouts of a run: each leases one, works on it, and goes on with the next.

Leases are extended while the work goes on; a lost lease cancels it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress

from seamflow.client import Client, Rollout
from seamflow.common.v1 import tokens_pb2
from seamflow.errors import NotFoundError, RunEndedError, SeamflowError
from seamflow.retry import OF_ONE_CALL, Backoff

__all__ = ["MAX_MESSAGE", "RolloutWorkers"]

MAX_MESSAGE = 4096
"""Characters of a failure's message that are sent."""

_log = logging.getLogger("seamflow.runner")
_MAX_LEASES = 8
_POLL_SECONDS = 0.5
_GIVE_BACK_SECONDS = 5.0


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


class RolloutWorkers:
    """Work on many rollouts at once until the run ends."""

    def __init__(
        self,
        client: Client,
        work: Callable[[Rollout], Awaitable[None]],
        *,
        rollouts: int,
        evaluation: int,
    ) -> None:
        """Prepare the workers.

        Args:
            client: of the run; owned by the caller.
            work: what is done with a leased rollout; it finishes or fails it. One that raises a
                `SeamflowError` is failed as INFRASTRUCTURE.
            rollouts: at once, of training and of evaluations.
            evaluation: further ones, of evaluations alone: training may have to wait for the
                rollout server that an evaluation holds, so its rollouts must not keep the
                evaluation's out.
        """
        self._work = work
        self._any, self._evaluation = _Leases(client, None), _Leases(client, False)
        self._sources = [self._any] * rollouts + [self._evaluation] * evaluation
        self._cut_short: list[Rollout] = []

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set or the run ends; then running rollouts are given back."""
        workers = [asyncio.create_task(self._work_on(source)) for source in self._sources]
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

    async def _work_on(self, source: _Leases) -> None:
        """Work on one rollout after the other until the run ends."""
        try:
            while True:
                await self._rollout(await source.next())
        except RunEndedError as error:
            _log.info("%s", error)

    async def _rollout(self, rollout: Rollout) -> None:
        """Run one rollout from lease to end; one whose lease is lost is abandoned."""
        working = asyncio.ensure_future(self._work(rollout))
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
        reason = "its runner was stopped"
        with suppress(TimeoutError):
            async with asyncio.timeout(_GIVE_BACK_SECONDS):
                cancelled = tokens_pb2.FAILURE_CLASS_CANCELLED
                await asyncio.gather(*(self._give_back(each, cancelled, reason) for each in left))

    async def _give_back(
        self, rollout: Rollout, failure: tokens_pb2.FailureClass.ValueType, message: str
    ) -> None:
        """Fail an unfinished rollout, which is replaced."""
        with suppress(SeamflowError):  # it has ended already
            await rollout.fail(failure, message[:MAX_MESSAGE])
