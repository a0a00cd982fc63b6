"""The devices that a forecast knows, by the names of its flag --device."""

from __future__ import annotations

from services.chassis.config.sources import nearest
from services.chassis.errors import UsageError
from services.node_agent.known_devices import USABLE, Device, devices

__all__ = ["USABLE", "Device", "device", "devices"]


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
