"""Addresses of IPv6 work wherever "host:port" is read, and without brackets are refused by name."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from seamflow.channel import connect
from seamflow.network.host_port import listens

from services.chassis.rpc.healthcheck import ready
from tests.lib.chassis.support import demo_process


def _has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not _has_ipv6(), reason="this machine has no ::1")
async def test_a_service_on_ipv6_is_reached(tmp_path: Path) -> None:
    """Its calls, its health check, and whether commands take it for running."""
    with demo_process(tmp_path, "--host=::1") as demo:
        address = f"[::1]:{demo.port}"
        async with connect(address) as connected:
            stub = health_pb2_grpc.HealthStub(connected)
            answer = await stub.Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        assert ready(f"[::1]:{demo.admin_port}")
        assert listens(address)
        host, port = address.rpartition(":")[::2]
        with pytest.raises(socket.gaierror):  # negative control: with brackets it is no host
            socket.create_connection((host, int(port)), timeout=1)
