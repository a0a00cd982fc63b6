"""What the pool of rollout servers says of itself to Prometheus."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY
from seamflow.rollout.v1 import rollout_server_service_pb2 as pb

from rollout.gateway.config import GatewayConfig
from rollout.gateway.dispatch.server_pool import ServerPool
from rollout.gateway.dispatch.server_state import Server


class Channel:
    """Of no server."""

    async def close(self) -> None:
        """Nothing to do."""


def _number() -> float | None:
    return REGISTRY.get_sample_value("seamflow_rollout_gateway_servers")


async def test_servers_that_are_no_longer_listed_do_not_count(tmp_path: Path) -> None:
    """Nobody polls when none is left; the alert NoRolloutServers asks for 0."""
    pool = ServerPool(GatewayConfig(run_id="run", model=tmp_path))
    channel: Any = Channel()
    server = Server("s", channel, channel)
    server.info = pb.GetServerInfoResponse(state=pb.SERVER_STATE_SERVING)
    pool._servers["s"] = server
    await pool._set_known(["s"])
    assert _number() == 1
    await pool._set_known([])
    assert _number() == 0
