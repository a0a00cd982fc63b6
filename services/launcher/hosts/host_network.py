"""How the processes of one host reach those of the others."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import psutil

_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Without it each rank announces the address of its host's name, which is often loopback."""


def host_variables(
    address: str, hosts: Sequence[str], environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Variables for the processes of the host with `address`: no proxy between `hosts`, and the
    interface for collectives, where the user has not named one."""
    found = {}
    for name in ("no_proxy", "NO_PROXY"):
        given = [part.strip() for part in environment.get(name, "").split(",") if part.strip()]
        found[name] = ",".join(dict.fromkeys((*given, *hosts)))
    interface = _interface(address)
    return found | {
        name: interface for name in _INTERFACES if interface and name not in environment
    }


def _interface(address: str) -> str:
    """Name of the interface that has the address; empty: none has, or it is loopback."""
    if address.startswith("127."):
        return ""
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, has in interfaces if any(a.address == address for a in has)), "")
