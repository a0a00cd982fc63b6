"""Node agent settings, table [node_agent]."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from services.chassis.config.settings import ServerConfig, Settings
from services.lib.gpus import seeing_gpus
from services.node_agent.known_devices import device

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_OWN_FIELDS = {"rollout": "rollout_server", "train": "trainer"}


class WorkerConfig(Settings):
    """A worker of the node, an entry of `[[node_agent.workers]]`."""

    tag: str
    """Activity tag: "rollout", "train", or any other, whose worker serves seamflow.worker.v1."""
    address: str
    """Its address, as host:port."""
    run_id: str = ""
    """Training job it works for; by default the node's own."""


class ProcessConfig(Settings):
    """A process the node agent runs, a table `[node_agent.processes.<name>]`."""

    command: tuple[str, ...] = Field(min_length=1)
    """Program and arguments. The program stays in the foreground."""
    address: str
    """Address of the workers it serves, as host:port."""
    environment: Mapping[str, str] = Field(default={})
    """Variables added to the node agent's own environment."""
    deactivate_seconds: float = Field(600.0, gt=0)
    """Time to release the device, longer than any of its steps; then it is killed."""
    end_seconds: float = Field(20.0, gt=0)
    """Time to end after SIGTERM; then it is killed."""


class NodeAgentConfig(ServerConfig):
    """Settings of a node agent."""

    port: int = Field(50057, ge=0, le=65535)
    """gRPC port, for health checks; 0 takes a free one."""
    node_id: str
    """Name of the node, unique among all that share the scheduler."""
    run_id: str
    """Training job the node works for."""
    capability_tags: tuple[str, ...]
    """Capability tags of the node: "rollout", "train", or any other."""
    scheduler: str = "127.0.0.1:50053"
    """Address of the scheduler."""
    rollout_server: str | None = None
    """Address of the node's rollout server; a worker with the tag "rollout"."""
    trainer: str | None = None
    """Address of the node's trainer, rank 0; a worker with the tag "train"."""
    workers: tuple[WorkerConfig, ...] = ()
    """Workers with other tags, for other training jobs, or further rollout servers:
    `[{tag = "critic", address = "…"}]`."""
    processes: Mapping[str, ProcessConfig] = Field(default={})
    """Worker processes by name that this node agent starts, restarts and ends."""
    gpus: tuple[int, ...] = ()
    """GPUs of the node, by the numbers of nvidia-smi. Its processes see just these, unless they
    have a CUDA_VISIBLE_DEVICES of their own; none: those that the node agent sees."""
    state_folder: Path | None = None
    """Folder of the process journal, for this node agent alone; required with `processes`."""
    train_priority: float = Field(0.0, ge=0)
    """Nodes with a higher priority train first; 0: computed from the next settings. Those that are
    0 are found by the names of `gpus`, as far as these are known."""
    kind: str = ""
    """Kind of the node's devices in known_devices.toml, such as "h20-96": its flops, bandwidth and
    memory, for each of `gpus`, or once. Empty: the kind that nvidia-smi names."""
    memory_bytes_per_second: float = Field(0.0, ge=0)
    """Memory bandwidth of all devices together; 0: unknown."""
    flops: float = Field(0.0, ge=0)
    """Dense floating-point operations per second, training dtype, all devices; 0: unknown."""
    device_bytes: int = Field(0, ge=0)
    """Memory of all devices together; 0: unknown."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.capability_tags or "" in self.capability_tags:
            raise ValueError("capability_tags is empty, or holds an empty tag: name at least one")
        self._check_kind()
        self._check_workers()
        self._check_processes()
        return self

    def _check_kind(self) -> None:
        try:
            _ = self.kind and device(self.kind)
        except ValueError as error:
            raise ValueError(f"kind is {error}") from error

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
        for worker, number in Counter(self.all_workers).items():
            if number > 1:
                raise ValueError(f"workers: {worker.tag!r} at {worker.address} is given twice")
        for (tag, run_id), count in served.items():
            if tag not in self.capability_tags:
                where = _OWN_FIELDS.get(tag, "workers")
                cure = f"add {tag!r} there, or take the worker out"
                raise ValueError(f"{where}: {tag!r} is none of capability_tags; {cure}")
            if count > 1 and tag != "rollout":
                raise ValueError(f"workers: {count} of tag {tag!r} for run {run_id}: give one")
        for tag in self.capability_tags:
            if tag not in {served_tag for served_tag, _ in served}:
                where = _OWN_FIELDS.get(tag, f"workers, with tag = {tag!r}")
                raise ValueError(
                    f"capability_tags holds {tag!r}, but no worker does it: set {where}"
                )

    def _check_processes(self) -> None:
        if self.processes and self.state_folder is None:
            raise ValueError(
                "state_folder is not set: processes are journaled there; name a folder"
            )
        self._check_gpus()
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

    def environment_of(self, process: ProcessConfig) -> Mapping[str, str]:
        """Variables of a process, the GPUs that it sees among them."""
        visible = seeing_gpus(self.gpus) if self.gpus else {}
        return {**visible, **process.environment}

    def _check_gpus(self) -> None:
        for name, process in self.processes.items():
            visible = filter(None, process.environment.get(_VISIBLE, "").split(","))
            others = sorted(set(visible) - set(map(str, self.gpus)))
            if self.gpus and others:
                raise ValueError(
                    f"processes.{name}.environment has {_VISIBLE} with {', '.join(others)}, which "
                    f"gpus {list(self.gpus)} of the node does not have: use those"
                )
