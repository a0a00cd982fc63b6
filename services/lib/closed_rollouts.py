"""Closed rollouts of a run, listed by the trajectory manager, each once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING

from seamflow.common.v1 import tokens_pb2
from seamflow.retry import retrying
from seamflow.trajectory.v1 import trajectory_pb2
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb

if TYPE_CHECKING:
    from seamflow.trajectory.v1.trajectory_service_pb2_grpc import TrajectoryServiceAsyncStub

_PAGE = 1000
_BATCH_SIZE = 8
_RUNNING = trajectory_pb2.ROLLOUT_STATE_RUNNING


class ClosedRollouts:
    """Lists closed training rollouts in the order of the run's list.

    The list grows at its end and shrinks at its beginning when old groups are deleted; then the
    position is moved back until it reaches a known rollout.
    """

    def __init__(
        self, store: TrajectoryServiceAsyncStub, run_id: str, max_rollouts: int = 16_384
    ) -> None:
        """Start with the newest `max_rollouts` of the list; at least as many are remembered."""
        self._store = store
        self._run_id = run_id
        self._max_rollouts = max_rollouts
        self._start: int | None = None  # of the list: everything before is done
        self._done: OrderedDict[str, None] = OrderedDict()

    async def new(self) -> AsyncIterator[Sequence[trajectory_pb2.Trajectory]]:
        """Headers of rollouts closed since the last call, in small batches.

        A batch whose processing did not finish is repeated by the next call.
        """
        if self._start is None:
            self._start = max(0, await self._length() - self._max_rollouts)
        await self._rewind()
        start, all_done = self._start, True
        while page := await self._page(start, _PAGE):
            closed = [header for header in page if self._is_new_and_closed(header)]
            for few in _batches(closed):
                yield few
                for header in few:
                    self._mark_done(header.rollout_id)
            for header in page:
                all_done = all_done and header.rollout_id in self._done
                self._start += all_done
            start += len(page)
        # A rollout that never closes must not block progress.
        self._start = max(self._start, start - self._max_rollouts)

    def _is_new_and_closed(self, header: trajectory_pb2.Trajectory) -> bool:
        """Whether the rollout is new, closed and for training; others are skipped."""
        if header.rollout_id in self._done:
            return False
        if header.purpose != tokens_pb2.PURPOSE_TRAIN:
            self._mark_done(header.rollout_id)
            return False
        return header.state != _RUNNING

    def _mark_done(self, rollout_id: str) -> None:
        self._done[rollout_id] = None
        # Twice, so that all between `_start` and the end of the list are remembered.
        if len(self._done) > 2 * self._max_rollouts:
            self._done.popitem(last=False)

    async def _rewind(self) -> None:
        """Move `_start` back to a known rollout after the list has become shorter."""
        assert self._start is not None
        step = 1
        while self._start > 0 and self._done:
            before = await self._page(self._start - 1, 1)
            if before and before[0].rollout_id in self._done:
                return
            self._start = max(0, self._start - step)
            step *= 2

    async def _length(self) -> int:
        """Length of the list, by exponential and binary search."""
        low, high = 0, _PAGE
        while await self._page(high, 1):
            low, high = high, 2 * high
        while high - low > _PAGE:
            middle = (low + high) // 2
            low, high = (middle, high) if await self._page(middle, 1) else (low, middle)
        return low + len(await self._page(low, _PAGE))

    async def _page(self, start: int, size: int) -> Sequence[trajectory_pb2.Trajectory]:
        request = pb.ListTrajectoriesRequest(
            run_id=self._run_id, page_size=size, page_token=str(start), headers_only=True
        )
        response = await retrying(lambda: self._store.ListTrajectories(request))
        return response.trajectories


def task_name(task_id: str) -> str:
    """The task name without the epoch that the dataloader appends, as in `name@epoch`."""
    name, _, epoch = task_id.rpartition("@")
    return name if name and epoch.isdecimal() else task_id


def _batches(
    headers: Sequence[trajectory_pb2.Trajectory],
) -> Iterator[Sequence[trajectory_pb2.Trajectory]]:
    for first in range(0, len(headers), _BATCH_SIZE):
        yield headers[first : first + _BATCH_SIZE]
