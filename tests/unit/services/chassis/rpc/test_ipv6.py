"""Addresses of IPv6 work wherever "host:port" is read, and without brackets are refused by name."""

from __future__ import annotations

import socket
from collections.abc import Mapping

import grpc
import pytest
from seamflow.channel import connect
from seamflow.inspect.endpoints import Endpoints, UsageError
from seamflow.network.host_port import check_target, host_and_port
from seamflow.runner.agent_runner import RunnerConfig

from services.chassis.config.settings import ServerConfig
from services.chassis.errors import ConfigError
from services.chassis.rpc.clients import channel
from services.launcher.checks.prerequisites import check_hosts


@pytest.mark.parametrize(
    ("address", "expected"),
    [("127.0.0.1:1", ("127.0.0.1", 1)), ("[::1]:2", ("::1", 2)), ("a.b:3", ("a.b", 3))],
)
def test_host_and_port_are_told_apart(address: str, expected: tuple[str, int]) -> None:
    """Of names and both kinds of addresses."""
    assert host_and_port(address) == expected
    check_target(address)
    check_target(f"ipv4:{address},{address}")


@pytest.mark.parametrize(
    "address", ["::1:50052", "::1", "[::1]", "[::1:50052", "fe80::1:5,[::1]:5"]
)
async def test_an_address_without_brackets_or_port_is_refused(address: str) -> None:
    """By the SDK, a service, a command and the agent runner; gRPC would wait for port 443."""
    with pytest.raises(ValueError, match=r'with brackets for IPv6: "\[::1\]:50052"'):
        connect(address)
    with pytest.raises(ConfigError, match="with brackets"):
        channel(ServerConfig(), address)
    with pytest.raises(UsageError, match="with brackets"):
        Endpoints(run_id=None, services={}).channel(address)
    with pytest.raises(ValueError, match="with brackets"):
        RunnerConfig(run_id="run", gateway=address)
    # Negative control: gRPC itself takes it.
    grpc.insecure_channel(address).close()


@pytest.mark.parametrize(
    ("names", "host", "is_refused"),
    [
        ({}, "::1", True),
        ({}, "::", True),
        ({}, "0.0.0.0", False),
        ({"localhost": "127.0.0.1"}, "localhost", False),
        ({}, "localhost", True),  # it stands for ::1 alone
    ],
)
def test_processes_of_a_run_listen_where_the_others_look(
    monkeypatch: pytest.MonkeyPatch, names: Mapping[str, str], host: str, is_refused: bool
) -> None:
    """A run would wait for its own process for ever."""

    def found(name: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        if name not in names:
            raise socket.gaierror("no such name")
        return [(socket.AF_INET, 1, 6, "", (names[name], 0))]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    settings = {"scheduler": ServerConfig(host=host)}
    if not is_refused:
        check_hosts(settings, {"scheduler": "127.0.0.1"})
        return
    with pytest.raises(ConfigError, match=r"host of scheduler is .* at 127\.0\.0\.1"):
        check_hosts(settings, {"scheduler": "127.0.0.1"})
