"""A device's roofline, and `train_priority` from that of a node (SeamlessFlow, arXiv 2508.11553,
tag scheduler: HBM bandwidth against peak FLOPs)."""

from __future__ import annotations

DECODE_INTENSITY = 8.0
"""FLOPs for each byte read while decoding long answers: the query heads that share a KV head."""
TRAIN_INTENSITY = 2048.0
"""FLOPs for each byte read while training: the tokens of a micro-batch that share a weight."""


def attained_flops(intensity: float, memory_bytes_per_second: float, flops: float) -> float:
    """FLOPs a second that a device attains: min(peak, intensity * bandwidth), the roofline.

    Args:
        intensity: FLOPs for each byte read.
        memory_bytes_per_second: of device memory.
        flops: peak of the device.
    """
    return min(flops, intensity * memory_bytes_per_second)


def train_priority(memory_bytes_per_second: float, flops: float) -> float:
    """How many times faster the node does an operation of training than one of decoding.

    Decoding is bound by bandwidth, training by FLOPs. Both are fastest if each node does what it is
    relatively better at, so the nodes with the highest ratio train. It is between 1 and
    TRAIN_INTENSITY / DECODE_INTENSITY.

    Example: H800 (3.35e12 B/s, 989e12 FLOP/s) 36.9; H20 (4.0e12, 148e12) 4.6.

    Args:
        memory_bytes_per_second: of the node's device memory; 0: unknown.
        flops: peak of the node in the training dtype; 0: unknown.

    Returns:
        The priority; 0 if either is unknown.
    """
    if not (memory_bytes_per_second > 0 and flops > 0):
        return 0.0
    training = attained_flops(TRAIN_INTENSITY, memory_bytes_per_second, flops)
    return training / attained_flops(DECODE_INTENSITY, memory_bytes_per_second, flops)
