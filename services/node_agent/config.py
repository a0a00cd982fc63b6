"""Configuration of the node agent, table `[node_agent]`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from services.chassis.config.load import ServerConfig

__all__ = ["NodeAgentConfig", "ProcessConfig", "WorkerConfig"]

_OWN_FIELDS = {"rollout": "rollout_server", "train": "trainer"}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """A worker of the node, an entry of `[[node_agent.workers]]`."""

    tag: str
    """What it does: "rollout", "train", or any tag, whose worker serves seamflow.worker.v1."""
    address: str
    """Where, as host:port."""
    run_id: str = ""
    """Training job it does it for; by default the node's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessConfig:
    """A process the node agent runs, a table `[node_agent.processes.<name>]`."""

    command: tuple[str, ...]
    """Arguments, the program first. It stays in the foreground."""
    address: str
    """Where the workers are that it serves, as host:port."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Set besides the node agent's own environment."""
    deactivate_seconds: float = 600.0
    """Longer than any of its steps: one that has not given the device back by then is killed."""
    end_seconds: float = 20.0
    """It is killed when it has not ended this long after SIGTERM."""

    def __post_init__(self) -> None:
        if not self.command:
            raise ValueError("command is empty: name the program")
        for name in ("deactivate_seconds", "end_seconds"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAgentConfig(ServerConfig):
    """What a node agent can be told."""

    port: int = 50057
    """gRPC port, for health checks; 0 takes a free one."""
    node_id: str
    """Name of the node, unique among all that share the scheduler."""
    run_id: str
    """Training job the node works for."""
    capability_tags: tuple[str, ...]
    """What the node can do: "rollout", "train", or any other tags."""
    scheduler: str = "127.0.0.1:50053"
    """Address of the scheduler."""
    rollout_server: str | None = None
    """Address of the node's rollout server; a worker with the tag "rollout"."""
    trainer: str | None = None
    """Address of the node's trainer, rank 0; a worker with the tag "train"."""
    workers: tuple[WorkerConfig, ...] = ()
    """Workers of other tags, and of other training jobs: `[{tag = "critic", address = "…"}]`."""
    processes: Mapping[str, ProcessConfig] = field(default_factory=dict)
    """Worker processes by name that are started, watched and ended here; others are left alone."""
    state_folder: Path | None = None
    """Where the processes are written down, for this node agent alone; needed with `processes`."""
    train_priority: float = 0.0
    """Higher: taken first for training; 0: the scheduler decides from the three that follow."""
    memory_bytes_per_second: float = 0.0
    """Bandwidth of the memory of all devices together; 0: not known."""
    flops: float = 0.0
    """Dense floating-point operations per second, training dtype, all devices; 0: not known."""
    device_bytes: int = 0
    """Memory of all devices together; 0: not known."""
    recheck_seconds: float = 5.0
    """How often the workers are made sure of, and measured."""

    def __post_init__(self) -> None:
        if not self.capability_tags or "" in self.capability_tags:
            raise ValueError("capability_tags is empty, or holds an empty tag: name at least one")
        self._check_workers()
        self._check_processes()
        for name in ("memory_bytes_per_second", "flops", "device_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}: it must not be below 0")
        if self.recheck_seconds <= 0:
            raise ValueError(f"recheck_seconds is {self.recheck_seconds}: it must be above 0")

    @property
    def all_workers(self) -> tuple[WorkerConfig, ...]:
        """Every worker, each with its training job."""
        return tuple(self._all_workers())

    def _all_workers(self) -> Iterator[WorkerConfig]:
        for tag, name in _OWN_FIELDS.items():
            if (address := getattr(self, name)) is not None:
                yield WorkerConfig(tag=tag, address=address, run_id=self.run_id)
        for worker in self.workers:
            run_id = worker.run_id or self.run_id
            yield WorkerConfig(tag=worker.tag, address=worker.address, run_id=run_id)

    def _check_workers(self) -> None:
        served = Counter((worker.tag, worker.run_id) for worker in self.all_workers)
        for (tag, run_id), count in served.items():
            if tag not in self.capability_tags:
                where = _OWN_FIELDS.get(tag, "workers")
                cure = f"add {tag!r} there, or take the worker out"
                raise ValueError(f"{where}: {tag!r} is none of capability_tags; {cure}")
            if count > 1:
                raise ValueError(f"workers: {count} of tag {tag!r} for run {run_id}: give one")
        for tag in self.capability_tags:
            if tag not in {served_tag for served_tag, _ in served}:
                where = _OWN_FIELDS.get(tag, f"workers, with tag = {tag!r}")
                raise ValueError(
                    f"capability_tags holds {tag!r}, but no worker does it: set {where}"
                )

    def _check_processes(self) -> None:
        if self.processes and self.state_folder is None:
            raise ValueError("state_folder is not set: processes are written down there; name one")
        addresses = {worker.address for worker in self.all_workers}
        served = Counter(process.address for process in self.processes.values())
        for name, process in self.processes.items():
            if process.address not in addresses:
                known = ", ".join(sorted(addresses))
                raise ValueError(
                    f"processes.{name}.address is {process.address}: use one of {known}"
                )
            if served[process.address] > 1:
                raise ValueError(
                    f"processes.{name}.address is {process.address}: another has it too"
                )
