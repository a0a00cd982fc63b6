"""Requests the node that the scorer computes on while samples lack the column.

RELEASED -> REQUESTED    `request_samples` lack it, or the last ones do: no rollout runs
REQUESTED -> RELEASED    an eighth of that number or fewer do while others are generated, else none

With `start_at_tail` (RLHFuse, arXiv 2409.13221, inter-stage fusion) the numbers are of a batch:

RELEASED -> REQUESTED    all but R_t rollouts of a batch lack it, or the last ones do
REQUESTED -> RELEASED    a batch has been scored, or none lacks it and no rollout runs

The scheduler takes the node from rollout for it, and from it for training: its node agent gives
these orders to the scorer by WorkerService.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc.aio
import numpy as np
from seamflow.durations import to_duration
from seamflow.errors import NotFoundError
from seamflow.scheduler.v1 import scheduler_service_pb2 as scheduler_pb
from seamflow.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from seamflow.stubs import async_stub
from seamflow.trajectory.v1 import column_service_pb2 as pb
from seamflow.trajectory.v1 import trajectory_pb2
from seamflow.trajectory.v1.column_service_pb2_grpc import ColumnServiceStub

from services.chassis.log import get_logger
from services.chassis.rpc.clients import retry_forever
from services.scoring.config import ScoringConfig

_WAIT_SECONDS = 20.0
_LOOK_SECONDS = 0.5
_FEW = 8


@dataclass(slots=True)
class ScoredRollouts:
    """What was scored since the node was released, from which the scheduler computes R_t."""

    _sampled: Counter[str] = field(default_factory=Counter)
    """Tokens that each rollout sampled."""
    _num_tokens: int = 0
    _seconds: float = 0.0

    def __len__(self) -> int:
        return len(self._sampled)

    def add(self, samples: Sequence[trajectory_pb2.Sample], seconds: float) -> None:
        """Add samples that were scored together."""
        for sample in samples:
            self._sampled[sample.rollout_id] += int(np.frombuffer(sample.loss_mask, "u1").sum())
            self._num_tokens += len(sample.loss_mask)
        self._seconds += seconds

    def take(self) -> scheduler_pb.MeasuredBatch | None:
        """It as a batch, each rollout by itself; None if there is nothing. Begins anew."""
        sampled, self._sampled = self._sampled, Counter()
        num_tokens, self._num_tokens = self._num_tokens, 0
        seconds, self._seconds = self._seconds, 0.0
        if not sampled:
            return None
        return scheduler_pb.MeasuredBatch(
            groups=[scheduler_pb.GroupTokens(rollout_tokens=[max(n, 1)]) for n in sampled.values()],
            training_duration=to_duration(seconds),
            prompt_tokens=max(num_tokens - sampled.total(), 0) / len(sampled),
        )


class NodeRequest:
    """Requests one node by name, as a gang of one.

    Args:
        config: of the scoring service.
        manager: channel of the trajectory manager.
        scheduler: channel of the scheduler.
        scored: what the scorer adds to.
    """

    def __init__(
        self,
        config: ScoringConfig,
        manager: grpc.aio.Channel,
        scheduler: grpc.aio.Channel,
        scored: ScoredRollouts,
    ) -> None:
        self._config = config
        self._scored = scored
        self._batch_rollouts = 0  # of the newest batch
        self._enough = math.inf if config.start_at_tail else config.request_samples
        self._columns = async_stub(ColumnServiceStub, manager)
        self._scheduler = async_stub(SchedulerServiceStub, scheduler)
        self._gang_id = f"scoring-{config.column}-{config.node_id}"

    async def run(self) -> None:
        """Request and release the node until cancelled."""
        await self._release()  # what an earlier life of this process requested
        while True:
            if await self._is_enough():
                await self._request()
                await self._until_few()
                await self._release()

    async def _is_enough(self) -> bool:
        """Whether it is worth a switch now; waits for it some time."""
        awaited = 1 if self._enough == math.inf else int(self._enough)
        backlog = await self._backlog(awaited, _WAIT_SECONDS)
        is_last = not backlog.num_running_rollouts
        if backlog.num_samples > 0 and (is_last or backlog.num_samples >= self._enough):
            return True
        await asyncio.sleep(_LOOK_SECONDS if backlog.num_samples >= awaited else 0)
        return False

    async def _until_few(self) -> None:
        """Wait until the node is worth more elsewhere: samples trickle in while others run.

        At the tail it waits for them, but not for long: perhaps no other node generates any more.
        """
        newest = time.monotonic()
        while True:
            backlog = await self._backlog(1, 0)
            newest = time.monotonic() if backlog.num_samples else newest
            few = self._config.request_samples // _FEW if backlog.num_running_rollouts else 0
            if self._config.start_at_tail:
                is_whole = 0 < self._batch_rollouts <= len(self._scored)
                is_over = is_whole or not backlog.num_running_rollouts
                few = 0 if is_over or time.monotonic() - newest > _WAIT_SECONDS else -1
            if backlog.num_samples <= few:
                return
            await asyncio.sleep(_LOOK_SECONDS)
            await self._request()  # again: the scheduler may have lost its state

    async def _backlog(self, min_samples: int, wait_seconds: float) -> pb.GetColumnBacklogResponse:
        request = pb.GetColumnBacklogRequest(
            run_id=self._config.run_id,
            column=self._config.column,
            min_samples=min_samples,
            wait=to_duration(wait_seconds),
        )
        try:
            return await retry_forever(
                "GetColumnBacklog", lambda: self._columns.GetColumnBacklog(request)
            )
        except NotFoundError:
            await asyncio.sleep(_LOOK_SECONDS)  # the run is created later
            return pb.GetColumnBacklogResponse()

    async def _request(self) -> None:
        """Ask for the node; granted or not, the request stands until it is released."""
        request = scheduler_pb.RequestNodesRequest(
            run_id=self._config.run_id,
            gang_id=self._gang_id,
            tag=self._config.node_tag,
            num_nodes=1,
            node_ids=[self._config.node_id],
        )
        await retry_forever("RequestNodes", lambda: self._scheduler.RequestNodes(request))

    async def _release(self) -> None:
        batch = self._scored.take() if self._config.start_at_tail else None
        request = scheduler_pb.ReleaseNodesRequest(
            run_id=self._config.run_id, gang_id=self._gang_id, newest_batch=batch
        )
        released = await retry_forever(
            "ReleaseNodes", lambda: self._scheduler.ReleaseNodes(request)
        )
        get_logger().info("node_released", node_id=self._config.node_id)
        if batch is None:
            return
        self._batch_rollouts = len(batch.groups)
        if released.HasField("tail"):
            self._enough = max(self._batch_rollouts - released.tail.remaining_rollouts, 1)
