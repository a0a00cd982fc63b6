"""Entry point: `python -m rollout.gateway`."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NoReturn

from seamflow.rollout.v1.rollout_service_pb2_grpc import add_RolloutServiceServicer_to_server
from seamflow.trajectory.v1.trajectory_service_pb2_grpc import TrajectoryServiceStub

from rollout.gateway.config import GatewayConfig
from rollout.gateway.dispatch.server_pool import Servers
from rollout.gateway.prompt.chat_template import ChatTemplate
from rollout.gateway.record.recorder import Recorder
from rollout.gateway.record.turn_opener import Opener
from rollout.gateway.servicer import GatewayServicer
from services.chassis.rpc import clients
from services.chassis.rpc.server import Service, run

if TYPE_CHECKING:
    from seamflow.trajectory.v1.trajectory_service_pb2_grpc import TrajectoryServiceAsyncStub

__all__ = ["build", "main"]


@asynccontextmanager
async def build(config: GatewayConfig) -> AsyncIterator[Service]:
    """Wire the gateway: the store in front, the servers behind, the template between."""
    template = ChatTemplate(config.model)
    servers = Servers(config)
    given = config.credential_secret
    secret = (given.get_secret_value() if given else secrets.token_hex(32)).encode()
    async with clients.channel(config, config.trajectory_manager) as channel:
        store: TrajectoryServiceAsyncStub = TrajectoryServiceStub(channel)  # type: ignore[assignment]
        opener, recorder = Opener(store), Recorder(store)
        servicer = GatewayServicer(
            store, opener, recorder, servers, template, secret, config.default_heartbeat_seconds
        )
        yield Service(
            servicers=[(add_RolloutServiceServicer_to_server, servicer)],
            background=[
                opener.keep_sending,
                recorder.keep_sending,
                servers.keep_known,
                servers.keep_versions,
                servers.keep_planned,
            ],
        )
        await servers.close()


def main() -> NoReturn:
    """Run the gateway until it is told to stop."""
    run("rollout_gateway", GatewayConfig, build)
