"""The rollout servers of a run: discovery, polled state, and which of them may get turns.

A server gets turns only while the weight version that it reports is allowed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

import grpc.aio
from seamflow.pages import pages
from seamflow.retry import Backoff
from seamflow.rollout.v1 import rollout_server_service_pb2 as pb
from seamflow.rollout.v1 import rollout_service_pb2 as rollout_pb
from seamflow.rollout.v1.rollout_server_service_pb2_grpc import RolloutServerServiceStub
from seamflow.scheduler.v1 import scheduler_service_pb2
from seamflow.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from seamflow.stubs import async_stub
from seamflow.waits import in_background
from seamflow.weights.v1 import weight_service_pb2
from seamflow.weights.v1.weight_service_pb2_grpc import WeightServiceStub

from rollout.gateway import limits
from rollout.gateway.config import GatewayConfig
from rollout.gateway.dispatch.length_estimators import load_lengths
from rollout.gateway.dispatch.outlier_ejection import OutlierEjection
from rollout.gateway.dispatch.policies import load_dispatch
from rollout.gateway.dispatch.server_state import Server
from rollout.gateway.dispatch.waiting_turns import WaitingTurns
from services.chassis import metrics
from services.chassis.log import get_logger
from services.chassis.rpc import clients

if TYPE_CHECKING:
    from seamflow.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceAsyncStub
    from seamflow.weights.v1.weight_service_pb2_grpc import WeightServiceAsyncStub

_REQUIRED_WEIGHTS_TIMEOUT_SECONDS = 600.0
"""How long a turn waits for its required weight version before it falls back to an older one:
a trainer may have died before publishing it."""

_log = get_logger()
_POLL_TIMEOUT = 2.0
_SERVERS = metrics.gauge("rollout_gateway", "servers", "Rollout servers that may get turns.")


class ServerPool:
    """All rollout servers of the run, kept current by the `watch_` methods in the background."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._servers: dict[str, Server] = {}
        self._min_version = 0
        self.waiting = WaitingTurns(
            load_dispatch(config.dispatch),
            self._with_room,
            config.max_waiting_turns,
            weights_timeout=_REQUIRED_WEIGHTS_TIMEOUT_SECONDS,
            serving=self._serving,
            latency=config.server_latency(),
        )
        self.outliers = OutlierEjection(lambda: list(self._servers.values()))
        """Takes servers whose turns fail out of the choice."""
        self.keep_planning = self.waiting.keep_planning
        self.lengths = load_lengths(config)

    def suspect(self, server: Server) -> bool:
        """Send it no turns until it reports again, as one failed; False if that is so already."""
        had_report = server.info is not None
        server.info = None
        return had_report

    def agree_too_long(self, server: Server, num_tokens: int) -> bool:
        """Whether a prompt is longer than what another server takes, or the only one."""
        others = [s for s in self._in_use() if s is not server and s.info is not None]
        reports = [s.info for s in others or (server,) if s.info is not None]
        return any(0 < info.max_context <= num_tokens for info in reports)

    @property
    def shortest_context(self) -> int:
        """Longest prompt plus answer that every known server takes; 0 while none is known."""
        return min((i.max_context for i in self._reports() if i.max_context), default=0)

    @property
    def longest_context(self) -> int:
        """Longest context of any server in use, which no false report shortens; 0 for none."""
        return max((info.max_context for info in self._reports()), default=0)

    @property
    def newest_weight_version(self) -> int:
        """Newest version that a known server has loaded; 0 for none."""
        return max((info.weight_version for info in self._reports()), default=0)

    def uses(self) -> list[rollout_pb.ServerUse]:
        return [self.outliers.use(server) for _, server in sorted(self._servers.items())]

    async def watch_servers(self) -> None:
        """Poll the scheduler's list of servers; runs until cancelled."""
        if self._config.scheduler is None:
            await self._set_known(self._config.servers)
            await asyncio.Event().wait()
            return
        async with clients.channel(self._config, self._config.scheduler) as channel:
            stub = async_stub(SchedulerServiceStub, channel)
            while True:
                with suppress(grpc.aio.AioRpcError):
                    await self._set_known({*self._config.servers, *await self._listed(stub)})
                await asyncio.sleep(2 * limits.POLL_SECONDS)

    async def watch_versions(self) -> None:
        """Watch the committed weight versions; runs until cancelled."""
        if self._config.weights is None:
            return
        async with clients.channel(self._config, self._config.weights) as channel:
            stub = async_stub(WeightServiceStub, channel)
            await self._follow_versions(stub)

    async def close(self) -> None:
        await self._set_known(())
        await self.lengths.close()

    async def _listed(self, stub: SchedulerServiceAsyncStub) -> set[str]:
        request = scheduler_service_pb2.ListNodesRequest(run_id=self._config.run_id)
        listed = pages(lambda page: stub.ListNodes(page, timeout=_POLL_TIMEOUT), request)
        return {
            worker.address
            async for page in listed
            for node in page.nodes
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
                _log.warning("weights_service_unavailable", code=error.code().name)
            await backoff.wait()

    async def _set_known(self, addresses: Iterable[str]) -> None:
        listed = set(addresses)
        for address in listed - self._servers.keys():
            self._servers[address] = self._connect(address)
        for address in self._servers.keys() - listed:
            await _disconnect(self._servers.pop(address))
        self._count()

    def _connect(self, address: str) -> Server:
        channel = clients.channel(self._config, address)
        stub = async_stub(RolloutServerServiceStub, channel)
        server = Server(address, channel, stub)
        server.polling = in_background(self._poll(server), f"polling {address}")
        return server

    async def _poll(self, server: Server) -> None:
        while True:
            before = server.num_turns
            try:
                info = await server.stub.GetServerInfo(
                    pb.GetServerInfoRequest(), timeout=_POLL_TIMEOUT
                )
                server.report(info, before)
            except grpc.aio.AioRpcError:
                server.info = None
            self.waiting.assign()
            self._count()
            await asyncio.sleep(limits.POLL_SECONDS)

    def _count(self) -> None:
        _SERVERS.set(len(self._serving()))
        self.outliers.count()

    def _reports(self) -> list[pb.GetServerInfoResponse]:
        return [server.info for server in self._in_use() if server.info is not None]

    def _in_use(self) -> list[Server]:
        """The servers that are not ejected; all, if all are."""
        known = list(self._servers.values())
        state = self.outliers.state
        return [s for s in known if state(s) != rollout_pb.EJECTION_EJECTED] or known

    def _serving(self) -> list[Server]:
        return self._allowed(None, 0, frozenset())

    def _with_room(
        self, pinned_version: int | None, required_version: int, avoided: frozenset[str]
    ) -> list[Server]:
        allowed = self._allowed(pinned_version, required_version, avoided)
        return [server for server in allowed if self._has_room(server)]

    def _allowed(
        self, pinned_version: int | None, required_version: int, avoided: frozenset[str]
    ) -> list[Server]:
        """The servers that a turn may go to: rather than none, ejected or avoided ones."""
        serving = [
            server
            for server in self._servers.values()
            if self._may_serve(server, pinned_version, required_version)
        ]
        state = self.outliers.state
        in_use = [s for s in serving if state(s) != rollout_pb.EJECTION_EJECTED] or serving
        return [s for s in in_use if s.address not in avoided] or in_use

    def _has_room(self, server: Server) -> bool:
        if self.outliers.state(server) == rollout_pb.EJECTION_PROBED:
            return server.num_turns == 0
        return server.has_room(limits.OVERCOMMIT)

    def _may_serve(self, server: Server, pinned_version: int | None, required_version: int) -> bool:
        if server.info is None or server.info.state != pb.SERVER_STATE_SERVING:
            return False
        if pinned_version is not None:
            return server.info.weight_version == pinned_version
        return server.info.weight_version >= max(self._min_version, required_version)


async def _disconnect(server: Server) -> None:
    if server.polling is not None:
        server.polling.cancel()
    await server.channel.close()
