"""Wires the node agent together: `python -m services.node_agent`."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from seamflow.scheduler.v1 import scheduler_service_pb2 as pb

from services.chassis.log import get_logger
from services.chassis.rpc.clients import channel
from services.chassis.rpc.server import Service, run
from services.lib.gpus import MEGABYTE, gpu_fields
from services.node_agent.agent import Lease, NodeAgent, Reporter
from services.node_agent.config import NodeAgentConfig
from services.node_agent.known_devices import device, find_device
from services.node_agent.process_journal import ProcessJournal
from services.node_agent.switcher import Switcher
from services.node_agent.worker_clients import (
    Activity,
    JointActivity,
    Role,
    SupervisedActivity,
    activity,
)
from services.node_agent.worker_process import WorkerProcess, WorkerProcesses

RECHECK_SECONDS = 5.0
"""Time between two checks and measurements of the workers."""


def main() -> None:
    run("node_agent", NodeAgentConfig, build)


@asynccontextmanager
async def build(
    config: NodeAgentConfig, agent_class: type[NodeAgent] = NodeAgent
) -> AsyncIterator[Service]:
    """Connect to scheduler and workers, and end processes left by an earlier node agent."""
    async with AsyncExitStack() as stack:
        processes = await stack.enter_async_context(
            _supervised(
                config,
                epoch=lambda: switcher.status.epoch,
                changed=lambda: switcher.recheck(),  # noqa: PLW0108 -- defined below
            )
        )
        activities = await _activities(config, processes.by_address, stack)
        lease = Lease(time.monotonic)
        switcher = Switcher(
            activities,
            may_activate=lambda: not agent.lease_expired(),
            clock=time.monotonic,
            recheck_seconds=RECHECK_SECONDS,
        )
        agent = agent_class(
            registration=_registration(config, await hardware(config)),
            scheduler=await stack.enter_async_context(channel(config, config.scheduler)),
            switcher=switcher,
            reporter=Reporter(activities, processes.resident_bytes, RECHECK_SECONDS),
            lease=lease,
            clock=time.monotonic,
        )

        async def is_registered() -> bool:
            return agent.registered.is_set()

        background = [processes.run, agent.run]
        yield Service(background=background, ready=is_registered, drain=agent.drain)


@asynccontextmanager
async def _supervised(
    config: NodeAgentConfig, epoch: Callable[[], int], changed: Callable[[], None]
) -> AsyncIterator[WorkerProcesses]:
    """The node's worker processes, ended at exit; after a kill, by the next node agent."""
    if config.state_folder is None:
        yield WorkerProcesses({})
        return
    async with ProcessJournal(config.state_folder) as journal:
        by_address = {
            plan.address: WorkerProcess(
                name,
                plan,
                config.environment_of(plan),
                journal=journal,
                epoch=epoch,
                changed=changed,
                clock=time.monotonic,
            )
            for name, plan in config.processes.items()
        }
        async with WorkerProcesses(by_address) as processes:
            yield processes


async def _activities(
    config: NodeAgentConfig, processes: Mapping[str, WorkerProcess], stack: AsyncExitStack
) -> dict[Role, Activity]:
    """The activities of the node's workers, by role."""
    found = defaultdict[Role, list[Activity]](list)
    for worker in config.all_workers:
        connection = await stack.enter_async_context(channel(config, worker.address))
        one = activity(worker.tag, connection, config.node_id)
        process = processes.get(worker.address)
        if process is not None:
            if worker.tag == "rollout" and worker.run_id != config.run_id:
                # Rollout servers start with the device: those of one run only at first.
                process.set_restart(False)
            one = SupervisedActivity(one, process, time.monotonic)
        found[Role(worker.tag, worker.run_id)].append(one)
    return {
        role: each[0] if len(each) == 1 else JointActivity(each) for role, each in found.items()
    }


def _registration(config: NodeAgentConfig, hardware: pb.Hardware) -> pb.RegisterNodeRequest:
    return pb.RegisterNodeRequest(
        node_id=config.node_id,
        run_id=config.run_id,
        capability_tags=config.capability_tags,
        workers=[
            pb.Worker(
                tag=worker.tag,
                address=worker.address,
                run_id="" if worker.run_id == config.run_id else worker.run_id,
            )
            for worker in config.all_workers
        ],
        train_priority=config.train_priority,
        hardware=hardware,
    )


async def hardware(config: NodeAgentConfig) -> pb.Hardware:
    """Bandwidth, FLOP/s and memory of all GPUs of the node together; 0: unknown."""
    found = _of_kind(config) if config.kind else await _found(config.gpus)
    return pb.Hardware(
        memory_bytes_per_second=config.memory_bytes_per_second or found.memory_bytes_per_second,
        flops=config.flops or found.flops,
        device_bytes=config.device_bytes or found.device_bytes,
    )


def _of_kind(config: NodeAgentConfig) -> pb.Hardware:
    kind, number = device(config.kind), len(config.gpus) or 1
    return pb.Hardware(
        memory_bytes_per_second=number * kind.bandwidth,
        flops=number * kind.flops,
        device_bytes=number * kind.memory_bytes,
    )


async def _found(gpus: Sequence[int]) -> pb.Hardware:
    """What nvidia-smi and the table of known devices say."""
    found = pb.Hardware()
    rows = await _named(gpus) if gpus else []
    kinds = [find_device(name) for name, _ in rows]
    found.device_bytes = sum(num_bytes for _, num_bytes in rows)
    known = [kind for kind in kinds if kind is not None]
    if len(known) == len(gpus):
        found.flops = sum(kind.flops for kind in known)
        found.memory_bytes_per_second = sum(kind.bandwidth for kind in known)
    else:
        cure = "set flops and memory_bytes_per_second of [node_agent]"
        get_logger().warning("hardware_unknown", names=[name for name, _ in rows], cure=cure)
    return found


async def _named(gpus: Sequence[int]) -> list[tuple[str, int]]:
    """Name and bytes of each GPU; empty without nvidia-smi."""
    rows = await gpu_fields("name,memory.total", ",".join(map(str, gpus)))
    if not all(row[-1].isdecimal() for row in rows):
        return []
    return [(",".join(name), int(size) * MEGABYTE) for *name, size in rows]
