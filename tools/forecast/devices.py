"""The devices that a forecast knows: devices.toml."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from services.chassis.config.sources import nearest
from services.chassis.errors import UsageError

__all__ = ["USABLE", "Device", "device", "devices"]

USABLE = 0.92
"""Share of a device's memory that tensors can have: the rest is CUDA's, NCCL's, and gaps between
tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A kind of device; fields as devices.toml describes them."""

    name: str
    memory_bytes: int
    flops: float
    float32_flops: float
    bandwidth: float
    link: float
    network: float
    host_link: float
    price: float

    @property
    def usable_bytes(self) -> int:
        """Bytes that tensors can have."""
        return int(USABLE * self.memory_bytes)

    def peak(self, dtype: str) -> float:
        """Peak FLOP/s in a type of the trainer."""
        return self.flops if dtype == "bfloat16" else self.float32_flops


def devices() -> Mapping[str, Device]:
    """All that are known, by name."""
    text = Path(__file__).with_name("devices.toml").read_text(encoding="utf-8")
    return {name: Device(name=name, **table) for name, table in tomllib.loads(text).items()}


def device(name: str) -> Device:
    """The device of a name.

    Raises:
        UsageError: it is not known; the message lists those that are.
    """
    known = devices()
    if name not in known:
        raise UsageError(
            f"--device is {name!r}: give one of {', '.join(known)}{nearest(name, known)}"
        )
    return known[name]
