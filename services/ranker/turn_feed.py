"""A feed of the ended turns of a run, each once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from seamflow.common.v1 import tokens_pb2
from seamflow.errors import NotFoundError
from seamflow.retry import retrying
from seamflow.trajectory.v1 import trajectory_pb2
from seamflow.trajectory.v1 import trajectory_service_pb2 as pb

from services.lib.closed_rollouts import ClosedRollouts
from services.ranker.features import TurnStart

if TYPE_CHECKING:
    from seamflow.trajectory.v1.trajectory_service_pb2_grpc import TrajectoryServiceAsyncStub

_ENDED = (tokens_pb2.FINISH_REASON_STOP, tokens_pb2.FINISH_REASON_LENGTH)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedTurn:
    """A turn and its length."""

    start: TurnStart
    num_tokens: int


class TurnFeed:
    """Reads training rollouts once they are finished."""

    def __init__(
        self, store: TrajectoryServiceAsyncStub, run_id: str, max_rollouts: int = 16_384
    ) -> None:
        """Start with the newest `max_rollouts`."""
        self._store = store
        self._run_id = run_id
        self._closed = ClosedRollouts(store, run_id, max_rollouts)

    async def ended(self) -> AsyncIterator[EndedTurn]:
        """The turns of all rollouts that have finished since the last call."""
        async for headers in self._closed.new():
            names = [header.rollout_id for header in headers]
            for trajectory in await asyncio.gather(*map(self._read, names)):
                for turn in ended_turns(trajectory):
                    yield turn

    async def _read(self, rollout_id: str) -> trajectory_pb2.Trajectory:
        request = pb.GetTrajectoryRequest(run_id=self._run_id, rollout_id=rollout_id)
        try:
            response = await retrying(lambda: self._store.GetTrajectory(request))
        except NotFoundError:  # deleted since it was listed
            return trajectory_pb2.Trajectory()
        return response.trajectory


def ended_turns(trajectory: trajectory_pb2.Trajectory) -> Iterator[EndedTurn]:
    """The turns that ended with STOP or LENGTH, also of failed rollouts."""
    sequences: dict[str, list[int]] = {"": []}
    depths = {"": 0}
    for turn in trajectory.turns:
        parent = sequences.get(turn.prefix_turn_id, [])
        num_sampled = sum(
            span.num_tokens for span in turn.tokens.spans if span.origin == tokens_pb2.ORIGIN_POLICY
        )
        whole = [*parent[: turn.prefix_length], *turn.tokens.token_ids]
        depth = depths.get(turn.prefix_turn_id, 0)
        sequences[turn.turn_id], depths[turn.turn_id] = whole, depth + 1
        if turn.finish_reason in _ENDED and num_sampled:
            start = TurnStart(
                task_id=trajectory.group_id,
                token_ids=whole[: len(whole) - num_sampled],
                turn_index=depth,
            )
            yield EndedTurn(start=start, num_tokens=num_sampled)
