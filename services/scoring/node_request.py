"""Requests the node that the scorer computes on while samples lack the column.

RELEASED -> REQUESTED    `request_samples` lack it, or the last ones do: no rollout runs
REQUESTED -> RELEASED    an eighth of that number or fewer do while others are generated, else none

The scheduler takes the node from rollout for it, and from it for training: its node agent gives
these orders to the scorer by WorkerService.
"""

from __future__ import annotations

import asyncio

import grpc.aio
from seamflow.durations import to_duration
from seamflow.errors import NotFoundError
from seamflow.scheduler.v1 import scheduler_service_pb2 as scheduler_pb
from seamflow.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from seamflow.stubs import async_stub
from seamflow.trajectory.v1 import column_service_pb2 as pb
from seamflow.trajectory.v1.column_service_pb2_grpc import ColumnServiceStub

from services.chassis.log import get_logger
from services.chassis.rpc.clients import retry_forever
from services.scoring.config import ScoringConfig

_WAIT_SECONDS = 20.0
_LOOK_SECONDS = 0.5
_FEW = 8


class NodeRequest:
    """Requests one node by name, as a gang of one."""

    def __init__(
        self, config: ScoringConfig, manager: grpc.aio.Channel, scheduler: grpc.aio.Channel
    ) -> None:
        self._config = config
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
        backlog = await self._backlog(self._config.request_samples, _WAIT_SECONDS)
        is_last = not backlog.num_running_rollouts
        return backlog.num_samples > 0 and (
            is_last or backlog.num_samples >= self._config.request_samples
        )

    async def _until_few(self) -> None:
        """Wait until the node is worth more elsewhere: samples trickle in while others run."""
        while True:
            backlog = await self._backlog(1, 0)
            few = self._config.request_samples // _FEW if backlog.num_running_rollouts else 0
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
        request = scheduler_pb.ReleaseNodesRequest(
            run_id=self._config.run_id, gang_id=self._gang_id
        )
        await retry_forever("ReleaseNodes", lambda: self._scheduler.ReleaseNodes(request))
        get_logger().info("node_released", node_id=self._config.node_id)
