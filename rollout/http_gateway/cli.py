"""Entry point: `python -m rollout.http_gateway`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NoReturn

from seamflow.client import Client
from seamflow.rollout.v1.rollout_service_pb2_grpc import RolloutServiceStub
from seamflow.stubs import async_stub

from rollout.http_gateway import limits
from rollout.http_gateway.app import application
from rollout.http_gateway.config import HttpGatewayConfig
from rollout.http_gateway.lease_holds import LeaseHolds
from rollout.http_gateway.model_routes import ModelRoutes
from rollout.http_gateway.rollout_routes import RolloutRoutes
from rollout.http_gateway.turn_routes import TurnRoutes
from services.chassis.rpc import clients
from services.chassis.rpc.server import Service, run
from services.lib.http.http_server import serving


@asynccontextmanager
async def build(config: HttpGatewayConfig) -> AsyncIterator[Service]:
    """Connect to the rollout gateway and serve HTTP."""
    async with (
        Client(
            config.rollout_gateway,
            run_id=config.run_id,
            credentials=clients.credentials(config),
            connect_timeout=None,
        ) as client,
        clients.channel(config, config.rollout_gateway) as channel,
    ):
        stub = async_stub(RolloutServiceStub, channel)
        holds = LeaseHolds(stub, config.run_id, limits.IDLE_LEASE_SECONDS)
        app = application(
            config,
            TurnRoutes(config, client, holds),
            ModelRoutes(config, client),
            RolloutRoutes(config, stub, holds),
        )
        async with serving(app, config) as http:
            yield Service(
                background=[holds.keep_extending, http.keep_certificate],
                drain=http.drain,
                ports={"http_port": http.port},
            )


def main() -> NoReturn:
    run("http_gateway", HttpGatewayConfig, build)
