"""The rollout servers of a run: who they are, what they report, who may get traffic.

No traffic before current weights: a server takes turns only while the version that it reports
itself is allowed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc.aio
from seamflow.retry import Backoff
from seamflow.rollout.v1 import rollout_server_service_pb2 as pb
from seamflow.rollout.v1.rollout_server_service_pb2_grpc import RolloutServerServiceStub
from seamflow.scheduler.v1 import scheduler_service_pb2
from seamflow.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from seamflow.weights.v1 import weight_service_pb2
from seamflow.weights.v1.weight_service_pb2_grpc import WeightServiceStub

from rollout.gateway.config import GatewayConfig
from rollout.gateway.dispatch import Ask, Candidate, load_dispatch
from services.chassis import clients, metrics
from services.chassis.log import get_logger

if TYPE_CHECKING:
    from seamflow.rollout.v1.rollout_server_service_pb2_grpc import RolloutServerServiceAsyncStub
    from seamflow.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceAsyncStub
    from seamflow.weights.v1.weight_service_pb2_grpc import WeightServiceAsyncStub

__all__ = ["Server", "Servers"]

_log = get_logger()
_POLL_TIMEOUT = 2.0
_SERVERS = metrics.gauge("rollout_gateway", "servers", "Rollout servers that may get turns.")


@dataclass(slots=True)
class Server:
    """One rollout server as this gateway sees it."""

    address: str
    """host:port."""
    channel: grpc.aio.Channel
    """Open as long as the server is known."""
    stub: RolloutServerServiceAsyncStub
    """Its calls."""
    info: pb.GetServerInfoResponse | None = None
    """Its last report; None: it does not answer, or gave a turn up since."""
    num_turns: int = 0
    """Turns this gateway has there."""
    polling: asyncio.Task[None] | None = field(default=None)
    """Keeps `info` fresh."""

    def candidate(self) -> Candidate:
        """What the dispatch policy sees; only for servers with a report."""
        assert self.info is not None
        return Candidate(
            server_id=self.info.server_id,
            num_turns=max(self.num_turns, self.info.num_running + self.info.num_queued),
            max_running=self.info.max_running,
            tokens_per_second=self.info.tokens_per_second,
        )


class Servers:
    """All servers of the run, kept current in the background."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._choose = load_dispatch(config.dispatch)
        self._servers: dict[str, Server] = {}
        self._changed = asyncio.Condition()
        self._min_version = 0

    @asynccontextmanager
    async def turn(self, ask: Ask, pinned_version: int | None) -> AsyncIterator[Server]:
        """Wait for a server that may serve the version, and count a turn there."""
        server = await self._wait_for_one(ask, pinned_version)
        server.num_turns += 1
        try:
            yield server
        finally:
            server.num_turns -= 1

    def suspect(self, server: Server) -> None:
        """A turn was given up there: no further turns until the server reports again."""
        server.info = None

    async def keep_known(self) -> None:
        """Follow the scheduler's list of servers; runs until cancelled."""
        if self._config.scheduler is None:
            await self._set_known(self._config.servers)
            await asyncio.Event().wait()
            return
        async with clients.channel(self._config, self._config.scheduler) as channel:
            stub: SchedulerServiceAsyncStub = SchedulerServiceStub(channel)  # type: ignore[assignment]
            while True:
                with suppress(grpc.aio.AioRpcError):
                    await self._set_known({*self._config.servers, *await self._listed(stub)})
                await asyncio.sleep(2 * self._config.poll_seconds)

    async def keep_versions(self) -> None:
        """Follow the committed versions; runs until cancelled."""
        if self._config.weights is None:
            return
        async with clients.channel(self._config, self._config.weights) as channel:
            stub: WeightServiceAsyncStub = WeightServiceStub(channel)  # type: ignore[assignment]
            await self._follow_versions(stub)

    async def close(self) -> None:
        """Forget all servers."""
        await self._set_known(())

    async def _listed(self, stub: SchedulerServiceAsyncStub) -> set[str]:
        request = scheduler_service_pb2.ListNodesRequest(run_id=self._config.run_id)
        response = await stub.ListNodes(request, timeout=_POLL_TIMEOUT)
        return {
            worker.address
            for node in response.nodes
            for worker in node.workers
            if worker.tag == "rollout"
        }

    async def _follow_versions(self, stub: WeightServiceAsyncStub) -> None:
        backoff, newest = Backoff(), 0
        while True:
            request = weight_service_pb2.WatchVersionsRequest(
                run_id=self._config.run_id, after_weight_version=newest
            )
            try:
                async for response in stub.WatchVersions(request):
                    newest = response.manifest.weight_version
                    self._min_version = newest - self._config.max_version_lag
                    backoff.reset()
            except grpc.aio.AioRpcError as error:
                _log.warning("weights service does not answer", code=error.code().name)
            await backoff.wait()

    async def _set_known(self, addresses: Iterable[str]) -> None:
        wanted = set(addresses)
        for address in wanted - self._servers.keys():
            self._servers[address] = self._connect(address)
        for address in self._servers.keys() - wanted:
            await _disconnect(self._servers.pop(address))

    def _connect(self, address: str) -> Server:
        channel = clients.channel(self._config, address)
        stub: RolloutServerServiceAsyncStub = RolloutServerServiceStub(channel)  # type: ignore[assignment]
        server = Server(address, channel, stub)
        server.polling = asyncio.create_task(self._poll(server))
        return server

    async def _poll(self, server: Server) -> None:
        while True:
            try:
                server.info = await server.stub.GetServerInfo(
                    pb.GetServerInfoRequest(), timeout=_POLL_TIMEOUT
                )
            except grpc.aio.AioRpcError:
                server.info = None
            async with self._changed:
                self._changed.notify_all()
            _SERVERS.set(sum(self._may_serve(s, None) for s in self._servers.values()))
            await asyncio.sleep(self._config.poll_seconds)

    async def _wait_for_one(self, ask: Ask, pinned_version: int | None) -> Server:
        async with self._changed:
            while not (ready := self._ready(pinned_version)):
                await self._changed.wait()
        candidates = {server.candidate().server_id: server for server in ready}
        chosen = self._choose(ask, [server.candidate() for server in ready])
        return candidates[chosen.server_id]

    def _ready(self, pinned_version: int | None) -> list[Server]:
        return [s for s in self._servers.values() if self._may_serve(s, pinned_version)]

    def _may_serve(self, server: Server, pinned_version: int | None) -> bool:
        if server.info is None or server.info.state != pb.SERVER_STATE_SERVING:
            return False
        if pinned_version is not None:
            return server.info.weight_version == pinned_version
        return server.info.weight_version >= self._min_version


async def _disconnect(server: Server) -> None:
    if server.polling is not None:
        server.polling.cancel()
    await server.channel.close()
