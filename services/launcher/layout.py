"""Where a run lives: its folder, its ports and the secret of its credentials."""

from __future__ import annotations

import errno
import secrets
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from services.chassis.errors import ConfigError
from services.launcher.config import LauncherConfig, ScorerPlan, environment_kind

__all__ = [
    "AGENT_PORTS",
    "Layout",
    "environment_addresses",
    "environment_server_names",
    "free_ports",
    "scorer_names",
    "server_name",
]

SERVICES = (
    "redis",
    "trajectory_manager",
    "weights",
    "scheduler",
    "rollout_gateway",
    "trainer",
    "evaluator",
)
AGENT_PORTS = ("rollout_gateway", "http_gateway")
"""Processes that agents connect to: a resumed run keeps their ports."""
_PORTS = range(20_000, 32_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Folder, ports and addresses of a run."""

    folder: Path
    """The run's own folder."""
    run_id: str
    """Its name in every service."""
    config_file: Path
    """The user's file."""
    ports: Mapping[str, int]
    """By service, and "rollout_server/<id>" for each rollout server."""
    redis_url: str = field(repr=False)
    """The store."""
    credential_secret: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)
    """Key from which the gateway derives the credentials of rollouts."""

    def address(self, name: str) -> str:
        """host:port of a process."""
        return f"127.0.0.1:{self.ports[name]}"

    def addresses(self) -> dict[str, str]:
        """Addresses of the services, for tools."""
        names = (name for name in self.ports if name != "redis" and "/" not in name)
        return {name: self.address(name) for name in names}

    def logs(self) -> Path:
        """Folder of the processes' logs, made if there is none."""
        folder = self.folder / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def path(self, text: str) -> str:
        """A configured path with "{run}" filled in."""
        return text.replace("{run}", str(self.folder))


def free_ports(config: LauncherConfig, kept: Mapping[str, int] | None = None) -> dict[str, int]:
    """A port for each process, chosen once so that a restarted process keeps its address.

    Free ones below the ephemeral range, so that no outgoing connection can take one first; those
    of `kept` again, as far as they are free.

    Raises:
        ConfigError: the configured http_port is taken.
    """
    kept = dict(kept or {})
    if config.http_port:
        kept["http_gateway"] = config.http_port
    with ExitStack() as stack:
        ports = {}
        for name in _names(config):
            port = kept.get(name)
            if port is None or not _is_free(port, stack):
                if name == "http_gateway" and config.http_port:
                    raise ConfigError(
                        f"http_port is {config.http_port}: that port is taken; give another"
                    )
                port = _free_port(stack)
            ports[name] = port
        return ports


def _names(config: LauncherConfig) -> list[str]:
    optional = {
        "http_gateway": config.has_http_gateway,
        "ranker": config.ranker,
        "rendezvous": len(config.training_nodes) > 1,
    }
    chosen = [name for name, is_chosen in optional.items() if is_chosen]
    servers = [server_name(each) for node in config.node_plans() for each in node.server_ids()]
    scorers = [name for plan in config.scorers for name in scorer_names(plan, config)]
    return [*SERVICES, *chosen, *servers, *scorers, *environment_server_names(config)]


def _free_port(stack: ExitStack) -> int:
    while True:
        port = secrets.choice(_PORTS)
        if _is_free(port, stack):
            return port


def _is_free(port: int, stack: ExitStack) -> bool:
    """Whether nobody listens on `port`; it then stays ours until `stack` closes."""
    listener = stack.enter_context(socket.socket())
    # Connections of the process that had it before may still linger.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
        listener.listen()
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return False
    return True


def environment_server_names(config: LauncherConfig) -> list[str]:
    """Names, among the ports, of the environment servers that the launcher starts."""
    if not config.runs_environment or environment_kind(config.environment or "") == "address":
        return []
    return [f"environment_server/{index}" for index in range(config.environment_servers)]


def environment_addresses(config: LauncherConfig, layout: Layout) -> list[str]:
    """Of the environment's servers, started or given; none: there is no environment."""
    started = [layout.address(name) for name in environment_server_names(config)]
    given = (config.environment or "").split(",")
    return started or [each.strip() for each in given if each.strip()]


def server_name(server_id: str) -> str:
    """Name of a rollout server, among the ports."""
    return f"rollout_server/{server_id}"


def scorer_names(plan: ScorerPlan, config: LauncherConfig) -> list[str]:
    """Names, among the ports, of the services of a scorer: on its nodes, or one beside them."""
    return [plan.service_on(node) for node in config.nodes_with(plan.tag)] or [plan.service]
