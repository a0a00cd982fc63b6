"""Device memory that SGLang holds, and what a release of it freed.

A release is believed only if it was seen: SGLang answers 200 also without its memory saver, and
the trainer would then be given memory that is still occupied.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import Any

from rollout.server.engines.engine import MemoryNotReleased
from services.chassis.log import get_logger
from services.lib.gpus import MEGABYTE, gpu_fields

UsedBytes = Callable[[], Awaitable[int | None]]
"""Measures the bytes in use on the devices; None: they cannot be measured."""

_GIGABYTE = 1 << 30
_FREED_PART = 0.9
"""Of weights and cache: SGLang rounds what it reports, and others may take a little meanwhile."""


async def used_bytes() -> int | None:
    """Bytes in use on the devices of this process, by whatever process, as nvidia-smi says."""
    rows = await gpu_fields("memory.used", os.environ.get("CUDA_VISIBLE_DEVICES"))
    if not rows or not all(used.isdecimal() for (used, *_) in rows):
        return None
    return sum(int(used) for (used, *_) in rows) * MEGABYTE


async def on_another_host() -> None:
    """An SGLang at a URL may be on another host, where nothing can be measured from here."""


def has_device(server: dict[str, Any]) -> bool:
    """Whether `server`, the answer of /server_info, computes on a device with memory of its own."""
    return bool(server.get("device", "cuda") != "cpu")


def require_memory_saver(server: dict[str, Any]) -> None:
    """Raise `MemoryNotReleased` if a release of `server` would free nothing."""
    if has_device(server) and not server.get("enable_memory_saver"):
        raise MemoryNotReleased(
            "SGLang runs without its memory saver, so that a release frees nothing: set "
            "rollout_server.lends_device = true, or start the SGLang at sglang_url with "
            "--enable-memory-saver"
        )


def num_devices(server: dict[str, Any]) -> int:
    """Devices of `server`: tensor times pipeline times data parallel."""
    sizes = [int(server.get(f"{name}_size") or 1) for name in ("tp", "pp", "dp")]
    # With data-parallel attention its ranks are among those of tensor parallelism.
    return sizes[0] * sizes[1] * (1 if server.get("enable_dp_attention") else sizes[2])


def held_bytes(server: dict[str, Any], model_bytes: int) -> int:
    """Bytes of weights and cache on all devices of `server`; 0: it has none.

    Of the weights what SGLang reports, but no more than `model_bytes`, the files' size: it counts
    all that was allocated while it loaded them.
    """
    if not has_device(server):
        return 0
    states = server.get("internal_states") or []
    usage = [state.get("memory_usage") or {} for state in states]
    part = num_devices(server) * _GIGABYTE / max(1, len(usage))
    weights, cache = (
        sum(float(each.get(name) or 0) for each in usage) * part for name in ("weight", "kvcache")
    )
    return int(min(weights or model_bytes, model_bytes) + cache)


def check_freed(held: int, before: int | None, after: int | None) -> int:
    """Return the bytes that a release freed; those held where they cannot be measured.

    Raises:
        MemoryNotReleased: fewer than nine tenths of the bytes held.
    """
    if not held:
        return 0
    if before is None or after is None:
        get_logger().warning("release_not_measured", believed_bytes=held)
        return held
    freed = before - after
    if freed < _FREED_PART * held:
        raise MemoryNotReleased(
            f"SGLang released {max(freed, 0) / _GIGABYTE:.2f} of the {held / _GIGABYTE:.2f} GiB "
            "that weights and cache hold on the device, so the node keeps it: check that "
            "torch_memory_saver works in SGLang's environment (its log says why not)"
        )
    return freed
