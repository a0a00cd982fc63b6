"""Where a run lives: folder, ports, secrets, and what an agent in a process of its own needs."""

from __future__ import annotations

import errno
import secrets
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from services.chassis.errors import ConfigError
from services.launcher.config import LauncherConfig, ScorerPlan, environment_kind

SERVICES = (
    "redis",
    "trajectory_manager",
    "weights",
    "scheduler",
    "rollout_gateway",
    "trainer",
    "evaluator",
)
AGENT_PORTS = ("rollout_gateway", "http_gateway", "join", "console")
"""What agents, other hosts and browsers connect to: a resumed run keeps their ports."""
_PORT_SETTINGS = {
    "http_gateway": "http_port",
    "join": "join_port",
    "console": "console_port",
}
_ENVIRONMENT_SERVER = "environment_server/"
_PROCESS = "process/"
_OF_THIS_MACHINE = (_ENVIRONMENT_SERVER, "console")
"""Listens on loopback in every run."""
LOOPBACK = "127.0.0.1"
_PORTS = range(20_000, 32_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Folder, ports and addresses of a run."""

    folder: Path
    run_id: str
    config_file: Path
    ports: Mapping[str, int]
    """By service, and "rollout_server/<id>" for each rollout server."""
    hosts: tuple[str, ...] = (LOOPBACK,)
    places: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Hosts of the processes that are not on host 0, by name as in `ports`; of several it is one,
    and may become another."""
    redis_url: str = field(repr=False)
    credential_secret: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)
    """Key from which the gateway derives the credentials of rollouts."""
    console_token: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)

    def address(self, name: str) -> str:
        """host:port of a process; of one that may be on several hosts all, as gRPC reads it."""
        port, hosts = self.ports[name], [self.hosts[i] for i in self.places.get(name, (0,))]
        if name.startswith(_OF_THIS_MACHINE):
            hosts = [LOOPBACK]
        scheme = "ipv4:" if len(hosts) > 1 else ""
        return scheme + ",".join(f"{host}:{port}" for host in hosts)

    def addresses(self) -> dict[str, str]:
        names = (name for name in self.ports if name != "redis" and "/" not in name)
        return {name: self.address(name) for name in names}

    def own_port(self, process: str) -> int:
        """Of a process that nobody calls but to ask what it waits for."""
        return self.ports[f"{_PROCESS}{process}"]

    def logs(self) -> Path:
        """Folder of the processes' logs, made if there is none."""
        folder = self.folder / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    @property
    def prepared_marker(self) -> Path:
        """There once model and tasks have been prepared."""
        return self.folder / "prepared" / ".complete"

    def path(self, text: str) -> str:
        """A configured path with "{run}" filled in."""
        return text.replace("{run}", str(self.folder))


def console_link(layout: Layout) -> str:
    """The link that lets a browser of this machine into the console of the run."""
    return f"http://{layout.address('console')}/?token={layout.console_token}"


def free_ports(config: LauncherConfig, kept: Mapping[str, int] | None = None) -> dict[str, int]:
    """A port for each process, chosen once so that a restarted process keeps its address.

    Free ones below the ephemeral range, so that no outgoing connection can take one first; those
    of `kept` again, as far as they are free.

    Raises:
        ConfigError: the configured http_port, join_port or console_port is taken, or the first of
            `hosts` is not this machine.
    """
    kept = dict(kept or {})
    given = {
        "http_gateway": config.http_port,
        "join": config.join_port,
        "console": config.console_port,
    }
    kept |= {name: port for name, port in given.items() if port}
    # A dry run may be made on any machine.
    host = LOOPBACK if config.dry_run or not config.hosts else config.hosts[0]
    with ExitStack() as stack:
        ports = {}
        for name in _names(config):
            port = kept.get(name)
            if port is None or not is_free(host, port, stack):
                if given.get(name):
                    setting = _PORT_SETTINGS[name]
                    raise ConfigError(f"{setting} is {port}: that port is taken; give another")
                port = _free_port(host, stack)
            ports[name] = port
        return ports


def _names(config: LauncherConfig) -> list[str]:
    optional = {
        "http_gateway": config.has_http_gateway,
        "ranker": config.ranker,
        "rendezvous": len(config.training_nodes) > 1,
        "join": config.has_other_hosts,
        "console": config.console,
    }
    chosen = [name for name, is_chosen in optional.items() if is_chosen]
    servers = [server_name(each) for node in config.node_plans() for each in node.server_ids()]
    scorers = [name for plan in config.scorers for name in scorer_names(plan, config)]
    own = [_PROCESS + name for name in _asked_processes(config)]
    return [*SERVICES, *chosen, *servers, *scorers, *environment_server_names(config), *own]


def _asked_processes(config: LauncherConfig) -> Iterator[str]:
    yield from ("console", "dataloader")
    yield from (f"node_agent-{node.node_id}" for node in config.node_plans())
    yield from (f"http_gateway-{index}" for index in range(config.http_gateways))
    servers = environment_server_names(config) or (config.environment or "").split(",")
    yield from (f"environments-{index}" for index in range(len(servers)))


