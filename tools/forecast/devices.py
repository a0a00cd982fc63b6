"""The devices that a forecast knows, by the names of its flag --device."""

from __future__ import annotations

from services.chassis.errors import UsageError
from services.node_agent import known_devices
from services.node_agent.known_devices import USABLE, Device, devices

__all__ = ["USABLE", "Device", "device", "devices"]


def device(name: str) -> Device:
    """The device of a name.

    Raises:
        UsageError: it is not known; the message lists those that are.
    """
    try:
        return known_devices.device(name)
    except ValueError as error:
        raise UsageError(f"--device is {error}") from error
