"""Kinds of GPUs: known_devices.toml, found by the name that nvidia-smi gives them; or numbers."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.chassis.config.sources import nearest

_NUMBERS = {
    "memory": ("memory_bytes", 2**30),
    "tflops": ("flops", 1e12),
    "bandwidth": ("bandwidth", 1e9),
    "pcie": ("host_link", 1e9),
    "link": ("link", 1e9),
    "network": ("network", 1e9),
    "float32_tflops": ("float32_flops", 1e12),
    "price": ("price", 1.0),
}
"""Numbers that describe a device: the fields that they give, and their units."""
_FORM = (
    "memory=24,tflops=165,bandwidth=1008,pcie=32 in GiB, TFLOP/s of bfloat16 and GB/s; if known "
    "link and network in GB/s, float32_tflops and price"
)
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
    """The kind of a name, or of numbers such as `_FORM` shows.

    Raises:
        ValueError: it is not known; the message lists those that are, and the numbers.
    """
    if "=" in name:
        return _by_numbers(name)
    known = devices()
    if name not in known:
        raise ValueError(
            f"{name!r}: give one of {', '.join(known)}{nearest(name, known)}; or numbers: {_FORM}"
        )
    return known[name]


def _by_numbers(text: str) -> Device:
    """Links that are not given are as fast as PCIe, and float32 as bfloat16."""
    try:
        pairs = (part.split("=") for part in text.split(","))
        given = {_NUMBERS[name][0]: _NUMBERS[name][1] * float(value) for name, value in pairs}
        link, flops = given["host_link"], given["flops"]
        others = {"link": link, "network": link, "float32_flops": flops, "price": 0.0}
        values: dict[str, Any] = {**others, **given, "memory_bytes": int(given["memory_bytes"])}
        is_device = all(0 < each < math.inf for each in given.values())
    except (KeyError, ValueError, OverflowError):
        is_device = False
    if not is_device:
        raise ValueError(f"{text!r}: give numbers: {_FORM}")
    return Device(name=text, names=(), **values)


def find_device(name: str) -> Device | None:
    """The kind that nvidia-smi calls `name`; None: it is not known."""
    return next((each for each in devices().values() if name in each.names), None)
