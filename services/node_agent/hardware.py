"""The hardware of a node, for the scheduler's roofline: as configured, else by the GPUs' names."""

from __future__ import annotations

from collections.abc import Sequence

from seamflow.scheduler.v1 import scheduler_service_pb2 as pb

from services.chassis.log import get_logger
from services.lib.gpus import MEGABYTE, gpu_fields
from services.node_agent.config import NodeAgentConfig
from services.node_agent.known_devices import device, find_device


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
