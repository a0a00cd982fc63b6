"""A scorer under a node agent: off it leases nothing and holds no model; epochs fence orders."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import numpy as np
import pytest
from seamflow.channel import connect
from seamflow.stubs import async_stub
from seamflow.trajectory.v1 import column_service_pb2 as column_pb
from seamflow.trajectory.v1 import column_service_pb2_grpc as column_grpc
from seamflow.trajectory.v1 import trajectory_pb2
from seamflow.worker.v1 import worker_service_pb2 as pb
from seamflow.worker.v1.worker_service_pb2_grpc import WorkerServiceStub

from services.chassis.config.settings import ServerConfig
from services.chassis.rpc.server import Service, started
from services.node_agent.worker_clients import WorkerActivity
from services.scoring.cli import build
from services.scoring.config import ScoringConfig
from services.scoring.scorer import Row


class Model:
    """A scorer; the living ones are counted."""

    alive: weakref.WeakSet[Model] = weakref.WeakSet()  # noqa: RUF012 -- of all

    def __init__(self, config: ScoringConfig) -> None:
        Model.alive.add(self)

    def score(self, rows: Sequence[Row]) -> Sequence[np.ndarray]:
        """Zeros."""
        return [np.zeros(1, np.float32) for _ in rows]


class Columns(column_grpc.ColumnServiceServicer):
    """Leases a sample when it may, and counts what it is asked."""

    def __init__(self) -> None:
        self.num_leases = 0
        self.has_sample = asyncio.Event()
        self.may_write = asyncio.Event()
        self.writing = asyncio.Event()
        self.num_written = 0
        self.asked: list[str] = []
        self.repeated: list[str] = []
        self.granted: list[trajectory_pb2.Sample] = []
        self.returned: list[str] = []

    async def LeaseColumn(self, request: Any, context: Any) -> Any:
        """Long poll; at its end the caller asks what it was granted meanwhile."""
        if not request.wait.seconds:
            self.repeated.append(request.request_id)
            return column_pb.LeaseColumnResponse(samples=self.granted, lease_token="l")
        self.num_leases += 1
        self.asked.append(request.request_id)
        await self.has_sample.wait()
        self.has_sample.clear()
        sample = trajectory_pb2.Sample(sample_id="s")
        return column_pb.LeaseColumnResponse(samples=[sample], lease_token="l")

    async def WriteColumn(self, request: Any, context: Any) -> Any:
        """When it may."""
        self.writing.set()
        await self.may_write.wait()
        self.num_written += len(request.values)
        self.returned += request.returned_sample_ids
        return column_pb.WriteColumnResponse()


@asynccontextmanager
async def scorer(columns: Columns, **settings: Any) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a scoring service on `columns`."""
    manager = Service([(column_grpc.add_ColumnServiceServicer_to_server, columns)])
    async with started(manager, ServerConfig(drain_seconds=0)) as port:
        config = ScoringConfig(
            run_id="run",
            column="zero",
            model="unused",
            scorer=f"{__name__}:Model",
            trajectory_manager=f"127.0.0.1:{port}",
            drain_seconds=0,
            **settings,
        )
        async with (
            build(config) as service,
            started(service, config) as own_port,
            connect(f"127.0.0.1:{own_port}") as channel,
        ):
            yield channel


async def until(condition: Any) -> None:
    """Poll."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def test_off_it_neither_leases_nor_holds_a_model() -> None:
    """It starts off under a node agent, works while activated, and is off again afterwards."""
    columns = Columns()
    async with scorer(columns, node_agent=True) as channel:
        worker = WorkerActivity(channel)
        assert (await worker.status()).is_off
        assert (columns.num_leases, len(Model.alive)) == (0, 0)
        await worker.activate(3)
        await until(lambda: columns.num_leases == 1)
        assert not (await worker.status()).is_off
        assert len(Model.alive) == 1
        await worker.deactivate(4)
        assert (await worker.status()).is_off
        assert len(Model.alive) == 0
        columns.has_sample.set()  # for nobody
        await asyncio.sleep(0.1)
        assert (columns.num_leases, columns.num_written) == (1, 0)


async def test_what_is_granted_while_it_is_deactivated_goes_back() -> None:
    """The poll is ended; what it was granted in that moment is given back, and not scored."""
    columns = Columns()
    columns.granted = [trajectory_pb2.Sample(sample_id="late")]
    columns.may_write.set()
    async with scorer(columns, node_agent=True) as channel:
        worker = WorkerActivity(channel)
        await worker.activate(1)
        await until(lambda: columns.num_leases == 1)
        await worker.deactivate(2)
        assert columns.repeated == columns.asked
        assert (columns.returned, columns.num_written) == (["late"], 0)


async def test_what_is_leased_is_written_before_it_is_off() -> None:
    """Deactivate waits for the write; no work is lost."""
    columns = Columns()
    async with scorer(columns, node_agent=True) as channel:
        worker = WorkerActivity(channel)
        await worker.activate(1)
        columns.has_sample.set()
        await asyncio.wait_for(columns.writing.wait(), 20)
        ending = asyncio.create_task(worker.deactivate(2))
        done, _ = await asyncio.wait([ending], timeout=0.2)
        assert not done
        columns.may_write.set()
        await ending
        assert columns.num_written == 1


async def test_without_a_node_agent_it_is_always_on() -> None:
    """The default needs no order."""
    columns = Columns()
    async with scorer(columns) as channel:
        await until(lambda: columns.num_leases == 1)
        assert not (await WorkerActivity(channel).status()).is_off


async def test_an_order_under_an_old_epoch_is_refused() -> None:
    """The newest order stays in effect, a repeated one is answered, and 0 is no epoch."""
    async with scorer(Columns(), node_agent=True) as channel:
        stub = async_stub(WorkerServiceStub, channel)
        await stub.Activate(pb.ActivateRequest(epoch=5))
        await stub.Activate(pb.ActivateRequest(epoch=5))
        with pytest.raises(grpc.aio.AioRpcError, match=r"epoch 4 of .* is stale") as stale:
            await stub.Deactivate(pb.DeactivateRequest(epoch=4))
        assert stale.value.code() is grpc.StatusCode.ABORTED
        status = await stub.GetStatus(pb.GetStatusRequest())
        assert (status.state, status.epoch) == (pb.WORKER_STATE_ON, 5)
        with pytest.raises(grpc.aio.AioRpcError, match=r"epoch is 0"):
            await stub.Activate(pb.ActivateRequest())


async def test_a_newer_order_ends_the_wait_of_an_older_one() -> None:
    """A Deactivate that waits for a write is told that it was overtaken."""
    columns = Columns()
    async with scorer(columns, node_agent=True) as channel:
        stub = async_stub(WorkerServiceStub, channel)
        await stub.Activate(pb.ActivateRequest(epoch=1))
        columns.has_sample.set()
        await asyncio.wait_for(columns.writing.wait(), 20)
        ending = asyncio.ensure_future(stub.Deactivate(pb.DeactivateRequest(epoch=2)))
        status = pb.GetStatusResponse()
        while status.epoch < 2:
            status = await stub.GetStatus(pb.GetStatusRequest())
        await stub.Activate(pb.ActivateRequest(epoch=3))
        with pytest.raises(grpc.aio.AioRpcError, match=r"epoch 2 of .* is stale"):
            await ending
        columns.may_write.set()
        await until(lambda: columns.num_leases == 2)
        assert (await stub.GetStatus(pb.GetStatusRequest())).state == pb.WORKER_STATE_ON
