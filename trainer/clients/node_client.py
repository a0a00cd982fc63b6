"""The scheduler, as the trainer calls it: nodes of its gang."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc.aio
from google.protobuf.timestamp_pb2 import Timestamp
from seamflow.durations import seconds_of, to_duration
from seamflow.pages import pages
from seamflow.scheduler.v1 import scheduler_service_pb2 as scheduler_pb2
from seamflow.scheduler.v1 import scheduler_service_pb2_grpc as scheduler_grpc
from seamflow.stubs import async_stub

from services.chassis.log import get_logger
from services.chassis.rpc.clients import retry_forever

_TAG, _ROLLOUT = "train", "rollout"
_POLL_SECONDS = 20.0
"""Longest duration of one long poll."""
_MARGIN_SECONDS = 15.0
"""Time after the end of a long poll at which an unanswered call is retried."""
_FREE_SECONDS = 1.0
_FREE = (scheduler_pb2.NODE_STATE_ACTIVATING, scheduler_pb2.NODE_STATE_ACTIVE)
"""Reported once every other worker of a node has released its device."""
_PASSED = Timestamp(seconds=1)
"""Passed on every clock: this machine's may be ahead of the scheduler's, and nodes that are needed
now would be needed later."""


class NodeClient:
    """Client of the scheduler: requests and releases the gang's nodes.

    Without a scheduler the trainer always holds them.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel | None,
        run_id: str,
        gang_id: str,
        num_nodes: int,
        rank_nodes: Sequence[str] = (),
    ) -> None:
        """`rank_nodes`: the node of each rank, requested by name; without names any are."""
        self._stub: scheduler_grpc.SchedulerServiceAsyncStub | None = (
            None if channel is None else async_stub(scheduler_grpc.SchedulerServiceStub, channel)
        )
        self._run_id, self._gang_id, self._num_nodes = run_id, gang_id, num_nodes
        self._node_ids = sorted(set(filter(None, rank_nodes)))
        self._unit_nodes = self._max_nodes = 0
        self._requested = True
        self._batch = 0
        self._last_release = scheduler_pb2.ReleaseNodesRequest()
        self.return_seconds = 0.0
        """Time the slowest node needs to switch back to training; 0: not measured yet."""
        self.done_tokens = 0
        """Of the newest batch that was trained; 0: none yet."""
        self.advised_nodes = 0
        """Nodes that the scheduler would have train; 0: it has not said."""

    @property
    def has_scheduler(self) -> bool:
        return self._stub is not None

    def offer(self, unit_nodes: int, max_nodes: int) -> None:
        """Tell the scheduler the nodes of a data-parallel unit, and the most the gang can use."""
        self._unit_nodes, self._max_nodes = unit_nodes, max_nodes

    def need(self, rank_nodes: Sequence[str]) -> None:
        """Request the nodes of these ranks from now on."""
        self._node_ids = sorted(set(rank_nodes))
        self._num_nodes = len(self._node_ids)

    async def acquire(self, batch: int = 0) -> None:
        """Wait until the scheduler has granted all nodes for `batch`; 0: for the previous batch."""
        self._batch = batch or self._batch
        if self._stub is None:
            return
        while not await self._request(wait_seconds=_POLL_SECONDS):
            pass

    async def until_free(self) -> None:
        """Request the nodes, and wait until their other workers have released the devices.

        For a trainer that starts: its node agents cannot call it before it has loaded the models.
        """
        if self._stub is None:
            return
        await self._request()
        while (number := await self._num_free()) < self._num_nodes:
            get_logger().info("waiting_for_device", free_nodes=number, of=self._num_nodes)
            await asyncio.sleep(_FREE_SECONDS)
            await self._request()

    async def _num_free(self) -> int:
        """Nodes of the gang on which nothing but the trainer is active any more."""
        return sum(
            node.assignment.tag == _TAG
            and node.assignment.gang_id == self._gang_id
            and node.reported_epoch == node.assignment.epoch
            and node.state in _FREE
            for node in await self._list_nodes()
        )

    async def request_ahead(self) -> None:
        """Request the nodes before the batch is full; `acquire` follows.

        Does nothing unless other nodes generate: without them the batch would never become full.
        """
        if self._stub is not None and await self.others_generate():
            get_logger().info("nodes_requested_ahead", return_seconds=self.return_seconds)
            await self._request(is_ahead=True)

    async def release(
        self, batch: int = 0, forecast: scheduler_pb2.GenerationForecast | None = None
    ) -> int | None:
        """Release the nodes until they are requested for `batch`; 0: permanently.

        From `forecast` the scheduler decides whether to lend them, and when the tail of the batch
        begins: returns R_t, the rollouts that then remain; None: it does not know.
        """
        self._batch = batch
        self._last_release = scheduler_pb2.ReleaseNodesRequest(
            run_id=self._run_id, gang_id=self._gang_id, forecast=forecast, batch=batch
        )
        return await self.release_again()

    async def release_again(self) -> int | None:
        """Repeat the last `release` if the nodes were requested since."""
        if self._stub is None or not self._requested:
            return None
        stub, request = self._stub, self._last_release
        # Before the call: nodes requested during it have to be released again.
        self._requested = False
        response = await retry_forever("ReleaseNodes", lambda: stub.ReleaseNodes(request))
        self.advised_nodes = response.advised_nodes
        return response.tail.remaining_rollouts if response.HasField("tail") else None

    async def _request(self, *, wait_seconds: float = 0.0, is_ahead: bool = False) -> bool:
        """Request the nodes once; whether all are granted."""
        stub = self._stub
        assert stub is not None
        self._requested = True
        request = scheduler_pb2.RequestNodesRequest(
            run_id=self._run_id,
            gang_id=self._gang_id,
            tag=_TAG,
            num_nodes=self._num_nodes,
            node_ids=self._node_ids,
            wait=to_duration(wait_seconds),
            batch=self._batch,
            needed_time=_PASSED if is_ahead else None,
            unit_nodes=self._unit_nodes,
            max_nodes=self._max_nodes,
            done_tokens=self.done_tokens,
        )
        timeout = wait_seconds + _MARGIN_SECONDS
        response = await retry_forever(
            "RequestNodes", lambda: stub.RequestNodes(request, timeout=timeout)
        )
        self.advised_nodes = response.advised_nodes
        if response.nodes:
            self.return_seconds = max(
                seconds_of(node.switch_durations[_TAG]) for node in response.nodes
            )
        return response.granted

    async def others_generate(self) -> bool:
        """Whether groups still complete for this run while the gang holds its nodes.

        Others must roll out, and for each other tag, such as "score", there must be a node left.
        """
        if self._stub is None:
            return True  # the trainer shares no devices with rollout
        nodes = await self._list_nodes()
        # Nodes shared between runs may generate for another run.
        rolling_out = [
            node
            for node in nodes
            if node.assignment.tag == _ROLLOUT
            and (node.assignment.run_id or node.run_id) == self._run_id
        ]
        num_lent = sum(node.assignment.lent for node in rolling_out)
        tags = {tag for node in nodes for tag in node.capability_tags} - {_TAG, _ROLLOUT}
        return self._leaves(len(rolling_out), num_lent) and all(
            self._leaves(len(able), sum(_TAG in node.capability_tags for node in able))
            for tag in tags
            if (able := [node for node in nodes if tag in node.capability_tags])
        )

    def _leaves(self, number: int, num_takeable: int) -> bool:
        """Whether some of `number` nodes are left when the gang takes all it can of them."""
        return number - min(num_takeable, self._num_nodes) > 0

    async def _list_nodes(self) -> list[scheduler_pb2.Node]:
        stub = self._stub
        assert stub is not None
        request = scheduler_pb2.ListNodesRequest(run_id=self._run_id)

        async def nodes(page: scheduler_pb2.ListNodesRequest) -> scheduler_pb2.ListNodesResponse:
            return await retry_forever(
                "ListNodes", lambda: stub.ListNodes(page, timeout=_MARGIN_SECONDS)
            )

        return [node async for page in pages(nodes, request) for node in page.nodes]
