"""Entry point: `python -m rollout.gateway`."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NoReturn

from seamflow.rollout.v1.rollout_service_pb2_grpc import add_RolloutServiceServicer_to_server
from seamflow.stubs import async_stub
from seamflow.trajectory.v1.run_service_pb2_grpc import RunServiceStub
from seamflow.trajectory.v1.task_service_pb2_grpc import TaskServiceStub
from seamflow.trajectory.v1.trajectory_service_pb2_grpc import TrajectoryServiceStub

from rollout.gateway import limits
from rollout.gateway.config import GatewayConfig
from rollout.gateway.dispatch.server_pool import ServerPool
from rollout.gateway.leases import Leases
from rollout.gateway.prompt.chat_template import ChatTemplate
from rollout.gateway.prompt.prompt_lanes import PromptLanes
from rollout.gateway.record.recorder import Recorder, TurnOpener
from rollout.gateway.servicer import GatewayServicer
from rollout.gateway.turn import TurnServices
from services.chassis.rpc import clients
from services.chassis.rpc.request_budget import RequestBudget
from services.chassis.rpc.server import Service, run


@asynccontextmanager
async def build(config: GatewayConfig) -> AsyncIterator[Service]:
    """Build the gateway's parts and connect them.

    A `Recorder` whose `record` returns early switches record-before-forward off: the negative
    control `tests/system/end_to_end/forward_first.py` replaces this module's `Recorder` by one.
    """
    template = ChatTemplate(config.model, config.response_format, config.render_limits)
    given = config.credential_secret
    secret = (given.get_secret_value() if given else secrets.token_hex(32)).encode()
    async with clients.channel(config, config.trajectory_manager) as channel:
        store = async_stub(TrajectoryServiceStub, channel)
        servers = ServerPool(config)
        opener, recorder = TurnOpener(store), Recorder(store)
        lanes = PromptLanes(limits.MAX_WAITING_PROMPTS)
        services = TurnServices(
            store=store,
            opener=opener,
            recorder=recorder,
            servers=servers,
            lanes=lanes,
            clock=asyncio.get_running_loop().time,
        )
        servicer = GatewayServicer(
            services,
            Leases(async_stub(TaskServiceStub, channel), opener, secret),
            async_stub(RunServiceStub, channel),
            template,
            config,
            RequestBudget(limits.MAX_INFLIGHT_BYTES, limits.MAX_CALLS_PER_ROLLOUT),
        )
        yield Service(
            servicers=[(add_RolloutServiceServicer_to_server, servicer)],
            background=[
                opener.keep_sending,
                recorder.keep_sending,
                servers.watch_servers,
                servers.watch_versions,
                servers.keep_planning,
            ],
            max_request_bytes=config.max_request_bytes,
        )
        lanes.close()
        await servers.close()


def main() -> NoReturn:
    run("rollout_gateway", GatewayConfig, build)