def host_addresses(config: LauncherConfig) -> tuple[str, ...]:
    """The hosts as addresses of IPv4, which certificates and gRPC need.

    Raises:
        ConfigError: a name has none, or stands for loopback where others have addresses.
    """
    found = tuple(_resolved(host) for host in config.hosts) or (LOOPBACK,)
    others = [each for each in found if not each.startswith("127.")]
    if others and others != [*found] and _is_own_name(config.hosts[0]):
        found = (_address_towards(others[0]), *found[1:])
    local = [each.startswith("127.") for each in found]
    if any(local) and not all(local):
        name = config.hosts[local.index(True)]
        raise ConfigError(
            f"hosts: {name!r} stands for {found[local.index(True)]}, which other machines do not "
            "reach: give the address of its network"
        )
    return found


def _is_own_name(name: str) -> bool:
    """Which /etc/hosts of many machines resolves to 127.0.1.1 on the machine itself."""
    return name.partition(".")[0] == socket.gethostname().partition(".")[0]


def _address_towards(other: str) -> str:
    """This machine's, by its route to another one; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((other, 9))
        return str(probe.getsockname()[0])


def _resolved(host: str) -> str:
    try:
        return str(socket.getaddrinfo(host, None, family=socket.AF_INET)[0][4][0])
    except OSError as error:
        raise ConfigError(
            f"hosts: {host!r} has no address of IPv4: give an address, or a name that stands for "
            "one"
        ) from error


def places(config: LauncherConfig) -> dict[str, tuple[int, ...]]:
    """The hosts of what nodes run, by name among the ports."""
    nodes = {node.node_id: node for node in config.node_plans()}
    found = {server_name(s): (node.host,) for node in nodes.values() for s in node.server_ids()}
    for plan in config.scorers:
        found |= {plan.service_on(n): (nodes[n].host,) for n in config.nodes_with(plan.tag)}
    hosts = dict.fromkeys(nodes[name].host for name in config.training_nodes)
    return {**found, **({"trainer": tuple(hosts)} if hosts else {})}


def _free_port(host: str, stack: ExitStack) -> int:
    while True:
        port = secrets.choice(_PORTS)
        if is_free(host, port, stack):
            return port


def is_free(host: str, port: int, stack: ExitStack) -> bool:
    """Whether nobody listens on `port`; it then stays ours until `stack` closes."""
    listener = stack.enter_context(socket.socket())
    # Connections of the process that had it before may still linger.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(
                f"hosts: the first is {host!r}, which is no address of this machine: list this "
                "one first, or start the run there"
            ) from error
        if error.errno != errno.EADDRINUSE:
            raise
        return False
    return True


def environment_server_names(config: LauncherConfig) -> list[str]:
    """Names, among the ports, of the environment servers that the launcher starts."""
    if not config.runs_environment or environment_kind(config.environment or "") == "address":
        return []
    return [f"{_ENVIRONMENT_SERVER}{index}" for index in range(config.environment_servers)]


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


def agent_variables(config: LauncherConfig, layout: Layout) -> Mapping[str, str]:
    """Environment variables of an agent's program.

    SEAMFLOW_HTTP_GATEWAY is the base URL of the HTTP gateway, SEAMFLOW_GATEWAY host:port of the
    rollout gateway, SEAMFLOW_RUN_ID the run, and SEAMFLOW_AGENT_TOKEN the bearer token of agents
    where there is one. SEAMFLOW_RUN is for the command `seamflow`.
    """
    token = config.agent_token or config.token
    return {
        "SEAMFLOW_HTTP_GATEWAY": base_url(config, layout),
        "SEAMFLOW_GATEWAY": layout.address("rollout_gateway"),
        "SEAMFLOW_RUN_ID": layout.run_id,
        "SEAMFLOW_RUN": layout.run_id,
        **({} if token is None else {"SEAMFLOW_AGENT_TOKEN": token.get_secret_value()}),
    }


def instructions(config: LauncherConfig, layout: Layout) -> str:
    """How an agent connects: the addresses, and how it gets a rollout and its credential."""
    url, gateway = base_url(config, layout), layout.address("rollout_gateway")
    is_open = config.agent_token is None and config.token is None
    header = "" if is_open else '-H "authorization: Bearer $SEAMFLOW_AGENT_TOKEN" '
    credentials = "" if is_open else ", credentials=Credentials(token=…)"
    return f"""\
agents connect to run {layout.run_id!r} at {url} (gRPC: {gateway})
  lease a rollout: the answer has its task, base_url and credential
    curl {header}--json '{{"wait_seconds": 20}}' {url}/rollouts/lease
  call the model, then POST /rollouts/ID/finish (docs/agents.md)
    OpenAI(base_url=rollout["base_url"], api_key=rollout["credential"])
  or over gRPC, in Python
    await Client("{gateway}", run_id="{layout.run_id}"{credentials}).lease_rollouts()
  for programs
    export SEAMFLOW_HTTP_GATEWAY={url} SEAMFLOW_GATEWAY={gateway} SEAMFLOW_RUN_ID={layout.run_id}"""


def base_url(config: LauncherConfig, layout: Layout) -> str:
    scheme = "http" if config.tls_ca_file is None else "https"
    return f"{scheme}://{layout.address('http_gateway')}"
