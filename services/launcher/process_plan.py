"""The processes of a run and their settings; pure, so that a dry run can show them."""

from __future__ import annotations

import errno
import secrets
import socket
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from services.launcher.config import REFERENCE_COLUMN, LauncherConfig, NodePlan

__all__ = ["Layout", "ProcessPlan", "free_ports", "plan"]

SERVICES = ("redis", "trajectory_manager", "weights", "scheduler", "rollout_gateway", "trainer")
_PORTS = range(20_000, 32_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlan:
    """One child process."""

    name: str
    """Unique in the run; names its log."""
    command: tuple[str, ...]
    """Arguments, the program first."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to the launcher's own environment."""
    restarts: bool = True
    """Restarted when it crashes; a clean exit means it has finished."""
    optional: bool = False
    """The run continues without it when it crashes too often."""
    check: tuple[str, ...] | None = None
    """Command that checks the configuration without starting anything."""


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
    """By service, and "rollout_server/<node>" for each rollout server."""
    redis_url: str
    """The store."""

    def address(self, name: str) -> str:
        """host:port of a process."""
        return f"127.0.0.1:{self.ports[name]}"

    def addresses(self) -> dict[str, str]:
        """Addresses of the services, for tools."""
        names = (name for name in self.ports if name != "redis" and "/" not in name)
        return {name: self.address(name) for name in names}

    def path(self, text: str) -> str:
        """A configured path with "{run}" filled in."""
        return text.replace("{run}", str(self.folder))


def free_ports(config: LauncherConfig) -> dict[str, int]:
    """A free port for each process, chosen once so that a restarted process keeps its address.

    Below the ephemeral range, so that no outgoing connection can take it first.
    """
    servers = [_server_name(node) for node in config.node_plans() if "rollout" in node.tags]
    optional = {"ranker": config.ranker, "scoring": config.reference is not None}
    chosen = [name for name, is_chosen in optional.items() if is_chosen]
    with ExitStack() as stack:
        ports = {}
        for name in (*SERVICES, *chosen, *servers):
            listener = stack.enter_context(socket.socket())
            while True:
                ports[name] = secrets.choice(_PORTS)
                try:
                    listener.bind(("127.0.0.1", ports[name]))
                except OSError as error:
                    if error.errno != errno.EADDRINUSE:
                        raise
                else:
                    break
        return ports


def plan(config: LauncherConfig, layout: Layout) -> dict[str, ProcessPlan]:
    """All processes by name, in the order they are started."""
    processes = [
        _service(
            "trajectory_manager",
            "trajectory_manager",
            layout,
            redis_url=layout.redis_url,
            durability=config.durability,
        ),
        _service(
            "weights",
            "services.weights",
            layout,
            redis_url=layout.redis_url,
            folder=layout.folder / "weights",
        ),
        _service("scheduler", "scheduler", layout, redis_url=layout.redis_url),
        *([_ranker(layout)] if config.ranker else []),
        *([_scoring(config.reference, layout)] if config.reference is not None else []),
        _gateway(config, layout),
        *[
            _rollout_server(node, config, layout)
            for node in config.node_plans()
            if "rollout" in node.tags
        ],
        _trainer(config, layout),
        *[_node_agent(node, layout) for node in config.node_plans()],
        _agent_runner(config, layout),
        _dataloader(config, layout),
    ]
    return {process.name: process for process in processes}


def _service(name: str, module: str, layout: Layout, **settings: object) -> ProcessPlan:
    environment = _environment(name, port=layout.ports[name], **settings)
    return _process(name, module, layout, environment)


def _process(name: str, module: str, layout: Layout, environment: Mapping[str, str]) -> ProcessPlan:
    command = (sys.executable, "-m", module, "--config", str(layout.config_file))
    check = (*command, "--check-config")
    return ProcessPlan(name=name, command=command, environment=environment, check=check)


def _ranker(layout: Layout) -> ProcessPlan:
    ranker = _service(
        "ranker",
        "services.ranker",
        layout,
        run_id=layout.run_id,
        trajectory_manager=layout.address("trajectory_manager"),
    )
    return replace(ranker, optional=True)


def _scoring(model: str, layout: Layout) -> ProcessPlan:
    return _service(
        "scoring",
        "services.scoring",
        layout,
        run_id=layout.run_id,
        column=REFERENCE_COLUMN,
        model=layout.path(model),
        trajectory_manager=layout.address("trajectory_manager"),
    )


def _gateway(config: LauncherConfig, layout: Layout) -> ProcessPlan:
    lengths = {"lengths": "ranker", "ranker": layout.address("ranker")} if config.ranker else {}
    return _service(
        "rollout_gateway",
        "rollout.gateway",
        layout,
        run_id=layout.run_id,
        model=layout.path(config.model),
        trajectory_manager=layout.address("trajectory_manager"),
        scheduler=layout.address("scheduler"),
        weights=layout.address("weights"),
        # Made here so that a restarted gateway derives the same credentials.
        credential_secret=secrets.token_hex(32),
        **lengths,
    )


def _rollout_server(node: NodePlan, config: LauncherConfig, layout: Layout) -> ProcessPlan:
    name = _server_name(node)
    environment = _environment(
        "rollout_server",
        instance=node.node_id,
        server_id=node.node_id,
        port=layout.ports[name],
        run_id=layout.run_id,
        model=layout.path(config.model),
        weights=layout.address("weights"),
        cache_folder=layout.folder / "cache" / node.node_id,
    )
    return _process(name.replace("/", "-"), "rollout.server", layout, environment)


def _trainer(config: LauncherConfig, layout: Layout) -> ProcessPlan:
    reference = (
        {} if config.reference is None else {"algorithm__reference_column": REFERENCE_COLUMN}
    )
    environment = _environment(
        "trainer",
        port=layout.ports["trainer"],
        run_id=layout.run_id,
        model=layout.path(config.model),
        trajectory_manager=layout.address("trajectory_manager"),
        weights=layout.address("weights"),
        scheduler=layout.address("scheduler"),
        checkpoint__folder=layout.folder / "checkpoints",
        tracking__metrics_file=layout.folder / "metrics.jsonl",
        seed=config.seed,
        # A restarted trainer continues; an older run's checkpoint is only here with --resume.
        resume="true",
        # The launcher ends the run, after the last evaluation.
        end_run="false",
        **reference,
    )
    trainer = _process("trainer", "trainer", layout, environment)
    if config.trainer_ranks == 1:
        return trainer
    ranks = f"--nproc-per-node={config.trainer_ranks}"
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", ranks)
    return replace(trainer, command=(*torchrun, *trainer.command[1:]))


def _node_agent(node: NodePlan, layout: Layout) -> ProcessPlan:
    workers = {}
    if "rollout" in node.tags:
        workers["rollout_server"] = layout.address(_server_name(node))
    if "train" in node.tags:
        workers["trainer"] = layout.address("trainer")
    environment = _environment(
        "node_agent",
        instance=node.node_id,
        port=0,
        node_id=node.node_id,
        run_id=layout.run_id,
        scheduler=layout.address("scheduler"),
        capability_tags=",".join(node.tags),
        **workers,
    )
    return _process(f"node_agent-{node.node_id}", "services.node_agent", layout, environment)


def _agent_runner(config: LauncherConfig, layout: Layout) -> ProcessPlan:
    environment = _environment(
        "agent_runner",
        agent=config.agent,
        run_id=layout.run_id,
        gateway=layout.address("rollout_gateway"),
        concurrency=config.concurrency,
        rollout_timeout=config.rollout_timeout,
        token_log=layout.folder / "received.jsonl",
    )
    loads = f"from seamflow.runner import load_agent; load_agent({config.agent!r})"
    return ProcessPlan(
        name="agent_runner",
        command=(sys.executable, "-m", "seamflow.runner"),
        environment=environment,
        check=(sys.executable, "-c", loads),
    )


def _dataloader(config: LauncherConfig, layout: Layout) -> ProcessPlan:
    environment = _environment(
        "dataloader",
        port=0,
        run_id=layout.run_id,
        trajectory_manager=layout.address("trajectory_manager"),
        tasks=layout.path(config.tasks),
        state_file=layout.folder / "dataloader.json",
        seed=config.seed,
        resume="true",
    )
    return _process("dataloader", "services.dataloader", layout, environment)


def _environment(table: str, **settings: object) -> dict[str, str]:
    return {f"SEAMFLOW_{table.upper()}_{name.upper()}": str(v) for name, v in settings.items()}


def _server_name(node: NodePlan) -> str:
    return f"rollout_server/{node.node_id}"
