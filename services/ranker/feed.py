"""The turns of a run that have ended, as the trajectory manager lists them, each once."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from seamflow.common.v1 import tokens_pb2
from seamflow.errors import NotFoundError
from seamflow.retry import retrying
from seamflow.trajectory.v1 import trajectory_pb2
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb

from services.ranker.features import Beginning

if TYPE_CHECKING:
    from seamflow.trajectory.v1.trajectory_service_pb2_grpc import TrajectoryServiceAsyncStub

__all__ = ["EndedTurn", "TurnFeed", "ended_turns"]

_PAGE = 1000
_AT_ONCE = 8
_ENDED = (tokens_pb2.FINISH_REASON_STOP, tokens_pb2.FINISH_REASON_LENGTH)
_RUNNING = trajectory_pb2.ROLLOUT_STATE_RUNNING


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedTurn:
    """A turn and how long it became."""

    beginning: Beginning
    """As it began."""
    num_tokens: int
    """Tokens that were sampled."""


class TurnFeed:
    """Reads rollouts for training in the order of the run's list, once they are closed.

    The list grows at its end and, where old groups are deleted, shrinks at its beginning: then the
    feed steps back until it meets a rollout that it knows.
    """

    def __init__(
        self, store: TrajectoryServiceAsyncStub, run_id: str, max_rollouts: int = 16_384
    ) -> None:
        """Start with the newest `max_rollouts` of the list; as many are known again."""
        self._store = store
        self._run_id = run_id
        self._max_rollouts = max_rollouts
        self._start: int | None = None  # of the list: everything before is done
        self._done: OrderedDict[str, None] = OrderedDict()

    async def ended(self) -> AsyncIterator[EndedTurn]:
        """The turns of all rollouts that have closed since the last call."""
        if self._start is None:
            self._start = max(0, await self._length() - self._max_rollouts)
        await self._step_back()
        start, all_done = self._start, True
        while page := await self._page(start, _PAGE):
            closed = [header.rollout_id for header in page if self._is_due(header)]
            for names in _batches(closed):
                for trajectory in await asyncio.gather(*map(self._read, names)):
                    for turn in ended_turns(trajectory):
                        yield turn
                for name in names:
                    self._remember(name)
            for header in page:
                all_done = all_done and header.rollout_id in self._done
                self._start += all_done
            start += len(page)
        # One that never closes must not keep the list from being passed.
        self._start = max(self._start, start - self._max_rollouts)

    def _is_due(self, header: trajectory_pb2.Trajectory) -> bool:
        """Whether to read a rollout now; what is not for training is done unread."""
        if header.rollout_id in self._done:
            return False
        if header.purpose != tokens_pb2.PURPOSE_TRAIN:
            self._remember(header.rollout_id)
            return False
        return header.state != _RUNNING

    def _remember(self, rollout_id: str) -> None:
        self._done[rollout_id] = None
        # Twice, so that all between `_start` and the end of the list are known.
        if len(self._done) > 2 * self._max_rollouts:
            self._done.popitem(last=False)

    async def _step_back(self) -> None:
        """Where the list has become shorter, go back to what is known to be done."""
        assert self._start is not None
        step = 1
        while self._start > 0 and self._done:
            before = await self._page(self._start - 1, 1)
            if before and before[0].rollout_id in self._done:
                return
            self._start = max(0, self._start - step)
            step *= 2

    async def _length(self) -> int:
        """Of the list, by doubling and halving."""
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

    async def _read(self, rollout_id: str) -> trajectory_pb2.Trajectory:
        request = pb.GetTrajectoryRequest(run_id=self._run_id, rollout_id=rollout_id)
        try:
            response = await retrying(lambda: self._store.GetTrajectory(request))
        except NotFoundError:  # deleted since it was listed
            return trajectory_pb2.Trajectory()
        return response.trajectory


def ended_turns(trajectory: trajectory_pb2.Trajectory) -> Iterator[EndedTurn]:
    """The turns that ended by themselves, whatever became of their rollout."""
    sequences: dict[str, list[int]] = {"": []}
    depths = {"": 0}
    for turn in trajectory.turns:
        parent = sequences.get(turn.parent_turn_id, [])
        num_sampled = sum(
            span.num_tokens for span in turn.tokens.spans if span.origin == tokens_pb2.ORIGIN_POLICY
        )
        whole = [*parent[: turn.prefix_length], *turn.tokens.token_ids]
        depth = depths.get(turn.parent_turn_id, 0)
        sequences[turn.turn_id], depths[turn.turn_id] = whole, depth + 1
        if turn.finish_reason in _ENDED and num_sampled:
            beginning = Beginning(
                task_id=trajectory.group_id,
                token_ids=whole[: len(whole) - num_sampled],
                turn_index=depth,
            )
            yield EndedTurn(beginning=beginning, num_tokens=num_sampled)


def _batches(names: Sequence[str]) -> Iterator[Sequence[str]]:
    for first in range(0, len(names), _AT_ONCE):
        yield names[first : first + _AT_ONCE]
