"""Kinds of GPUs: known_devices.toml, found by the name that nvidia-smi gives them."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from services.chassis.config.sources import nearest

USABLE = 0.92
"""Share of a device's memory that tensors can have: the rest is CUDA's, NCCL's, and gaps between
tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A kind of device; fields as known_devices.toml describes them."""

    name: str
    names: tuple[str, ...]
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
    text = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    return {
        name: Device(name=name, **(table | {"names": tuple(table["names"])}))
        for name, table in tomllib.loads(text).items()
    }


def device(name: str) -> Device:
    """The kind of a name.

    Raises:
        ValueError: it is not known; the message lists those that are.
    """
    known = devices()
    if name not in known:
        raise ValueError(f"{name!r}: give one of {', '.join(known)}{nearest(name, known)}")
    return known[name]


def find_device(name: str) -> Device | None:
    """The kind that nvidia-smi calls `name`; None: it is not known."""
    return next((each for each in devices().values() if name in each.names), None)
