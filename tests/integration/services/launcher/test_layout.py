"""Ports: agents find a resumed run where it was."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from services.chassis.errors import ConfigError
from services.launcher.layout import free_ports
from tests.lib.launcher.support import make_config


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_a_resumed_run_keeps_the_ports_of_its_agents() -> None:
    """Agents from outside know both gateways by their address."""
    config = make_config(agent=None)
    first = free_ports(config)
    known = {name: first[name] for name in ("rollout_gateway", "http_gateway")}
    again = free_ports(config, known)
    assert {name: again[name] for name in known} == known


def test_a_kept_port_that_is_taken_is_replaced(taken: int) -> None:
    """The run starts all the same."""
    config = make_config(agent=None)
    assert free_ports(config, {"http_gateway": taken})["http_gateway"] != taken


def test_a_configured_http_port_is_used_or_refused(taken: int) -> None:
    """Nobody looks for agents at a port that was not asked for."""
    free = free_ports(make_config(agent=None))["http_gateway"]
    assert free_ports(make_config(agent=None, http_port=free))["http_gateway"] == free
    with pytest.raises(ConfigError, match=f"http_port is {taken}"):
        free_ports(make_config(agent=None, http_port=taken))


def test_an_agent_of_the_runner_needs_no_http_gateway() -> None:
    """It calls over gRPC; `serve` opens the door for others."""
    assert "http_gateway" not in free_ports(make_config())
    assert "http_gateway" in free_ports(make_config(serve=True))
